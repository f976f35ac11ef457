"""Tools, rewards and environments from files that a recipe names by path."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import run_async
from mt_grpo.base.files import absolute
from mt_grpo.conversation.environments import check_environment
from mt_grpo.conversation.tools.processes import ToolProcesses
from mt_grpo.conversation.tools.signature import named_tools
from mt_grpo.rollout import Turn
from mt_grpo.training.rewards import check_rewards, named_apart


def module_name(path: str, key: str) -> str:
    """The module name of a recipe's file. It contains a hash of the path, so that two `tools.py` do not collide."""
    return f"mt_grpo_{key}_{Path(path).stem}_{zlib.crc32(str(Path(path).resolve()).encode()):08x}"


def find_modules_next_to(path: str) -> None:
    """Let a file import what is next to it or in the working directory: both go to the end of `sys.path`."""
    for folder in (str(Path(path).resolve().parent), os.getcwd()):
        if folder not in sys.path:
            sys.path.append(folder)


def import_file(path: str, key: str) -> types.ModuleType:
    """Import a recipe's file anew, as a module. Raises `ValueError` with the recipe key if there is no such file."""
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(f"{key}: {path!r} is not a file. Expected the path of a Python file.")
    find_modules_next_to(path)
    spec = importlib.util.spec_from_file_location(module_name(path, key), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError, SystemExit) as error:
        raise ValueError(f"{key}: {path!r} cannot be imported ({error_line(error)}).") from error
    return module


def load_lists(path: str, key: str, names: list[str]) -> list:
    """Import a file and return what it defines under these names, of which it must have one. Others are empty."""
    module = import_file(path, key)
    if not any(hasattr(module, name) for name in names):
        raise ValueError(f"{key}: {path!r} defines neither {' nor '.join(names)}. Define one of them.")
    if wrong := [name for name in names if isinstance(getattr(module, name, None), types.FunctionType)]:
        raise ValueError(f"{key}: {wrong[0]} of {path!r} is a function. Expected a list: {wrong[0]} = [...].")
    return [getattr(module, name, []) for name in names]


def load_named(reference: str, key: str, example: str) -> tuple[Any, str, str]:
    """(what `path.py:name` names, the name, the path). Raises `ValueError` if there is none."""
    path, _, name = reference.rpartition(":")
    if not path:
        raise ValueError(f"{key}: {reference!r} names no file. Expected path.py:{example}.")
    path = absolute(path)
    module = sys.modules.get(module_name(path, "tools_script"))  # a class in the tools file shares its globals
    module = module or import_file(path, key)
    if not hasattr(module, name):
        raise ValueError(f"{key}: {path!r} has no {name!r}. Expected path.py:{example}.")
    return getattr(module, name), name, path


def load_class(reference: str, key: str) -> type:
    """The class that `path.py:Class` names. Raises `ValueError` if there is none."""
    found, name, path = load_named(reference, key, "ClassName")
    if not isinstance(found, type):
        raise ValueError(f"{key}: {name!r} of {path!r} is {found!r}, expected a class.")
    return found


def load_environment(reference: str | None, tools_script: str | None, base: type) -> tuple[type, Any]:
    """Load the class of a recipe's conversation, and the classes of its environments, if there are any.

    `reference` is `path.py:Class`, a subclass of `base` or the class of an environment. `tools_script` may define
    `ENVIRONMENT`, a class or a dict of classes.
    """
    declared = getattr(tools_module(tools_script), "ENVIRONMENT", None) if tools_script else None
    classes = declared.values() if isinstance(declared, dict) else [declared] if declared is not None else []
    for cls in classes:
        check_environment(cls, f"tools_script: ENVIRONMENT of {tools_script!r}")
    found = load_class(reference, "environment") if reference else base
    if issubclass(found, base):
        return found, declared
    if declared is not None:
        raise ValueError(f"environment: {reference!r} is an environment, and so is ENVIRONMENT of {tools_script!r}.")
    return base, found


def tools_module(path: str) -> types.ModuleType:
    """The module of a tools file, which `load_tools` has imported or imports now."""
    name = module_name(absolute(path), "tools_script")
    if name not in sys.modules:
        load_tools(path)
    return sys.modules[name]


def load_state_key(path: str | None) -> Callable[[list[Turn]], Any] | None:
    """The function `STATE_KEY` of a tools file, from the turns so far to the state's key; None if it has none."""
    state_key = getattr(tools_module(path), "STATE_KEY", None) if path else None
    if state_key is not None and (not callable(state_key) or inspect.iscoroutinefunction(state_key)):
        raise ValueError(f"tools_script: STATE_KEY of {path!r} is {state_key!r}, expected a function of the turns.")
    return state_key


def load_tools(path: str | None, isolate: bool = False) -> list[Callable]:
    """The `TOOL_FUNCTIONS` of a file. With `isolate` those without `async` run in processes.

    A file may define `CHECK_TOOLS`, a function that raises if the tools cannot work, as without their data or server.
    """
    if path is None:
        return []
    path = absolute(path)  # tool processes import the file later
    tools = list(named_tools(load_lists(path, "tools_script", ["TOOL_FUNCTIONS", "ENVIRONMENT"])[0]).values())
    if not tools and not hasattr(tools_module(path), "ENVIRONMENT"):
        raise ValueError(f"tools_script: TOOL_FUNCTIONS of {path!r} is empty.")
    if inspect.iscoroutinefunction(check := getattr(tools_module(path), "CHECK_TOOLS", lambda: None)):
        raise ValueError(f"tools_script: CHECK_TOOLS of {path!r} is async. Expected a plain function.")
    check()
    if not isolate:
        return tools
    processes = ToolProcesses(path, tools)
    try:
        run_async(processes.try_one())
    except RuntimeError as error:
        raise ValueError(f"isolate_tools: a process of its own cannot import {path!r}: {error}. See above.") from error
    return [processes.isolated(index, tool) for index, tool in enumerate(tools)]


def load_rewards(path: str | None, optional: bool = False) -> tuple[list[Callable], list[Callable]]:
    """(`TURN_REWARD_FUNCS`, `OUTCOME_REWARD_FUNCS`) of a file. Raises `ValueError`."""
    if not path:
        if optional:
            return [], []
        raise ValueError("reward_fn is not set. Add it to the recipe; hf_recipes/ has examples.")
    turn_funcs, outcome_funcs = load_lists(path, "reward_fn", ["TURN_REWARD_FUNCS", "OUTCOME_REWARD_FUNCS"])
    check_rewards(turn_funcs, outcome_funcs)
    return tuple(named_apart(turn_funcs, outcome_funcs))
