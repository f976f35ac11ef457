"""A recipe's key as a field of a dataclass, which says once all that is known of the key; its types and intervals."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from enum import Enum
from typing import Any


class KeyFacts(dict):
    """The facts about a recipe key in its field. transformers' parser gives a copy to argparse, which reads `help`."""

    def copy(self) -> dict[str, str]:
        return {"help": self["help"]}


def key(
    default: Any,
    help: str,
    *,
    within: str | None = None,
    one_of: Any = None,
    path: bool | str = False,
    trained: bool = True,
    needs: str | None = None,
    of_tools: bool = False,
    opens: bool = False,
) -> Any:
    """A field of a dataclass of settings, which is a key of a recipe.

    Args:
        default: The value of a recipe that does not name the key. It is always allowed, also where it is not `within`.
        help: What the key is.
        within: The interval of its numbers: `[` includes the bound, `(` does not, and infinity is never included.
        one_of: The values that it may have.
        path: Whether it names a file or a folder, or a list of them. `":"` or `".py:"`: if it holds this, `path:Name`.
        trained: Whether it changes what is trained. A checkpoint's record of its run leaves others out.
        needs: What else must be in the recipe for the key to have an effect, as an error names it.
        of_tools: Whether it is about the trainer's own running of tools.
        opens: Whether it says, alone, what takes part in the conversation. A recipe needs one such key.
    """
    facts = KeyFacts(locals())
    return dataclasses.field(default=facts.pop("default"), metadata=facts)


def keys_that(settings: Any, fact: str) -> list[str]:
    """The names of the keys of a dataclass whose fields state a fact, such as `of_tools` or `needs`."""
    return [each.name for each in dataclasses.fields(settings) if each.metadata.get(fact)]


def fits_type(value: Any, expected: Any, from_yaml: bool = False) -> bool:
    """Whether a value is of an annotated type. With `from_yaml`, text such as `1e-6` is a float: YAML reads a string.

    >>> fits_type(7.5, int), fits_type(7, float), fits_type("1e-6", float, from_yaml=True), fits_type(None, int | None)
    (False, True, True, True)
    """
    origin, options = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(fits_type(value, option, from_yaml) for option in options)
    if origin is typing.Literal:
        return value in options
    if origin is list:
        return isinstance(value, list) and all(fits_type(each, options[0], from_yaml) for each in value if options)
    if expected is float and from_yaml and isinstance(value, str):
        return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value) is not None
    if expected in (int, float):
        return isinstance(value, (int, expected)) and not isinstance(value, bool)
    if isinstance(expected, type) and issubclass(expected, Enum):
        return isinstance(value, (str, expected))
    if origin is dict or expected in (str, bool, list, tuple, dict, type(None)):
        return isinstance(value, origin or expected)
    return True  # classes of settings: the dataclass itself converts and refuses them


LARGEST = 3.4028234663852886e38  # of float32


def in_range(value: Any, interval: str) -> bool:
    """Whether a number, or its text, is in an interval. NaN is in none, nor is 1e39, which float32 makes infinite.

    >>> in_range(1, "(0, 1]"), in_range(0, "(0, 1]"), in_range("1e-6", "[0, inf)"), in_range("nan", "(-inf, inf)")
    (True, False, True, False)
    """
    number, (low, high) = float(value), map(float, interval[1:-1].split(", "))
    at_a_bound = (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    return abs(number) < LARGEST and (low < number < high or at_a_bound)


def range_text(interval: str) -> str:
    """An interval in words.

    >>> range_text("[0, inf)"), range_text("(0, 1]"), range_text("(-inf, inf)")
    ('a finite number of at least 0', 'a finite number above 0, at most 1', 'a finite number')
    """
    low, high = interval[1:-1].split(", ")
    words = [] if low == "-inf" else [f"{'of at least' if interval[0] == '[' else 'above'} {low}"]
    words += [] if high == "inf" else [f"{'at most' if interval[-1] == ']' else 'below'} {high}"]
    return " ".join(["a finite number", ", ".join(words)]).strip()
