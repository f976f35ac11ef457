"""Values and JSON: whether a value from YAML fits a type, values as text, images as digests."""

from __future__ import annotations

import hashlib
import json
import re
import types
import typing
from enum import Enum
from typing import Any


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


def json_text(value: Any, **options: Any) -> str:
    """A value as JSON that every reader takes: NaN and infinities, which JSON does not have, become null.

    >>> json_text({"a": [float("nan"), 1.5], "b": float("-inf")})
    '{"a": [null, 1.5], "b": null}'
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # Python writes them as constants, and `parse_constant` is called for each, at every depth
        return json.dumps(json.loads(json.dumps(value, **options), parse_constant=lambda name: None), **options)


MOST_NESTED = 64  # levels of lists and dicts in a call; clients of agents raise at some 250


def is_nested(value: Any, most: int = MOST_NESTED) -> bool:
    """Whether a value has more than this number of levels of lists and dicts.

    >>> is_nested({"a": [1]}, 2), is_nested({"a": [1]}, 1), is_nested(1, 0)
    (False, True, False)
    """
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (most == 0 or any(is_nested(each, most - 1) for each in inner))


def is_image(value: Any) -> bool:
    """Whether a value is a PIL image. PIL need not be installed."""
    return hasattr(value, "tobytes") and hasattr(value, "getbands")


def digest_of_image(image: Any, reader: str) -> str:
    """A digest of a PIL image: of its size, its pixels, and the settings of what reads it."""
    size = "{}x{}:".format(*image.size).encode()
    return hashlib.blake2b(reader.encode() + size + image.tobytes(), digest_size=32).hexdigest()


def image_or_str(value: Any) -> str:
    """JSON `default` for hashing rows: an image becomes a hash of its pixels, other values become text."""
    return digest_of_image(value, value.mode) if is_image(value) else str(value)  # its text has its address in memory
