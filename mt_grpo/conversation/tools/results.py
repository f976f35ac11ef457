"""Converts a tool's result to the text that the model reads."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Set, ValuesView
from typing import Any

from mt_grpo.rollout import ToolResult


def json_form(value: Any) -> Any:
    """Convert a value one step towards JSON. Raises `TypeError` for an object without data."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Set):  # in an order that does not depend on hashes
        dump = functools.partial(json.dumps, default=json_form, sort_keys=True)
        return sorted(value, key=lambda x: (0, x, "") if isinstance(x, (int, float)) else (1, 0, dump(x)))
    if isinstance(value, (Mapping, deque, ValuesView)):
        return dict(value) if isinstance(value, Mapping) else list(value)
    if not isinstance(value, (type, Iterator, AsyncIterator, Awaitable)):
        if dataclasses.is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        for method, options in (("model_dump", {"mode": "json"}), ("tolist", {}), ("isoformat", {})):
            if hasattr(value, method):  # pydantic; numpy, torch; date, time
                return getattr(value, method)(**options)
        if not callable(value) and not re.search(r" at 0x[0-9a-fA-F]+", text := str(value)):  # Decimal, Path, UUID
            return text
    raise TypeError(f"the tool returned {type(value).__name__}, which is no data: expected text, bytes or JSON data")


def as_text(result: Any) -> str:
    """Convert a tool's result to text for the model: text unchanged, bytes as UTF-8, other values as JSON."""
    while result is not None and not isinstance(result, (str, int, float, list, tuple, dict)):
        result = json_form(result)
    return result if isinstance(result, str) else json.dumps(result, default=json_form, ensure_ascii=False)


@dataclasses.dataclass(frozen=True)
class ResultInParts:
    """A result with images: texts and images for a model that reads images, and a text for a text-only model.

    Without that text, a text-only model reads an error.
    """

    parts: list[Any]
    text: str | None = None


def as_result(result: Any, reader: Any = None) -> ToolResult:
    """Convert a tool's return value to a `ToolResult`. If it is one already, its reward and error are kept.

    A PIL image, or a list of text and image parts, becomes a text with marks if the model reads images.
    """
    if isinstance(result, ToolResult):
        if result.error not in (None, "call", "tool"):
            raise ValueError(f"the tool's ToolResult has error={result.error!r:.60}, expected 'call' or 'tool'")
        return dataclasses.replace(as_result(result.text, reader), reward=result.reward, error=result.error)
    if isinstance(result, ResultInParts):
        if reader is None and result.text is None:
            raise ValueError("the tool returned an image, and this run's model reads text alone")
        try:
            return as_result(result.text if reader is None else result.parts, reader)
        except ValueError as error:
            if result.text is None:
                raise
            return ToolResult(f"{result.text}\n{error}")
    if reader is not None:
        from mt_grpo.images.messages import read_result

        if (read := read_result(result, reader)) is not None:
            return ToolResult(read[0], pictures=tuple(read[1]))
    for part in result if isinstance(result, list) else [result]:
        image = part.get("image") if isinstance(part, dict) and part.get("type") == "image" else part
        image = image.get("bytes") if isinstance(image, dict) else image
        if hasattr(image, "getbands") or (image is not part and isinstance(image, (bytes, bytearray))):
            raise ValueError("the tool returned an image, and this run's model reads text alone")  # and no bytes of it
    return ToolResult(as_text(result))
