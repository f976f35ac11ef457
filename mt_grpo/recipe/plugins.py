"""What a recipe names: data, files of tools and rewards, environments, integrations of other frameworks."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import os
import pkgutil
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mt_grpo.base.files import absolute
from mt_grpo.base.rows import Rows
from mt_grpo.conversation.tools.signature import named_tools
from mt_grpo.recipe.data import load_rows
from mt_grpo.rollout import Turn
from mt_grpo.training.rewards import check_rewards, named

logger = logging.getLogger(__name__)

# FORK: an integration of your own needs no line here. Its package has an entry point of the group
# `mt_grpo.integrations`, which names its subclass of `Integration` (docs/forking.md).
INTEGRATIONS = {
    "agents": "mt_grpo.integrations.agents.keys:AgentIntegration",
    "gym": "mt_grpo.integrations.gym.keys:GymIntegration",
    "openenv": "mt_grpo.integrations.openenv.keys:OpenEnvIntegration",
    "ms_swift": "mt_grpo.integrations.ms_swift.keys:SwiftIntegration",
    "verl": "mt_grpo.integrations.verl.keys:VerlIntegration",
    "mcp": "mt_grpo.integrations.mcp.keys:McpIntegration",
    "replay": "mt_grpo.integrations.replay.keys:ReplayIntegration",  # the last: around any other conversation
}
OWN = "the trainer's own conversation"  # what a key may need to have an effect, if no line of an integration


class Integration:
    """Base class of an integration. It defines recipe keys, and the conversation or tools of a recipe with them.

    `script_args` has the keys of all integrations and those of data, tools and rewards; `args` has the other settings.
    All methods raise `ValueError`, with the key, for a recipe that cannot work.
    """

    keys: type  # the dataclass of the recipe keys
    line = ""  # the line of a recipe with which it replaces the trainer's own conversation, if it does
    loads = ""  # `module:function` that `conversation` calls, imported only when a recipe needs it

    def runs(self, script_args: Any) -> bool:
        """Whether it runs the recipe's conversation, if none before it in the list does: `environment` names it."""
        return self.line == f"environment: {script_args.environment}"

    def conversation(self, script_args: Any, args: Any, base: type) -> tuple[type, Any]:
        """(class of conversations, classes of environments or None), if the integration runs the conversation."""
        return pkgutil.resolve_name(self.loads)(script_args, args, base)

    def around(self, script_args: Any, args: Any, conversation: type) -> type:
        """Change the class of conversations, which may be that of another integration."""
        return conversation

    def rows(self, script_args: Any) -> list[dict[str, Any]] | None:
        """Training rows in place of those of `dataset_name`."""
        return None

    def tools(self, script_args: Any) -> list[Callable]:
        """The tools of the recipe that this integration adds to those of `tools_script`."""
        return []


@functools.cache
def integrations() -> tuple[Integration, ...]:
    """The table's integrations, then other packages'. The first one that `runs` a recipe has its rollouts."""
    if not hasattr(sys.modules["mt_grpo"], "__path__"):  # a file of scripts/one_file.py, which has none
        return ()
    group = "mt_grpo.integrations"
    points = [importlib.metadata.EntryPoint(name, value, group) for name, value in INTEGRATIONS.items()]
    return tuple(point.load()() for point in [*points, *importlib.metadata.entry_points(group=group)])


@functools.cache
def add_integrations(script_arguments: type) -> type:
    """Add the keys of all integrations to a dataclass of settings."""
    classes = *(each.keys for each in integrations()), script_arguments
    return dataclasses.make_dataclass(script_arguments.__name__, [], bases=classes)


def integrations_of(script_args: Any) -> list[Integration]:
    """The integrations whose keys the settings have: none if they were not read by `parse_arguments`."""
    given = vars(script_args).keys()
    return [each for each in integrations() if given >= {field.name for field in dataclasses.fields(each.keys)}]


def load_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """(class of conversations, classes of environments or None) of a recipe, with the changes of all integrations.

    Raises `ValueError` for a key without effect, because nothing that it `needs` runs the conversation.
    """
    known = integrations_of(script_args)
    runners = [each for each in known if each.runs(script_args)]
    lines = [each.line for each in runners if each.line]
    if len(lines) > 1:
        raise ValueError(f"{' and '.join(lines)} both run the conversation. Remove one.")
    for field in [field for each in known for field in dataclasses.fields(each.keys)]:
        needed = field.metadata.get("needs")
        if needed and (lines or [OWN])[0] not in needed and getattr(script_args, field.name) != field.default:
            raise ValueError(f"{field.name} has no effect without {needed}. Add it, or remove {field.name}.")
    if runners:
        runner = next((each for each in runners if each.line), runners[0])
        conversation, environment = runner.conversation(script_args, args, base)
    else:
        conversation, environment = load_environment(script_args.environment, script_args.tools_script, base)
    for each in known:
        conversation = each.around(script_args, args, conversation)
    return conversation, environment


