"""The list of integrations, their recipe keys, and the choice of one for a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_grpo.adapters.agents.keys import AgentHouse
from mt_grpo.adapters.gym.keys import GymHouse
from mt_grpo.adapters.mcp.keys import McpHouse
from mt_grpo.adapters.ms_swift.keys import SwiftHouse
from mt_grpo.adapters.openenv.keys import OpenEnvHouse
from mt_grpo.adapters.verl.keys import VerlHouse
from mt_grpo.recipe.keys import default_of
from mt_grpo.recipe.plugins import load_environment

# FORK: a new integration is a folder, whose keys.py has a subclass of `House`, and its place in this list. The first
# one whose `runs` returns True runs a recipe's conversation.
HOUSES = (AgentHouse(), GymHouse(), OpenEnvHouse(), SwiftHouse(), VerlHouse(), McpHouse())


@dataclass
class AdapterKeys(*(house.keys for house in HOUSES)):
    """The recipe keys of all integrations. Those of ms-swift have ms-swift's names."""


def load_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """(class of conversations, classes of environments or None) of a recipe, with the changes of all integrations."""
    found, environment = choose_conversation(script_args, args, base)
    if (
        found is base
        and environment is None
        and args.environment_timeout != default_of("environment_timeout", (type(args),))
    ):
        raise ValueError(
            f"environment_timeout={args.environment_timeout:g} has no effect without an environment. Set one, or "
            "remove the key. For tool calls, set tool_timeout."
        )
    for house in HOUSES:
        found = house.around(script_args, found)
    return found, environment


def choose_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """(class of conversations, classes of environments or None) of a recipe. Raises `ValueError`.

    Args:
        script_args: `environment`, `tools_script` and the keys of adapters.
        args: The other settings.
        base: `MultiTurnToolEnv`.
    """
    runner = next((house for house in HOUSES if house.runs(script_args)), None)
    for house in HOUSES:
        house.check(script_args, runner)
    if runner is not None:
        return runner.conversation(script_args, args, base)
    return load_environment(script_args.environment, script_args.tools_script, base)


def load_adapter_tools(script_args: Any) -> list[Callable]:
    """The tools of a recipe's integrations, in addition to those of `tools_script`. Raises `ValueError`."""
    return [tool for house in HOUSES for tool in house.tools(script_args)]
