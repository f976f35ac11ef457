"""What a house of adapters is to a recipe: its keys, and what it makes of them; checks that several houses share."""

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

OWN = "a conversation of this trainer's own"


class House:
    """Another house's shapes. It brings its keys, and says what a recipe with them wants.

    `script_args` has the keys of all houses beside those of data, tools and rewards; `args` has the other settings.
    All methods raise `ValueError`, with the key, for a recipe that cannot work.

    Attributes:
        keys: The dataclass of the keys.
        line: The line of a recipe by which the house brings another conversation than the trainer's own, as an error
            names it. Empty: it adds to the trainer's own.
        counts_model_calls: Whether `max_model_calls` bounds its conversations.
    """

    keys: type
    line = ""
    counts_model_calls = False

    def runs(self, script_args: Any) -> bool:
        """Whether the recipe's conversation is one of this house, if no house before it in the list runs it."""
        return False

    def check(self, script_args: Any, runner: House | None) -> None:
        """Raise for a key that has no effect. `runner` is the house that runs the conversation, None: the trainer."""
        if runner is not self:
            refuse(script_args, self.keys)

    def conversation(self, script_args: Any, args: Any, base: type) -> tuple[type, Any]:
        """(class of conversations, classes of environments or None), where the house runs the conversation."""
        raise NotImplementedError

    def around(self, script_args: Any, conversation: type) -> type:
        """The class of conversations, of whatever house it is, as this house changes it."""
        return conversation

    def tools(self, script_args: Any) -> list[Callable]:
        """Tools of the recipe that stand beside those of `tools_script`."""
        return []


def refuse(script_args: Any, keys: type, without: str = "", names: tuple[str, ...] = ()) -> None:
    """Raise `ValueError` for a key that is set, and has no effect without something else.

    Args:
        script_args: The settings.
        keys: The dataclass of the keys.
        without: What is missing. Empty: what each key `needs`, if it says so.
        names: The keys that are looked at. Empty: all of them.
    """
    for each in dataclasses.fields(keys):
        needed = without or each.metadata["needs"]
        if each.name in (names or [each.name]) and needed and getattr(script_args, each.name) != each.default:
            raise ValueError(f"{each.name} has no effect without {needed}. Add it, or remove {each.name}.")


@contextmanager
def imports(what: str, extra: str = "", why: str = "") -> Iterator[None]:
    """Turn an `ImportError` of a house's modules into a `ValueError`.

    Args:
        what: What of the recipe needs them.
        extra: Which extra of the clone's installation brings the packages that they import.
        why: More words, where they import none.
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
    """Raise `ValueError` for settings that do not go with a program that runs the conversation, such as an agent.

    Args:
        program: What it is called.
        where: What in the recipe names it.
        script_args: With the keys of data, tools and rewards.
        args: The other settings.
    """
    check_tool_format(args.tool_format, where)
    for name in ("tools_script", "system_prompt", "prompt_examples"):
        if getattr(script_args, name) is not None:
            raise ValueError(f"{name} has no effect with {where}: the {program} brings its own. Remove it.")
    check_unset(("max_env_steps", *keys_that(args, "of_tools")), f"{where}: the {program} runs its tools", args)


def check_tool_format(name: str, where: str) -> None:
    """Raise `ValueError` for a tool format that does not leave calls and results to the chat template."""
    fitting = [name for name, kind in TOOL_FORMATS.items() if issubclass(kind, HermesFormat)]
    if name not in fitting:
        raise ValueError(f"tool_format={name!r} does not fit {where}. Expected {' or '.join(fitting)}.")


def check_unset(names: tuple[str, ...], where: str, args: Any) -> None:
    """Raise `ValueError` for one of these settings that has another value than its default."""
    for name in names:
        if getattr(args, name) != default_of(name, (type(args),)):
            raise ValueError(f"{name} has no effect with {where}. Remove it.")


# How long a result may be that a tool of another house gives.


TRUNCATE_SIDES = ("left", "middle", "right")


def truncation(script_args: Any) -> tuple[int | None, str]:
    """(`max_tool_response_length`, `tool_response_truncate_side`). Raises `ValueError`."""
    most, side = script_args.max_tool_response_length, script_args.tool_response_truncate_side
    if side not in TRUNCATE_SIDES:
        raise ValueError(f"tool_response_truncate_side={side!r}, expected one of {', '.join(TRUNCATE_SIDES)}.")
    return most, side


def cut_result(result: str | ResultInParts, most: int | None, side: str) -> str | ResultInParts:
    """A result whose text is cut as `cut_characters` does it. Its images stay."""
    if isinstance(result, str):
        return cut_characters(result, most, side)
    return result.with_text(lambda text: cut_characters(text, most, side))


def cut_characters(text: str, most: int | None, side: str) -> str:
    """At most so many characters of a text, and a marker where others stood. The side is the one that is cut off.

    So it is in verl 0.9. In 0.7 `left` and `right` meant the side that stays.

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