def load_splits(script_args: Any, eval_strategy: str, environments: Any = None) -> tuple[Rows | None, Rows | None]:
    """(training rows, test rows) of a recipe.

    Test rows are None if `eval_strategy` is `no`, and training rows without `dataset_name`, which `environments` that
    bring the prompts do not need.
    """
    name, how = script_args.dataset_name, {"config": script_args.dataset_config, "needs_prompt": environments is None}
    tests, rows = eval_strategy != "no", [each.rows(script_args) for each in integrations_of(script_args)]
    train_rows = next(filter(None, rows), None)
    if not name and ((environments is None and train_rows is None) or tests):
        raise ValueError("dataset_name is not set. Add it to the recipe; hf_recipes/ has examples.")
    split, test_split = script_args.dataset_train_split, script_args.dataset_test_split
    if train_rows is None and name:
        train_rows = load_rows(name, split, script_args.dataset_size, **how)
    if tests and Path(name).is_file():
        logger.warning(f"dataset_name: {name} has no splits: evaluations are of rows that are trained on.")
    return train_rows, load_rows(name, test_split, **how) if tests else None


def load_recipe_tools(script_args: Any) -> list[Callable]:
    """The tools of a recipe: those of `tools_script`, and those of integrations. Raises `ValueError`."""
    own = load_tools(script_args.tools_script)
    return own + [tool for each in integrations_of(script_args) for tool in each.tools(script_args)]


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
    except SystemExit as error:  # whose code may be that of a success
        raise ValueError(f"{key}: {path!r} ends the program when it is imported.") from error
    return module


def load_lists(path: str, key: str, names: list[str]) -> list:
    """Import a file and return what it defines under these names. One of them must be there, and not be empty."""
    module = import_file(path, key)
    values = [getattr(module, name, []) for name in names]
    for name, value in zip(names, values):
        if name != "ENVIRONMENT" and not isinstance(value, list | tuple):
            raise ValueError(f"{key}: {name} in {path!r} is {value!r:.80}, expected a list. Write {name} = [...].")
    if not any(values):
        raise ValueError(f"{key}: {path!r} has nothing in {' or '.join(names)}. Define one of them.")
    return values


def load_named(reference: str, key: str) -> tuple[Any, str, str]:
    """(what `path.py:name` names, the name, the path). Raises `ValueError` if there is none."""
    path, _, name = reference.rpartition(":")
    path = absolute(path or reference)
    # A class in the tools file shares its globals.
    module = sys.modules.get(module_name(path, "tools_script")) or import_file(path, key)
    if not hasattr(module, name):
        raise ValueError(f"{key}: {path!r} has no {name!r}. Expected path.py:name.")
    return getattr(module, name), name, path


def load_class(reference: str, key: str) -> type:
    """The class that `path.py:Class` names. Raises `ValueError` if there is none."""
    return load_named(reference, key)[0]


def load_environment(reference: str | None, tools_script: str | None, base: type) -> tuple[type, Any]:
    """(class of conversations, its environments or None): of a `path.py:Class`, and of a tools file's `ENVIRONMENT`.

    The class is a subclass of `base` or an environment. `ENVIRONMENT` is a class or a dict of classes.
    """
    declared = getattr(tools_module(tools_script), "ENVIRONMENT", None) if tools_script else None
    found = load_class(reference, "environment") if reference else base
    if not isinstance(found, type):
        raise ValueError(f"environment: {reference!r} is {found!r:.100}, expected a class.")
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
    return getattr(tools_module(path), "STATE_KEY", None) if path else None


def load_tools(path: str | None) -> list[Callable]:
    """The `TOOL_FUNCTIONS` of a file, whose function `CHECK_TOOLS`, if any, raises where the tools cannot work."""
    if path is None:
        return []
    path = absolute(path)
    tools = list(named_tools(load_lists(path, "tools_script", ["TOOL_FUNCTIONS", "ENVIRONMENT"])[0]).values())
    getattr(tools_module(path), "CHECK_TOOLS", lambda: None)()
    return tools


def load_rewards(path: str | None) -> tuple[list[Callable], list[Callable]]:
    """(`TURN_REWARD_FUNCS`, `OUTCOME_REWARD_FUNCS`) of a file. Raises `ValueError`."""
    if not path:
        return [], []
    turn_funcs, outcome_funcs = load_lists(path, "reward_fn", ["TURN_REWARD_FUNCS", "OUTCOME_REWARD_FUNCS"])
    check_rewards(turn_funcs, outcome_funcs)
    return tuple(named(turn_funcs, outcome_funcs))
