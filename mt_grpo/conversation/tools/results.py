"""Converts a tool's result or error to the text that the model reads."""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import enum
import functools
import io
import json
import re
from typing import Any

from mt_grpo.images.pictures import read_result
from mt_grpo.rollout import ToolResult


def json_form(value: Any) -> Any:
    """Convert a value one step towards JSON. Raises `TypeError` for an object without data."""
    used_up = isinstance(value, (collections.abc.Iterator, collections.abc.AsyncIterator, collections.abc.Awaitable))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for method, options in (("model_dump", {"mode": "json"}), ("tolist", {}), ("isoformat", {})):
        if hasattr(value, method) and not isinstance(value, type):  # pydantic; numpy, torch; date, time
            return getattr(value, method)(**options)
    if isinstance(value, collections.abc.Mapping):
        return dict(value)
    if isinstance(value, collections.abc.Set):  # in an order that does not depend on hashes
        dump = functools.partial(json.dumps, default=json_form, sort_keys=True)
        return sorted(value, key=lambda x: (0, x, "") if isinstance(x, (int, float)) else (1, 0, dump(x)))
    if isinstance(value, (collections.deque, collections.abc.ValuesView)):
        return list(value)
    if (
        not used_up and not callable(value) and not re.search(r" at 0x[0-9a-fA-F]+", text := str(value))
    ):  # Decimal, Path, UUID
        return text
    raise TypeError(f"the tool returned {type(value).__name__}, which is no data: expected text, bytes or JSON data")


def as_text(result: Any) -> str:
    """Convert a tool's result to text for the model: text unchanged, bytes as UTF-8, other values as JSON."""
    while result is not None and not isinstance(result, (str, int, float, list, tuple, dict)):
        result = json_form(result)
    return result if isinstance(result, str) else json.dumps(result, default=json_form, ensure_ascii=False)


def with_data(part: Any) -> Any:
    """Convert a PIL image, or a part with one or with bytes, to a part with a data URI. Other values are unchanged."""
    image = part.get("image") if isinstance(part, dict) and part.get("type") == "image" else part
    if image is not part and isinstance(image, dict) and image.get("bytes") is not None:  # as datasets has it
        image = image["bytes"]
    if hasattr(image, "getbands"):
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            raise ValueError(f"the tool returned an animated image ({image.n_frames} pictures). Give one of them")
        from PIL import ImageOps

        file = io.BytesIO()
        ImageOps.exif_transpose(image).convert("RGB").save(file, "PNG", compress_level=1)
        image = file.getvalue()
    elif image is part or not isinstance(image, (bytes, bytearray)):
        return part
    return {"type": "image", "image": f"data:;base64,{base64.b64encode(image).decode()}"}


def as_sent(result: Any) -> dict[str, Any]:
    """A tool's result as JSON: `text`, or `parts` with an image. `drawn`: a text-only model cannot read them."""
    values = result if isinstance(result, list) else [result]
    parts = [with_data(each) for each in values]
    if not any(isinstance(part, dict) and part.get("type") in ("image", "image_url") for part in parts):
        return {"text": as_text(result)}
    sent = json.loads(as_text(parts if isinstance(result, list) else parts[0]))
    return {"parts": sent, "drawn": any(part is not each for part, each in zip(parts, values))}


@dataclasses.dataclass(frozen=True)
class ResultInParts:
    """A result with images: texts and images for a model that reads images, and a text for a text-only model.

    Without that text, a text-only model reads an error.
    """

    parts: list[Any]
    text: str | None = None


def as_received(answer: dict[str, Any]) -> ToolResult:
    """Restore the result that `as_sent` was given, for `as_result`."""
    parts = ResultInParts(answer["parts"]) if answer.get("drawn") else answer.get("parts")
    return ToolResult(answer["text"] if parts is None else parts, reward=answer["reward"], error=answer["kind"])


def as_result(result: Any, reader: Any = None) -> ToolResult:
    """Convert a tool's return value to a `ToolResult`. If it is one already, its reward and error are kept.

    A PIL image, or a list of text and image parts, becomes a text with marks if the model reads images.
    """
    if isinstance(result, ToolResult):
        if result.error not in (None, "call", "tool"):
            raise ValueError(f"the tool's ToolResult has error={result.error!r:.60}, expected 'call' or 'tool'")
        return dataclasses.replace(as_result(result.text, reader), reward=result.reward, error=result.error)
    if isinstance(result, ResultInParts):
        try:
            if reader is not None:
                return as_result(result.parts, reader)
            if result.text is None:
                raise ValueError("the tool returned an image, and this run's model reads text alone")
            return ToolResult(result.text)
        except ValueError as error:
            if result.text is None:
                raise
            return ToolResult(f"{result.text}\n{error}")
    if reader is not None and (read := read_result(result, reader)) is not None:
        return ToolResult(read[0], pictures=tuple(read[1]))
    return ToolResult(as_text(result))
