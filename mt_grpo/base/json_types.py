"""Type hints and JSON: whether JSON has a type, a type's name, whether a value from YAML fits it; values as text."""

from __future__ import annotations

import collections.abc
import json
import re
import types
import typing
from enum import Enum
from typing import Any


def is_json_type(expected: Any) -> bool:
    """Whether a type is one of JSON's own. Such arguments are passed unchanged, and the type's name is shown.

    >>> [is_json_type(t) for t in (int, list[dict[str, float]], str | None, typing.Annotated[int, "how many"])]
    [True, True, True, True]
    >>> [is_json_type(t) for t in (bytes | None, tuple, dict[int, str], re.RegexFlag)]
    [False, False, False, False]
    """
    origin, options = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin is typing.Annotated:
        return is_json_type(options[0]) and all(isinstance(note, str) for note in options[1:])
    if origin is typing.Literal:
        return all(type(option) in (str, int, bool, type(None)) for option in options)
    if origin in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        return not options or (options[0] in (str, Any) and is_json_type(options[1]))
    lists = (list, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Iterable)
    if origin in (*lists, typing.Union, types.UnionType):
        return all(is_json_type(option) for option in options)
    return expected in (str, int, float, bool, type(None), Any, object)


def type_name(expected: Any) -> str:
    """A type as one writes it, without modules and notes: `int`, `list[int]`, `Literal['a', 'b']`, `str | None`.

    >>> type_name(typing.Optional[re.RegexFlag]), type_name(tuple[int, ...]), type_name(typing.Annotated[int, 3])
    ('RegexFlag | None', 'tuple[int, ...]', 'int')
    """
    origin, options = typing.get_origin(expected), typing.get_args(expected)
    if origin is typing.Annotated:
        return type_name(options[0])
    if origin and not is_json_type(expected):
        if origin is typing.Literal:  # a member of an Enum by its value, which is what one writes
            names = [repr(getattr(option, "value", option)) for option in options]
        else:
            names = [type_name(option) for option in options]
        union = origin in (typing.Union, types.UnionType)
        return " | ".join(names) if union else f"{type_name(origin)}[{', '.join(names)}]"
    if expected in (type(None), ...):
        return "..." if expected is ... else "None"
    if origin is None and hasattr(expected, "__name__"):
        return expected.__name__
    return str(expected).replace("typing.", "")


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
    return True  # classes of settings: the dataclass itself converts and refuses them


def json_text(value: Any, **options: Any) -> str:
    """A value as JSON that every reader takes: NaN and infinities, which JSON does not have, become null.

    >>> json_text({"a": [float("nan"), 1.5], "b": float("-inf")})
    '{"a": [null, 1.5], "b": null}'
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        # Python writes NaN and infinities as constants, and `parse_constant` is called for each, at every depth.
        known = json.loads(json.dumps(value, **options), parse_constant=lambda name: None)
        return json.dumps(known, allow_nan=False, **options)


MOST_NESTED = 64  # levels of lists and dicts in a call; clients of agents raise at some 250


def is_nested(value: Any, most: int = MOST_NESTED) -> bool:
    """Whether a value has more than this number of levels of lists and dicts.

    >>> is_nested({"a": [1]}, 2), is_nested({"a": [1]}, 1), is_nested(1, 0)
    (False, True, False)
    """
    level = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True
