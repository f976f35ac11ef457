"""Checks of a recipe that several integrations share."""

from __future__ import annotations

from typing import Any

from mt_grpo.base.fields import keys_that
from mt_grpo.conversation.formats.choose import TOOL_FORMATS, HermesFormat
from mt_grpo.recipe.parse import default_of


def check_settings_of(program: str, where: str, script_args: Any, args: Any) -> None:
    """Raise `ValueError` for settings without effect if a program, such as an agent, runs the conversation."""
    check_tool_format(args.tool_format, where)
    for name in ("tools_script", "system_prompt", "prompt_examples"):
        if getattr(script_args, name) is not None:
            raise ValueError(f"{name} has no effect with {where}, because the {program} brings its own. Remove it.")
    check_unset(("max_env_steps", *keys_that(args, "of_tools")), f"{where}: the {program} runs its tools", args)


def check_tool_format(name: str, where: str) -> None:
    """Raise `ValueError` for a tool format that does not leave calls and results to the chat template."""
    fitting = [name for name, kind in TOOL_FORMATS.items() if issubclass(kind, HermesFormat)]
    if name not in fitting:
        raise ValueError(f"tool_format={name!r} does not fit {where}. Expected {' or '.join(fitting)}.")


def check_unset(names: tuple[str, ...], where: str, args: Any) -> None:
    """Raise `ValueError` if one of these settings is not at its default."""
    for name in names:
        if getattr(args, name) != default_of(name, (type(args),)):
            raise ValueError(f"{name} has no effect with {where}. Remove it.")
