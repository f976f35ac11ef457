"""Runs tools within their time limit: async tools on the event loop, others in a daemon thread each."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from mt_grpo.base.errors import error_line, tell_once
from mt_grpo.rollout import ToolResult

HUNG = "hung-tool-"  # prefix of the names of threads whose call was abandoned
NO_SIGNALS = "signal only works in main thread"  # of Python's own error
SHORT = 2**16  # characters of a text that an event loop finishes itself

# A call that is given up at its time limit appends a future to this list, if there is one. Until the future is done,
# the call's thread works on, since it cannot be stopped, and what it works on is in use.
GIVEN_UP: contextvars.ContextVar[list[asyncio.Future] | None] = contextvars.ContextVar("GIVEN_UP", default=None)


class ToolTimeout(Exception):
    """A tool call exceeded its time limit. It is not a `TimeoutError`, because the tool itself may raise that."""


class ToolsUnavailable(RuntimeError):
    """No tool can run, for lack of threads or processes. The policy must not read this, since it made no mistake."""


def start_thread(name: str, work: Callable[[], Any]) -> tuple[threading.Thread, asyncio.Future]:
    """Run `work` in a daemon thread, which nothing waits for at exit. The future's result is (result, error)."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    context.run(GIVEN_UP.set, None)  # what the tool calls on a loop of its own is no future of this loop
    done: asyncio.Future = loop.create_future()  # it cannot hold StopIteration as its exception

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
        raise ToolsUnavailable(
            f"no thread for a tool could be started: {error}. Lower max_concurrent_tools."
        ) from error
    return thread, done


async def finished(awaitable: Awaitable, finish: Callable[[Any], Any] | None) -> tuple[Any, BaseException | None]:
    """(result of an async tool, error). SystemExit would end the loop if it reached it.

    INVARIANT: no image is decoded on the event loop, so `finish` runs in a thread unless the text is short.
    """
    try:
        result = await awaitable
        if finish is None:
            return result, None
        text = result.text if isinstance(result, ToolResult) else result  # a `ToolResult` may hold an image as well
        if text is None or isinstance(text, (int, float)) or (isinstance(text, str) and len(text) <= SHORT):
            return finish(result), None
        return await start_thread("tool-result", lambda: finish(result))[1]
    except BaseException as error:
        return None, error


async def run_tool(
    tool: Callable, arguments: dict[str, Any], timeout: float, finish: Callable[[Any], Any] | None = None
) -> Any:
    """Run one tool: an async one as a task, a synchronous one in a daemon thread, or in a process (`ToolProcesses`).

    `finish` converts the result, in a thread as well. The start of a process does not count for `timeout` (seconds).

    Raises:
        ToolTimeout: The call exceeded `timeout`. Its task is cancelled, or its thread is abandoned.
        ToolsUnavailable: There is neither a thread nor a process for the call, or it needs signals in a thread.
        Exception: The error of the tool. `SystemExit` and the like become `RuntimeError`.
    """
    name, loop, thread, done = tool.__name__, asyncio.get_running_loop(), None, None
    call = await tool.prepare() if hasattr(tool, "prepare") else tool  # starts a process before the time limit begins

    def work() -> Any:
        result = call(**arguments)
        return result if finish is None or inspect.isawaitable(result) else finish(result)

    deadline = loop.time() + timeout
    try:
        if inspect.iscoroutinefunction(call):
            done = loop.create_task(finished(call(**arguments), finish))
        else:
            thread, done = start_thread(f"tool-{name}", work)
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
            tell_once(
                f"{name} took longer than {timeout:g} s. The call goes on in its thread, which cannot be stopped (the "
                "metric tools/hung_threads counts such threads). Give the tool a time limit of its own, or set "
                "isolate_tools: true to run TOOL_FUNCTIONS in processes, which are killed at the limit.",
                f"hung {name}",
            )
        if (given_up := GIVEN_UP.get()) is not None:
            given_up.append(done)
        raise ToolTimeout(f"{name} took longer than {timeout:g} s")
    result, error = done.result()
    if NO_SIGNALS in str(error if isinstance(error, ValueError) else getattr(result, "text", result))[:1000]:
        words = (
            f"{name} sets a signal handler, such as SIGALRM for a time limit, which Python allows only in the main "
            "thread. Set isolate_tools: true to run the functions of TOOL_FUNCTIONS in the main thread of a process, "
            "or use the trainer's limits instead: tool_timeout, environment_timeout."
        )
        if error is not None:
            raise ToolsUnavailable(words) from error
        tell_once(words)  # the tool caught the error, and the model reads it
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(error_line(error))
    return result
