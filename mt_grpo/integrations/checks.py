"""Checks of a recipe, and limits on the length of results, that several integrations share."""

from __future__ import annotations

from typing import Any

from mt_grpo.base.fields import keys_that
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.conversation.formats.hermes import HermesFormat
from mt_grpo.conversation.tools.results import ResultInParts
from mt_grpo.recipe.keys import default_of

OWN = "the trainer's own conversation"


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


TRUNCATE_SIDES = ("left", "middle", "right")


def truncation(script_args: Any) -> tuple[int | None, str]:
    """The settings (`max_tool_response_length`, `tool_response_truncate_side`)."""
    return script_args.max_tool_response_length, script_args.tool_response_truncate_side


def cut_result(result: str | ResultInParts, most: int | None, side: str) -> str | ResultInParts:
    """Truncate the text of a result with `cut_characters`. Its images stay."""
    if isinstance(result, str):
        return cut_characters(result, most, side)
    return result.with_text(lambda text: cut_characters(text, most, side))


def cut_characters(text: str, most: int | None, side: str) -> str:
    """Truncate a text to `most` characters plus a marker. As in verl 0.9 the given side is the one that is cut off.

    >>> [cut_characters("0123456789", 4, side) for side in TRUNCATE_SIDES]
    ['(truncated)...6789', '01...(truncated)...89', '0123...(truncated)']
    >>> cut_characters("0123", 4, "left"), cut_characters("0123", None, "left")
    ('0123', '0123')
    """
    if most is None or len(text) <= most:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - most :]
    if side == "right":
        return text[:most] + "...(truncated)"
    half = most // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]
