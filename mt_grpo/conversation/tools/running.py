"""Runs tools within their time limit, on the event loop or in a daemon thread each; their results as text."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import enum
import functools
import inspect
import json
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Set, ValuesView
from contextlib import suppress
from typing import Any

from mt_grpo.base.errors import error_line, tell_once
from mt_grpo.images.pictures import reader_of
from mt_grpo.rollout import ToolResult

HUNG = "hung-tool-"  # prefix of the names of threads whose call was abandoned
SHORT = 2**16  # characters of a text that an event loop finishes itself
ONE_THREAD = {  # what Python says of an object of another thread, so that each call fails -> what to do
    "signal only works in main thread": "sets a signal handler, for which it needs a process. Or use tool_timeout.",
    "SQLite objects created in a thread": "has an SQLite connection of another call. Set check_same_thread=False.",
}

# A call that is given up at its time limit appends a future to this list, if there is one. Until the future is done,
# the call's thread works on, since it cannot be stopped, and what it works on is in use.
GIVEN_UP: contextvars.ContextVar[list[asyncio.Future] | None] = contextvars.ContextVar("GIVEN_UP", default=None)


class ToolTimeout(Exception):
    """A tool call exceeded its time limit. It is not a `TimeoutError`, because the tool itself may raise that."""


class ToolsUnavailable(RuntimeError):
    """No tool can run, for lack of threads. The policy must not read this, since it made no mistake."""


def start_thread(name: str, work: Callable[[], Any]) -> tuple[threading.Thread, asyncio.Future]:
    """Run `work` in a daemon thread, which nothing waits for at exit. The future's result is (result, error)."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    context.run(GIVEN_UP.set, None)  # what the tool calls on a loop of its own is no future of this loop
    done = loop.create_future()  # it cannot hold StopIteration as its exception

    def run() -> None:
        try:
            outcome = context.run(work), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed: no call waits any more
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(outcome))

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ToolsUnavailable(f"no thread for a tool could be started: {error}.") from error
    return thread, done


async def finished(awaitable: Awaitable, finish: Callable[[Any], Any]) -> tuple[Any, BaseException | None]:
    """(result of an async tool, error). SystemExit would end the loop if it reached it.

    INVARIANT: no image is decoded on the event loop, so `finish` runs in a thread unless the result is a short text.
    """
    try:
        result = await awaitable
        text = result.text if isinstance(result, ToolResult) else result  # a `ToolResult` may hold an image as well
        if isinstance(text, str) and len(text) <= SHORT:
            return finish(result), None
        return await start_thread("tool-result", lambda: finish(result))[1]
    except BaseException as error:
        return None, error


async def run_tool(
    tool: Callable, arguments: dict[str, Any], timeout: float, finish: Callable[[Any], Any] = lambda result: result
) -> Any:
    """Run one tool: an async one as a task, a synchronous one in a daemon thread. `timeout` is in seconds.

    `finish` converts the result, in a thread as well.

    Raises:
        ToolTimeout: The call exceeded `timeout`. Its task is cancelled, or its thread is abandoned.
        ToolsUnavailable: There is no thread for the call, or the tool sets a signal handler, which a thread cannot.
        Exception: The error of the tool. `SystemExit` and the like become `RuntimeError`.
    """
    name, loop, thread = tool.__name__, asyncio.get_running_loop(), None
    deadline = loop.time() + timeout

    def work() -> Any:
        result = tool(**arguments)
        return result if inspect.isawaitable(result) else finish(result)

    if inspect.iscoroutinefunction(tool):
        done = loop.create_task(finished(tool(**arguments), finish))
    else:
        thread, done = start_thread(f"tool-{name}", work)
    try:
        await asyncio.wait({done}, timeout=timeout)
        if done.done() and inspect.isawaitable(done.result()[0]):  # an async function behind a plain decorator
            done = loop.create_task(finished(done.result()[0], finish))
            await asyncio.wait({done}, timeout=deadline - loop.time())
        in_time = done.done()
    finally:
        if isinstance(done, asyncio.Task):
            done.cancel()
    if not in_time:
        if thread is not None and thread.is_alive():
            thread.name = f"{HUNG}{name}"
            words = "The call goes on in its thread, which cannot be stopped (metric tools/hung_threads)."
            words += " Give the tool a time limit of its own, or let it start a process with one."
            tell_once(f"{name} took longer than {timeout:g} s. {words}", f"hung {name}")
        if (given_up := GIVEN_UP.get()) is not None:
            given_up.append(done)
        raise ToolTimeout(f"{name} took longer than {timeout:g} s")
    result, error = done.result()
    said = getattr(result, "text", result) if error is None else error_line(error)
    for text, advice in ONE_THREAD.items():
        if text in str(said)[: 70 if error is not None else 1000]:
            if error is not None:
                raise ToolsUnavailable(f"{name} {advice}") from error
            tell_once(f"{name} {advice}")  # the tool caught the error, and the model reads it
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(error_line(error))
    return result


def results_of(env: Any) -> Callable[[Any], ToolResult]:
    """The function `as_result` with the image reader of an environment's model."""
    return functools.partial(as_result, reader=reader_of(env.tokenizer))


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
    """A result with images: texts and images for a model that reads images, and a text (else an error) for others."""

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


def error_text(error: BaseException) -> str:
    """The text of a tool's error that the model reads; the name of the class if the error has no text.

    >>> error_text(ValueError("no city 'Oslo'")), error_text(KeyError("Oslo")), error_text(KeyError())
    ("no city 'Oslo'", "KeyError: 'Oslo'", 'KeyError')
    """
    name = type(error).__name__
    try:
        # The text of a KeyError is the key alone.
        return f"{name}: {error}" if isinstance(error, KeyError) and error.args else str(error) or name
    except Exception:  # an exception whose own __str__ fails
        return name
