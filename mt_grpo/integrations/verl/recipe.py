"""What a recipe says with verl's keys: tools by YAML, functions, interactions. Checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_grpo.integrations.checks import cut_result, truncation
from mt_grpo.integrations.verl.base import function_as_tool
from mt_grpo.integrations.verl.config import load_function_tools, load_interactions, load_tools_config
from mt_grpo.integrations.verl.environment import PER_CALL, PER_TRAJECTORY, VerlEnvironment, environment_class
from mt_grpo.recipe.plugins import load_environment
from mt_grpo.rollout import Rollout, ToolResult


def load_function_tool_list(script_args: Any) -> list[Callable]:
    """The tools of `function_tool_path`. Raises `ValueError`."""
    most, side = truncation(script_args)

    def finish(result: ToolResult) -> ToolResult:
        return ToolResult(cut_result(result.text, most, side), reward=result.reward)

    found = load_function_tools(script_args.function_tool_path)
    return [function_as_tool(tool, finish) for tool in found]


def load_verl_conversation(script_args: Any, base: type, tools: str | None, interactions: str | None) -> tuple:
    """(class of conversations, class of environments) of a recipe. Raises `ValueError` for one that cannot work.

    Args:
        script_args: With the keys of the adapters.
        base: `MultiTurnToolEnv`.
        tools, interactions: The paths of the YAML files; None for both: the recipe has functions or MCP servers alone.
    """
    found, declared = load_environment(script_args.environment, script_args.tools_script, base)
    if declared is not None and tools is None and interactions is None:  # functions alone bring no environment
        return found, declared
    if declared is not None:
        raise ValueError(
            "tools_config_file and interaction_config_file bring an environment of their own, but the recipe sets "
            "another one (environment, or ENVIRONMENT in tools_script). Remove one of them."
        )
    if (lifecycle := script_args.tool_lifecycle) not in (PER_TRAJECTORY, PER_CALL):
        raise ValueError(f"tool_lifecycle={lifecycle!r}, expected {PER_TRAJECTORY} or {PER_CALL}.")
    most, side = truncation(script_args)
    verl_tools = load_tools_config(tools) if tools else {}
    found_interactions = load_interactions(interactions) if interactions else {}
    names = [*verl_tools, *found_interactions]
    environment = environment_class(
        names[0] if len(names) == 1 else "tools",
        verl_tools,
        found_interactions,
        lifecycle=lifecycle,
        most_characters=most,
        truncate_side=side,
    )
    return type("VerlConversation", (VerlConversation, found), {}), environment


class VerlConversation:
    """A conversation whose tools may look into it. Stands before `MultiTurnToolEnv`, or a subclass of it."""

    async def open(self, rollout: Rollout, llm: Any) -> None:
        """Begin, and show the rollout to the tools."""
        await super().open(rollout, llm)
        if isinstance(rollout.environment, VerlEnvironment):
            rollout.environment.agent_data.rollout = rollout
