"""Integrations of other frameworks: the table of their names, their recipe keys, and the choice of one."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mt_grpo.recipe.plugins import load_environment, load_tools

# FORK: an integration of your own needs no line here. Its package has an entry point of the group
# `mt_grpo.integrations`, which names its subclass of `Integration` (docs/forking.md).
INTEGRATIONS = {
    "agents": "mt_grpo.integrations.agents.keys:AgentIntegration",
    "gym": "mt_grpo.integrations.gym.keys:GymIntegration",
    "openenv": "mt_grpo.integrations.openenv.keys:OpenEnvIntegration",
    "ms_swift": "mt_grpo.integrations.ms_swift.keys:SwiftIntegration",
    "verl": "mt_grpo.integrations.verl.keys:VerlIntegration",
    "mcp": "mt_grpo.integrations.mcp.keys:McpIntegration",
}


class Integration:
    """Base class of an integration. It defines recipe keys, and the conversation or tools of a recipe with them.

    `script_args` has the keys of all integrations and those of data, tools and rewards; `args` has the other settings.
    All methods raise `ValueError`, with the key, for a recipe that cannot work.

    Attributes:
        keys: The dataclass of the recipe keys.
        line: The line of a recipe, for error messages, with which the integration replaces the trainer's own
            conversation. Empty: it only adds to the trainer's own.
        counts_model_calls: Whether `max_model_calls` bounds its conversations.
    """

    keys: type
    line = ""
    counts_model_calls = False

    def runs(self, script_args: Any) -> bool:
        """Whether this integration runs the recipe's conversation, if none before it in the list does."""
        return False

    def check(self, script_args: Any, runner: Integration | None) -> None:
        """Raise for a key without effect. `runner` is what runs the conversation, None: the trainer itself."""
        if runner is not self:
            refuse(script_args, self.keys)

    def conversation(self, script_args: Any, args: Any, base: type) -> tuple[type, Any]:
        """(class of conversations, classes of environments or None), if the integration runs the conversation."""
        raise NotImplementedError

    def around(self, script_args: Any, conversation: type) -> type:
        """Change the class of conversations, which may be that of another integration."""
        return conversation

    def tools(self, script_args: Any) -> list[Callable]:
        """The tools of the recipe that this integration adds to those of `tools_script`."""
        return []


def refuse(script_args: Any, keys: type, without: str = "", names: tuple[str, ...] = ()) -> None:
    """Raise `ValueError` if a key (one of `names`, if there are any) is set but has no effect without something else.

    What is missing is `without`, by default the metadata `needs` of each key.
    """
    for each in dataclasses.fields(keys):
        needed = without or each.metadata.get("needs")
        if each.name in (names or [each.name]) and needed and getattr(script_args, each.name) != each.default:
            raise ValueError(f"{each.name} has no effect without {needed}. Add it, or remove {each.name}.")


@contextmanager
def needs_packages(what: str, extra: str) -> Iterator[None]:
    """Turn an `ImportError` in what a recipe needs into a `ValueError` that names the extra with its packages."""
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{what} needs a package that is not installed ({error}). Run `pip install 'mt-grpo[{extra}]'`, or in a "
            f"clone `pip install -e '.[{extra}]'`."
        ) from None


def no_integrations() -> str:
    """A sentence for errors in a file of scripts/one_file.py, where the package is no folder. Else empty."""
    in_one_file = not hasattr(sys.modules["mt_grpo"], "__path__")
    return " This file has no integrations: start the clone's script for them." if in_one_file else ""


@functools.cache
def integrations() -> tuple[Integration, ...]:
    """Ours, in the order of the table, then those of other packages. The first that `runs` a recipe has its rollouts.

    Raises `ValueError` for a recipe key that two of them have.
    """
    if no_integrations():
        return ()
    group = "mt_grpo.integrations"
    points = [importlib.metadata.EntryPoint(name, value, group) for name, value in INTEGRATIONS.items()]
    loaded: list[Integration] = []
    owners: dict[str, str] = {}
    for point in [*points, *importlib.metadata.entry_points(group=group)]:
        loaded.append(point.load()())
        for each in dataclasses.fields(loaded[-1].keys):
            if owners.setdefault(each.name, point.value) != point.value:
                raise ValueError(f"{point.value} and {owners[each.name]} both have the recipe key {each.name}.")
    return tuple(loaded)


@functools.cache
def with_integrations(script_arguments: type) -> type:
    """The dataclass of a recipe's data, tools and rewards, with the keys of all integrations."""
    keys = tuple(each.keys for each in integrations())
    own = {each.name for each in dataclasses.fields(script_arguments)}
    if taken := [each.name for cls in keys for each in dataclasses.fields(cls) if each.name in own]:
        raise ValueError(f"An integration has the recipe key {taken[0]}, which is the trainer's own. Rename it.")
    return dataclasses.make_dataclass(script_arguments.__name__, [], bases=(*keys, script_arguments))


def integrations_of(script_args: Any) -> list[Integration]:
    """The integrations whose keys the settings have: none if they were not read by `parse_arguments`."""
    given = vars(script_args).keys()
    return [each for each in integrations() if given >= {field.name for field in dataclasses.fields(each.keys)}]


def load_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """(class of conversations, classes of environments or None) of a recipe, with the changes of all integrations."""
    conversation, environment = choose_conversation(script_args, args, base)
    for each in integrations_of(script_args):
        conversation = each.around(script_args, conversation)
    return conversation, environment


def choose_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """(class of conversations, classes of environments or None) of a recipe, without the changes of integrations."""
    known = integrations_of(script_args)
    runner = next((each for each in known if each.runs(script_args)), None)
    for each in known:
        each.check(script_args, runner)
    if runner is not None:
        return runner.conversation(script_args, args, base)
    return load_environment(script_args.environment, script_args.tools_script, base)


def load_recipe_tools(script_args: Any, args: Any) -> list[Callable]:
    """The tools of a recipe: those of `tools_script`, and those of integrations. Raises `ValueError`."""
    return load_tools(script_args.tools_script, args.isolate_tools) + load_integration_tools(script_args)


def load_integration_tools(script_args: Any) -> list[Callable]:
    """The tools of a recipe's integrations. Raises `ValueError`."""
    return [tool for each in integrations_of(script_args) for tool in each.tools(script_args)]
