"""Checks of a recipe that several adapters share."""

from __future__ import annotations

from typing import Any

from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.conversation.formats.hermes import HermesFormat
from mt_grpo.recipe.keys import default_of

# Settings of what a program of another house does by itself.
OF_TOOLS = (
    "max_env_steps", "max_tool_response_tokens", "tool_timeout", "max_concurrent_tools", "max_parallel_calls",
    "isolate_tools",
)  # fmt: skip


def check_tool_format(name: str, where: str) -> None:
    """Raise `ValueError` for a tool format that does not leave calls and results to the chat template."""
    fitting = [name for name, kind in TOOL_FORMATS.items() if issubclass(kind, HermesFormat)]
    if name not in fitting:
        raise ValueError(f"tool_format={name!r} does not fit {where}. Expected {' or '.join(fitting)}.")


def check_settings_of(program: str, where: str, script_args: Any, args: Any) -> None:
    """Raise `ValueError` for settings that do not go with a program that runs the conversation, such as an agent.

    Args:
        program: What it is called.
        where: What in the recipe names it.
        script_args: With the keys of data, tools and rewards.
        args: The other settings.
    """
    check_tool_format(args.tool_format, where)
    for key in ("tools_script", "system_prompt"):
        if getattr(script_args, key) is not None:
            raise ValueError(f"{key} has no effect with {where}: the {program} brings its own. Remove it.")
    for key in OF_TOOLS:
        if getattr(args, key) != default_of(key, (type(args),)):
            raise ValueError(f"{key} has no effect with {where}: the {program} runs its tools. Remove it.")
