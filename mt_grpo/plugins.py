"""Tools and rewards from files that a recipe names by path."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mt_grpo.event_loop import run_async
from mt_grpo.rollout import Turn
from mt_grpo.scoring import check_rewards
from mt_grpo.settings import absolute
from mt_grpo.tool_processes import ToolProcesses
from mt_grpo.tool_results import error_text
from mt_grpo.tools import check_tool


def load_lists(path: str, key: str, names: list[str]) -> list[list]:
    """Import a file and return its lists of these names; a missing list is empty.

    Raises `ValueError` with the recipe key if all of them are missing, or if the file cannot be imported.
    """
    if not Path(path).is_file():
        raise ValueError(f"{key}: {path!r} is not a file. Expected a Python file that defines {' or '.join(names)}.")
    module = import_file(path, key)
    if not any(hasattr(module, name) for name in names):
        raise ValueError(f"{key}: {path!r} defines no list. Add the line `{names[0]} = [my_function]`.")
    lists = [getattr(module, name, []) for name in names]
    for name, value in zip(names, lists, strict=True):
        if not isinstance(value, list):
            raise ValueError(f"{key}: {name} of {path!r} is {type(value).__name__}, expected a list.")
    return lists


def import_file(path: str, key: str) -> types.ModuleType:
    """Import a recipe's file anew, as a module. Raises `ValueError` with the recipe key if the import fails."""
    if not path.endswith(".py"):
        raise ValueError(f"{key}: {path!r} is no Python file. Expected one that ends in .py.")
    spec = importlib.util.spec_from_file_location(module_name(path, key), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, which would end the run without a word
        raise ValueError(f"{key}: {path!r} fails to import: {type(error).__name__}: {error_text(error)}") from error
    return module


def load_class(reference: str | None, key: str, base: type) -> type:
    """The class that `path.py:Class` names, `base` for None. Raises `ValueError` unless it is a subclass of `base`."""
    if reference is None:
        return base
    path, _, name = reference.rpartition(":")
    path = absolute(path)
    if not path or not Path(path).is_file():
        raise ValueError(f"{key}: {reference!r} names no file. Expected path.py:ClassName.")
    known = sys.modules.get(module_name(path, "tools_script"))  # a class in the tools file shares its globals
    found = getattr(known or import_file(path, key), name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(f"{key}: {name!r} of {path!r} is {found!r}, expected a subclass of {base.__name__}.")
    return found


def module_name(path: str, key: str) -> str:
    """The module name of a recipe's file. It contains a hash of the path, so that two `tools.py` do not collide."""
    return f"mt_grpo_{key}_{Path(path).stem}_{zlib.crc32(str(Path(path).resolve()).encode()):08x}"


def load_state_key(path: str) -> Callable[[list[Turn]], Any] | None:
    """The function `STATE_KEY` of a tools file; None if it has none. Raises `ValueError` unless it is a function.

    The function takes the turns so far and returns the key of the current state, for `gigpo`.
    """
    if module_name(path, "tools_script") not in sys.modules:
        load_tools(path)
    state_key = getattr(sys.modules[module_name(path, "tools_script")], "STATE_KEY", None)
    if state_key is not None and (not callable(state_key) or inspect.iscoroutinefunction(state_key)):
        raise ValueError(f"tools_script: STATE_KEY of {path!r} is {state_key!r}, expected a function of the turns.")
    return state_key


def load_tools(path: str, isolate: bool = False) -> list[Callable]:
    """The `TOOL_FUNCTIONS` of a file. With `isolate` those without `async` run in processes.

    A file may define `CHECK_TOOLS`, a function that raises if the tools cannot work, as without their data or server.
    Raises `ValueError` if a tool is unfit, if `CHECK_TOOLS` raises, or if a process cannot import the file.
    """
    path = absolute(path)  # tool processes import the file later
    (tools,) = load_lists(path, "tools_script", ["TOOL_FUNCTIONS"])
    if not tools:
        raise ValueError(f"tools_script: TOOL_FUNCTIONS of {path!r} is empty.")
    for tool in tools:
        check_tool(tool)
    check = getattr(sys.modules[module_name(path, "tools_script")], "CHECK_TOOLS", lambda: None)
    if inspect.iscoroutinefunction(check):
        raise ValueError(f"tools_script: CHECK_TOOLS of {path!r} is async. Expected an ordinary function.")
    try:
        check()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, which would end the run without a word
        text = error_text(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error_text(error)}"
        raise ValueError(f"tools_script: the tools of {path!r} do not work: {text}") from error
    if isolate:
        processes = ToolProcesses(path, tools)
        try:
            run_async(processes.try_one())
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"tools_script: {path!r} can be imported here, but not in a process beside this one (isolate_tools): "
                f"{error_text(error)}. See above, or set isolate_tools: false."
            ) from error
        tools = [processes.isolated(index, tool) for index, tool in enumerate(tools)]
    return tools


def load_rewards(path: str) -> tuple[list[Callable], list[Callable]]:
    """(`TURN_REWARD_FUNCS`, `OUTCOME_REWARD_FUNCS`) of a file. Raises `ValueError`."""
    turn_funcs, outcome_funcs = load_lists(path, "reward_fn", ["OUTCOME_REWARD_FUNCS", "TURN_REWARD_FUNCS"])[::-1]
    check_rewards(turn_funcs, outcome_funcs)
    return turn_funcs, outcome_funcs
