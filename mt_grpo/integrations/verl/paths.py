"""The import paths of verl's tools and interactions, for files that use them if verl is not installed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

from mt_grpo.integrations.verl import builtin, schemas
from mt_grpo.integrations.verl.base import BaseInteraction, BaseTool, FunctionTool, function_tool
from mt_grpo.integrations.verl.search import perform_single_search_batch

SCHEMAS = {name: value for name, value in vars(schemas).items() if name.startswith(("OpenAI", "ToolResponse"))}
OURS = ("verl.tools.function_tool",)  # even if verl is installed: its own does not know the functions of this run
PACKAGES = ("verl", "verl.tools", "verl.tools.utils", "verl.interactions", "verl.utils", "verl.utils.reward_score")
MODULES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(PACKAGES, {}),
    "verl.tools.base_tool": {"BaseTool": BaseTool, **SCHEMAS},
    "verl.tools.schemas": SCHEMAS,
    "verl.tools.function_tool": {"function_tool": function_tool, "FunctionTool": FunctionTool},
    "verl.tools.gsm8k_tool": {"Gsm8kTool": builtin.Gsm8kTool},
    "verl.tools.search_tool": {"SearchTool": builtin.SearchTool},
    "verl.tools.utils.search_r1_like_utils": {"perform_single_search_batch": perform_single_search_batch},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": builtin.Gsm8kInteraction},
    "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
    "verl.utils.reward_score.gsm8k": {
        "compute_score": builtin.compute_score,
        "extract_solution": builtin.extract_solution,
    },
}


class VerlPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `MODULES` that no installed verl has."""

    def __init__(self):
        self.beside: dict[str, str] = {}  # files next to a YAML that stand for modules of verl, by their names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of verl. None for others, and for those that another finder has."""
        if name in self.beside:
            return importlib.util.spec_from_file_location(name, self.beside[name])
        if name not in MODULES:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        specs = [spec for each in others if (spec := each.find_spec(name, path)) is not None]
        # INVARIANT: a folder `verl` without __init__.py, such as tools/verl, is not verl, but Python finds it.
        if name not in OURS and any(spec.origin is not None for spec in specs):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill the module with its names."""
        vars(module).update(MODULES[module.__name__])


def install(module: str = "", folder: str = "") -> None:
    """Let `import verl...` find these modules. The one that a YAML names may be a file in the YAML's folder."""
    finder = next((each for each in sys.meta_path if isinstance(each, VerlPaths)), None)
    if finder is None:
        finder = VerlPaths()
        sys.meta_path.insert(0, finder)
    package, _, name = module.rpartition(".")
    file = os.path.join(folder, f"{name}.py")
    if package in ("verl.tools", "verl.interactions") and module not in OURS and os.path.isfile(file):
        finder.beside[module] = file
