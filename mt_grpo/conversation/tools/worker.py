"""The program of a tool's process, and results as data. It imports the standard library alone, to start fast."""

from __future__ import annotations

import asyncio
import base64
import collections.abc
import ctypes
import dataclasses
import enum
import functools
import importlib.util
import inspect
import json
import os
import re
import sys
from typing import Any

ADDRESS = r" at 0x[0-9a-fA-F]+"
LONGEST = 1 << 24  # characters of a result: it is read by the loop that all conversations share


def json_form(value: Any) -> Any:
    """Convert a value one step towards JSON. Raises `TypeError` for an object without data."""
    nodata = (type, collections.abc.Iterator, collections.abc.AsyncIterator, collections.abc.Awaitable)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, nodata):
        pass
    elif dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "model_dump"):  # pydantic
        return value.model_dump(mode="json")
    elif hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    elif hasattr(value, "isoformat"):  # date, time
        return value.isoformat()
    elif isinstance(value, collections.abc.Mapping):
        return dict(value)
    elif isinstance(value, collections.abc.Set):  # in an order that does not depend on hashes
        dump = functools.partial(json.dumps, default=json_form, sort_keys=True)
        return sorted(value, key=lambda x: (0, x, "") if isinstance(x, (int, float)) else (1, 0, dump(x)))
    elif isinstance(value, (collections.deque, collections.UserList, collections.abc.ValuesView)):
        return list(value)
    elif not callable(value) and not re.search(ADDRESS, text := str(value)):  # Decimal, Path, UUID
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
        from mt_grpo.images.pictures import uri_or_str

        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            raise ValueError(f"the tool returned an animated image ({image.n_frames} pictures). Give one of them")
        return {"type": "image", "image": uri_or_str(image)}
    if image is part or not isinstance(image, (bytes, bytearray)):
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


async def awaited(result: collections.abc.Awaitable) -> Any:
    """The result of an async function behind a plain decorator."""
    return await result


def serve(path: str, folders: list[str], typed: bool) -> None:
    """Import a tools file and answer calls, one JSON line each. `typed`: a parameter's type is none of JSON's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: no hanging call outlives the trainer
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a tool prints is no answer
    sys.path[:] = folders
    spec = importlib.util.spec_from_file_location("tools_script", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tools = [tool.run if hasattr(tool, "run") and hasattr(tool, "schema") else tool for tool in module.TOOL_FUNCTIONS]
    if typed:
        from mt_grpo.conversation.tools.arguments import read_argument, readers_of

        for tool in tools:
            readers_of(tool)  # pydantic's work is not the first call's time
    answers.write(b"ready\n")
    answers.flush()
    for call in calls:
        try:
            index, arguments = json.loads(call)
            if typed:
                arguments = {name: read_argument(tools[index], name, value) for name, value in arguments.items()}
            result, reward, kind = tools[index](**arguments), None, None
            if inspect.isawaitable(result):
                result = asyncio.run(awaited(result))
            if type(result).__name__ == "ToolResult":
                result, reward, kind = result.text, result.reward, result.error
            answer = json.dumps({**as_sent(result), "reward": None if reward is None else float(reward), "kind": kind})
        except BaseException as error:
            name = type(error).__name__
            answer = json.dumps(
                {"error": name, "text": str(error) if isinstance(error, Exception) else f"{name}: {error}"}
            )
        if len(answer) > LONGEST:
            answer = json.dumps({"error": "ValueError", "text": "the result is longer than 16 MiB"})
        answers.write(answer.encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
