"""Validation of a tool's JSON schema, which may come from an agent, a server or a file."""

from __future__ import annotations

from typing import Any

MOST_LEVELS = 64  # of schemas inside schemas, which are read by functions that call themselves


def check_schema(schema: Any) -> None:
    """Raise `ValueError` unless a value is a JSON schema that calls can be parsed with.

    >>> check_schema({"properties": {"a": {"anyOf": [True, {"type": ["integer", "null"]}]}}})
    >>> check_schema({"properties": {"a": {"type": 5}}})
    Traceback (most recent call last):
    ValueError: got a schema of type 5, expected the name of a type, or names
    """
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        each, level = waiting.pop()
        if isinstance(each, bool):
            continue
        if level > MOST_LEVELS:
            raise ValueError(f"got schemas inside schemas on more than {MOST_LEVELS} levels, expected fewer")
        expect(each, dict, "schemas that are objects")
        kinds = each.get("type", [])
        if not all(isinstance(kind, str) for kind in (kinds if isinstance(kinds, list) else [kinds])):
            raise ValueError(f"got a schema of type {kinds!r:.100}, expected the name of a type, or names")
        expect(each.get("enum", []), list, "an enum that is a list")
        inner = [each[key] for key in ("items", "additionalProperties") if isinstance(each.get(key), dict)]
        for key in ("anyOf", "oneOf", "allOf"):
            inner += expect(each.get(key, []), list, f"{key} that is a list of schemas")
        for key in ("properties", "$defs"):
            inner += expect(each.get(key) or {}, dict, f"{key} that are an object").values()
        waiting += [(one, level + 1) for one in inner]


def expect(value: Any, kind: type, expected: str) -> Any:
    """Return a value of this type. Raises `ValueError` for another type."""
    if not isinstance(value, kind):
        raise ValueError(f"got {value!r:.100}, expected {expected}")
    return value
