"""What plug-ins of other frameworks import: names that official files of verl need, and the imports of a file."""

import ast

import pytest

from mt_grpo.integrations.plugin_imports import imports_of
from mt_grpo.integrations.verl import paths as verl_paths
from mt_grpo.integrations.verl.config import load_function_tools, load_tools_config

IMPORTS = """
from verl.interactions.base import BaseInteraction
from verl.interactions.gsm8k_interaction import Gsm8kInteraction
from verl.interactions.utils.interaction_registry import get_interaction_class, initialize_interactions_from_config
from verl.interactions.weather_interaction import WeatherInteraction
from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from verl.tools.geo3k_tool import Geo3kTool
from verl.tools.gsm8k_tool import Gsm8kTool
from verl.tools.image_zoom_in_tool import ImageZoomInTool
from verl.tools.mcp_base_tool import MCPBaseTool
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.schemas import OpenAIFunctionToolCall, OpenAIFunctionToolSchema, ToolResponse
from verl.tools.search_tool import SearchTool
from verl.tools.utils.search_r1_like_utils import perform_single_search_batch
from verl.tools.utils.tool_registry import initialize_tools_from_config
from verl.utils.reward_score import default_compute_score, gsm8k, math_reward, sandbox_fusion
from verl.utils.reward_score.gsm8k import compute_score
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed
from verl.utils.reward_score.sandbox_fusion.utils import check_correctness
from verl.utils.reward_score.search_r1_like_qa_em import em_check
"""


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_a_name_that_official_files_import_is_there(line):
    verl_paths.install()
    exec(line, {})


def test_unknown_imports_of_verls_files_are_refused_too(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text("""
from verl.tools.function_tool import function_tool
@function_tool
def add(a: int) -> int:
    \"\"\"Adds.

    Args:
        a: A number.
    \"\"\"
    from verl.utils.nothing import such
""")
    verl_paths.install()
    with pytest.raises(ValueError, match="function_tool_path: .* do not exist: line 10: verl.utils.nothing.such"):
        load_function_tools(str(path))
    config = tmp_path / "tools.yaml"
    config.write_text("tools:\n  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool\n    config: {}\n")
    with pytest.raises(ValueError, match="SandboxFusionTool of verl is not supported here"):
        load_tools_config(str(config))


TRIES = """
try:
    import verl.tried
except ImportError:
    from verl import otherwise
else:
    import verl.then
finally:
    import verl.always
if TYPE_CHECKING:
    from verl import checked
def later():
    try:
        import verl.wrong_kind, other.module
    except ValueError:
        pass
    with open("x"):
        from verl.inner import one, two
    from .verl import own
"""


def test_all_imports_of_a_file_are_found_but_for_those_that_it_tries():
    """Each part of a `try` but the body, if what may fail there is caught."""
    assert list(map(str, imports_of(ast.parse(TRIES), "verl"))) == [
        "line 5: verl.otherwise", "line 7: verl.then", "line 9: verl.always", "line 14: verl.wrong_kind",
        "line 18: verl.inner.one", "line 18: verl.inner.two",
    ]  # fmt: skip
