"""The import paths of verl's tools and interactions, for files that use them where verl is not installed.

Python asks its own finders first. So an installed verl, or a file that stands beside a YAML, is found as always.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

from mt_grpo.integrations.verl import builtin, schemas
from mt_grpo.integrations.verl.base import BaseInteraction, BaseTool, FunctionTool, function_tool, rollout_trace_op
from mt_grpo.integrations.verl.mcp import MCPBaseTool, MCPSearchTool
from mt_grpo.integrations.verl.scores import SCORE_MODULES, absent_of_verl
from mt_grpo.integrations.verl.search import call_search_api, passages, perform_single_search_batch

SCHEMAS = {name: each for name, each in vars(schemas).items() if name.startswith(("OpenAI", "ToolResponse"))}
SCORES = {"compute_score": builtin.compute_score, "extract_solution": builtin.extract_solution}
SEARCH = {"perform_single_search_batch": perform_single_search_batch, "call_search_api": call_search_api,
          "_passages2string": passages}  # fmt: skip
WORKERS = ("PoolMode", "TokenBucketWorker")  # of verl's tools that ask a server by ray


def class_of(cls_name: str) -> type:
    """The class of a dotted path."""
    module, _, name = cls_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


MODULES: dict[str, dict[str, Any]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": BaseTool, **SCHEMAS},
    "verl.tools.schemas": SCHEMAS,
    "verl.tools.function_tool": {"function_tool": function_tool, "FunctionTool": FunctionTool},
    "verl.tools.gsm8k_tool": {"Gsm8kTool": builtin.Gsm8kTool},
    "verl.tools.geo3k_tool": absent_of_verl("Geo3kTool"),
    "verl.tools.search_tool": {
        "SearchTool": builtin.SearchTool,
        **absent_of_verl("SearchExecutionWorker", "init_search_execution_pool", *WORKERS)},
    "verl.tools.sandbox_fusion_tools": absent_of_verl(
        "SandboxFusionTool", "ExecutionWorker", "init_execution_pool", *WORKERS),
    "verl.tools.image_zoom_in_tool": absent_of_verl(
        "ImageZoomInTool", "VisualExecutionWorker", "init_visual_execution_pool", *WORKERS),
    "verl.tools.utils.tool_registry": {
        "get_tool_class": class_of,
        **absent_of_verl("ToolType", "initialize_tools_from_config", "initialize_mcp_tool")},
    "verl.tools.mcp_base_tool": {"MCPBaseTool": MCPBaseTool},
    "verl.tools.mcp_search_tool": {"MCPSearchTool": MCPSearchTool},
    "verl.tools.utils": {},
    "verl.tools.utils.search_r1_like_utils": SEARCH,
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": builtin.Gsm8kInteraction},
    "verl.interactions.weather_interaction": {"WeatherInteraction": builtin.WeatherInteraction},
    "verl.interactions.utils": {},
    "verl.interactions.utils.interaction_registry": {
        "get_interaction_class": class_of, **absent_of_verl("initialize_interactions_from_config")},
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
    **SCORE_MODULES,
    "verl.utils.reward_score.gsm8k": SCORES,
}  # fmt: skip
PACKAGES = ("verl.tools", "verl.interactions")  # whose classes a YAML names


class VerlPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of `MODULES` where verl is not installed.

    Attributes:
        beside: Files that stand for modules of verl, by their names.
    """

    def __init__(self):
        self.beside: dict[str, str] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """For a module of verl that nobody else has found."""
        if name in self.beside:
            return importlib.util.spec_from_file_location(name, self.beside[name])
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in MODULES else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill the module with the names that are offered."""
        vars(module).update(MODULES[module.__name__])


def install(module: str = "", folder: str = "") -> None:
    """Have `import verl...` find these modules where there are no others.

    Args:
        module: One that a YAML names. Of verl's tools and interactions it may be a file.
        folder: The YAML's, where that file may stand. No other module is looked for there.
    """
    finder = next((each for each in sys.meta_path if isinstance(each, VerlPaths)), None)
    if finder is None:
        finder = VerlPaths()
        sys.meta_path.append(finder)
    # INVARIANT: a folder `verl` without __init__.py, as tools/verl, is not verl. Python would take it for a package.
    others = [each for each in sys.meta_path if each is not finder and hasattr(each, "find_spec")]
    found = next((spec for each in others if (spec := each.find_spec("verl", None))), None)
    if found is None or found.origin is None:
        sys.meta_path.remove(finder)
        sys.meta_path.insert(0, finder)
        spec = getattr(sys.modules.get("verl"), "__spec__", None)
        if spec is not None and spec.origin is None and spec.loader is not finder:
            del sys.modules["verl"]
    package, _, name = module.rpartition(".")
    file = os.path.join(folder, f"{name}.py")
    if package in PACKAGES and os.path.isfile(file):
        finder.beside[module] = file
    else:
        finder.beside.pop(module, None)


def use_built_in(name: str) -> None:
    """Have a module of verl be what is built in, whatever else there is."""
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(MODULES[name])


def tool_schema_class() -> type:
    """The class of a tool's schema: an installed verl's own, which its tools may check for."""
    return importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema
