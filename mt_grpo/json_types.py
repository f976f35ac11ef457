"""Whether a value from JSON or YAML fits a type hint, and which part of it does not."""

from __future__ import annotations

import collections.abc
import re
import types
import typing
from enum import Enum
from typing import Any

LISTS = (list, *(getattr(collections.abc, name) for name in ("Sequence", "MutableSequence", "Collection", "Iterable")))
DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
TYPES_THAT_WORK = "str, int, float, bool, list[...], dict[str, ...], Literal[...], unions of these with |, and Any"


def without_name(expected: Any) -> Any:
    """The type beneath a `NewType`. Any other type is returned as it is."""
    while hasattr(expected, "__supertype__"):
        expected = expected.__supertype__
    return expected


def type_name(expected: Any) -> str:
    """A type as source code writes it: `int`, `list[int]`, `Literal['a', 'b']`, `str | None`."""
    if isinstance(expected, type) and typing.get_origin(expected) is None:
        return expected.__name__
    return str(expected).replace("typing.", "")


def takes_json(expected: Any) -> bool:
    """Whether a value from JSON can be of this annotated type. In a union the option None does not count.

    >>> [takes_json(t) for t in (int, list[dict[str, float]], str | None, bytes | str)]
    [True, True, True, True]
    >>> [takes_json(t) for t in (bytes | None, tuple, dict[int, str])]
    [False, False, False]
    """
    expected = without_name(expected)
    origin, options = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(takes_json(option) for option in options if option is not type(None))
    if origin is typing.Literal:
        return all(type(option) in (str, int, bool, type(None)) for option in options)
    if origin in DICTS:
        return not options or (options[0] in (str, Any) and takes_json(options[1]))
    if origin in LISTS:
        return all(takes_json(option) for option in options)
    return expected in (str, int, float, bool, type(None), Any, object)


def fits_type(value: Any, expected: Any, from_yaml: bool = False) -> bool:
    """Whether a value is of an annotated type. With `from_yaml`, text such as `1e-6` is a float: YAML reads a string.

    >>> fits_type(7.5, int), fits_type(7, float), fits_type("1e-6", float, from_yaml=True), fits_type(None, int | None)
    (False, True, True, True)
    """
    origin = typing.get_origin(expected)
    if expected is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits_type(value, option, from_yaml) for option in typing.get_args(expected))
    if origin is list:
        options = typing.get_args(expected)
        return isinstance(value, list) and all(fits_type(v, options[0], from_yaml) for v in value if options)
    if origin is dict or expected is dict:
        return isinstance(value, dict)
    if origin is typing.Literal:
        return value in typing.get_args(expected)
    if expected is float and from_yaml and isinstance(value, str):
        return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value) is not None
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(expected, type) and issubclass(expected, Enum):
        return isinstance(value, (str, expected))
    if isinstance(expected, type) and expected in (str, bool, list, tuple, type(None)):
        return isinstance(value, expected)
    return True  # any other class: the dataclass of the settings checks the value itself


def misfit(value: Any, expected: Any, where: str = "") -> tuple[Any, str] | None:
    """(the part of an argument that does not fit its type, the path to this part); None if the argument fits.

    >>> misfit([1, "2"], list[int]), misfit({"a": {"b": 1}}, dict[str, dict[str, str]]), misfit([1], list[int] | None)
    (('2', '[1]'), (1, "['a']['b']"), None)
    """
    expected = without_name(expected)
    origin, options = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        misfits = [misfit(value, option, where) for option in options]
        # The option with the longest path fits best: its misfit is the deepest.
        return None if None in misfits else max(misfits, key=lambda wrong: len(wrong[1]))
    if origin in LISTS and isinstance(value, list):
        parts = enumerate(value) if options else ()
        return next(filter(None, (misfit(part, options[0], f"{where}[{i}]") for i, part in parts)), None)
    if origin in DICTS and isinstance(value, dict):
        parts = value.items() if options else ()
        return next(filter(None, (misfit(part, options[1], f"{where}[{key!r}]") for key, part in parts)), None)
    if origin is typing.Literal:
        fits = any(type(value) is type(option) and value == option for option in options)
    elif origin in (*LISTS, *DICTS):
        fits = False
    else:
        fits = takes_json(expected) and (expected is object or fits_type(value, expected))
    return None if fits else (value, where)
