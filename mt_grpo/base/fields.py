"""A recipe's key as a field of a dataclass, which says once all that is known of the key; its types and intervals."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pydantic import TypeAdapter, ValidationError


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


def fits_type(value: Any, expected: Any) -> bool:
    """Whether a recipe's value is of an annotated type. Nothing is converted: 7.0 is no int, and 7 is no text.

    >>> fits_type(7.0, int), fits_type(7, float), fits_type("7", float), fits_type(None, int | None)
    (False, True, False, True)
    """
    try:
        TypeAdapter(expected, config={"arbitrary_types_allowed": True}).validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError):  # TypeError: a date, which JSON does not have
        return False
    return True


LARGEST = 3.4028234663852886e38  # of float32


def in_range(number: float, interval: str) -> bool:
    """Whether a number is in an interval. NaN is in none, nor is 1e39, which float32 makes infinite.

    >>> in_range(1, "(0, 1]"), in_range(0, "(0, 1]"), in_range(float("nan"), "(-inf, inf)")
    (True, False, False)
    """
    low, high = map(float, interval[1:-1].split(", "))
    at_a_bound = (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    return abs(number) < LARGEST and (low < number < high or at_a_bound)
