"""The base class of integrations: recipe keys and their conversations; checks that several integrations share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mt_grpo.base.fields import keys_that
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.conversation.formats.hermes import HermesFormat
from mt_grpo.conversation.tools.results import ResultInParts
from mt_grpo.recipe.keys import default_of

OWN = "the trainer's own conversation"


class House:
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

    def check(self, script_args: Any, runner: House | None) -> None:
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
    """Raise `ValueError` for a key that is set but has no effect without something else.

    Args:
        script_args: The settings.
        keys: The dataclass of the keys.
        without: What is missing. Empty: the metadata `needs` of each key, if it has any.
        names: The keys that are checked. Empty: all of them.
    """
    for each in dataclasses.fields(keys):
        needed = without or each.metadata["needs"]
        if each.name in (names or [each.name]) and needed and getattr(script_args, each.name) != each.default:
            raise ValueError(f"{each.name} has no effect without {needed}. Add it, or remove {each.name}.")


@contextmanager
def imports(what: str, extra: str = "", why: str = "") -> Iterator[None]:
    """Context manager that turns an `ImportError` of an integration's modules into a `ValueError`.

    Args:
        what: The part of the recipe that needs the modules.
        extra: The extra of the clone's installation that has the packages they import.
        why: Further explanation, if they import no packages.
    """
    try:
        yield
    except ImportError as error:
        if not extra:
            raise ValueError(f"{what} needs the clone ({error}){why}.") from None
        raise ValueError(
            f"{what} needs a package that is not installed ({error}). Run `pip install -e '.[{extra}]'` in the clone. "
            "(A file of scripts/one_file.py has no adapters.)"
        ) from None


def check_settings_of(program: str, where: str, script_args: Any, args: Any) -> None:
    """Raise `ValueError` for settings that have no effect if a program, such as an agent, runs the conversation.

    Args:
        program: The name of the program in messages.
        where: The line of the recipe that names it.
        script_args: The settings with the keys of data, tools and rewards.
        args: The other settings.
    """
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


# Limits on the length of results of integrations' tools.


TRUNCATE_SIDES = ("left", "middle", "right")


def truncation(script_args: Any) -> tuple[int | None, str]:
    """The settings (`max_tool_response_length`, `tool_response_truncate_side`). Raises `ValueError`."""
    most, side = script_args.max_tool_response_length, script_args.tool_response_truncate_side
    if side not in TRUNCATE_SIDES:
        raise ValueError(f"tool_response_truncate_side={side!r}, expected one of {', '.join(TRUNCATE_SIDES)}.")
    return most, side


def cut_result(result: str | ResultInParts, most: int | None, side: str) -> str | ResultInParts:
    """Truncate the text of a result with `cut_characters`. Its images stay."""
    if isinstance(result, str):
        return cut_characters(result, most, side)
    return result.with_text(lambda text: cut_characters(text, most, side))


def cut_characters(text: str, most: int | None, side: str) -> str:
    """Truncate a text to at most `most` characters plus a marker. The given side is the one that is cut off.

    This is as in verl 0.9. In 0.7 `left` and `right` meant the side that stays.

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
