"""Runs tools within their time limit: async tools on the event loop, others in reusable threads."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.rollout import ToolResult

logger = logging.getLogger(__name__)

HUNG = "hung-tool-"  # prefix of the names of threads whose call was abandoned
IDLE = "tool-idle"
NO_SIGNALS = "signal only works in main thread"  # of Python's own error

# A call that is given up at its time limit appends a future to this list, if there is one. The future is done when the
# call is over. Until then the call's thread works on, since it cannot be stopped, and what it works on is in use.
GIVEN_UP: contextvars.ContextVar[list[asyncio.Future] | None] = contextvars.ContextVar("GIVEN_UP", default=None)


class ToolTimeout(Exception):
    """A tool call exceeded its time limit. It is not a `TimeoutError`, because the tool itself may raise that."""


class ToolsUnavailable(RuntimeError):
    """No tool can run, for lack of threads or processes. The policy must not read this, since it made no mistake."""


class ToolThreads:
    """Daemon threads for synchronous tools: one per simultaneous call, and reused for later calls.

    A thread of its own starts them. `Thread.start` returns when the new thread runs, which takes milliseconds if the
    cores are busy: 128 starts on the event loop would block all conversations for tenths of a second.

    The pools of asyncio and `concurrent.futures` do not fit. Their size is fixed, and they are joined at exit: hung
    tools would block other tools and the end of the process. anyio's pool does not fit either. It starts its threads
    on the event loop, and they are no daemons if the loop runs in the main thread.
    """

    IDLE_SECONDS = 60.0  # an idle thread ends after this time
    WAIT_SECONDS = 60.0  # for a free thread, if the system refuses a new one

    def __init__(self):
        # Inboxes of idle threads. Used last-in-first-out, so that surplus ones stay idle and end.
        self._idle: list[queue.SimpleQueue] = []
        self._wanted = 0  # calls that wait for a thread
        self._lock = threading.Lock()
        self._starter = ThreadPoolExecutor(1, "tool-starter")

    async def submit(self, work: Callable[[], Any], deliver: Callable[[Any], None]) -> None:
        """Let a thread run `work`, which must not raise, and then call `deliver` with its result.

        Returns as soon as a thread is found. Raises `ToolsUnavailable` if none is free or started in time.
        """
        inbox = self._take() or await self._free_thread()

        def run() -> None:
            result = work()
            with self._lock:
                self._idle.append(inbox)  # first: whoever learns the result finds this thread, and starts no other
            deliver(result)

        inbox.put(run)

    async def _free_thread(self) -> queue.SimpleQueue:
        give_up = time.monotonic() + self.WAIT_SECONDS
        with self._lock:
            self._wanted += 1
        try:
            while (inbox := self._take()) is None:
                try:
                    await asyncio.get_running_loop().run_in_executor(self._starter, self._start)
                except RuntimeError as error:  # the system refuses a new thread
                    if time.monotonic() > give_up:
                        raise ToolsUnavailable(
                            f"no thread for a tool could be started in {self.WAIT_SECONDS:g} s: {error}. Check the "
                            "limit of processes (ulimit -u) and the memory, or lower max_concurrent_tools."
                        ) from error
                    await asyncio.sleep(0.05)
            return inbox
        finally:
            with self._lock:
                self._wanted -= 1

    def _take(self) -> queue.SimpleQueue | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _start(self) -> None:
        if len(self._idle) >= self._wanted:  # the call no longer waits for a thread
            return
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(inbox,), name=IDLE, daemon=True).start()
        with self._lock:
            self._idle.append(inbox)

    def _run(self, inbox: queue.SimpleQueue) -> None:
        while True:
            try:
                inbox.get(timeout=self.IDLE_SECONDS)()
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:  # otherwise a call has just taken it
                        self._idle.remove(inbox)
                        return


TOOL_THREADS = ToolThreads()


@functools.cache
def warn_of_hung(name: str, timeout: float) -> None:
    """Warn once per tool that a call goes on after its time limit."""
    logger.warning(
        f"{name} took longer than {timeout:g} s. The call goes on in its thread, which cannot be stopped and may slow "
        "down the run (the metric tools/hung_threads counts such threads). Give the tool a time limit of its own, or "
        "set isolate_tools: true to run the functions of TOOL_FUNCTIONS in processes, which are killed at the limit."
    )


@functools.cache
def warn_of_signals(name: str) -> None:
    """Warn once per tool that the model reads errors about signal handlers as its results."""
    logger.warning(
        f"{name} returns {NO_SIGNALS!r}...: it sets a signal handler, such as SIGALRM for a time limit of its own, "
        "which Python allows only in the main thread. Set isolate_tools: true to run the functions of TOOL_FUNCTIONS "
        "in the main thread of a process."
    )


MOST_ON_LOOP = 2**16  # characters of a text that an event loop finishes itself


async def finished(result: Any, finish: Callable[[Any], Any]) -> Any:
    """Call `finish` on the result of an async tool, in a thread unless it is a number or a short text.

    INVARIANT: no image is decoded on the event loop. One of a few megabytes would hold up all other conversations for
    a tenth of a second.
    """
    text = result.text if isinstance(result, ToolResult) else result  # a `ToolResult` may hold an image as well
    if text is None or isinstance(text, (bool, int, float)) or (isinstance(text, str) and len(text) <= MOST_ON_LOOP):
        return finish(result)
    loop = asyncio.get_running_loop()
    done: asyncio.Future = loop.create_future()

    def work() -> tuple[Any, BaseException | None]:
        try:
            return finish(result), None
        except BaseException as error:
            return None, error

    def deliver(outcome: tuple[Any, BaseException | None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: no call waits any more
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(outcome))

    await TOOL_THREADS.submit(work, deliver)
    value, error = await done
    if error is not None:
        raise error
    return value


async def run_tool(
    tool: Callable, arguments: dict[str, Any], timeout: float, finish: Callable[[Any], Any] | None = None
) -> Any:
    """Run one tool: an async one as a task, a synchronous one in a daemon thread, or in a process (`ToolProcesses`).

    Args:
        tool: The tool.
        arguments: Its arguments by name.
        timeout: Time limit of the call in seconds. The wait for a thread or a process does not count.
        finish: Converts the result; None: it stays as it is. It runs in the tool's thread, or for an async tool in
            another one, because a large result or an image would block the event loop.

    Raises:
        ToolTimeout: The call exceeded `timeout`. Its task is cancelled, or its thread is abandoned.
        ToolsUnavailable: There is neither a thread nor a process for the call, or it needs signals in a thread.
        Exception: The error of the tool. `SystemExit` and the like become `RuntimeError`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future = loop.create_future()  # (result, error): a future cannot hold StopIteration as its exception

    def deliver(result, error):
        if not done.done():
            done.set_result((result, error))

    thread, context = None, contextvars.copy_context()
    context.run(GIVEN_UP.set, None)  # what the tool calls on a loop of its own is no future of this loop

    def work():
        nonlocal thread
        thread = threading.current_thread()
        thread.name = f"tool-{tool.__name__}"
        try:
            result = context.run(tool, **arguments)
            return result if finish is None or inspect.isawaitable(result) else finish(result), None
        except BaseException as error:
            return None, error
        finally:
            thread = None
            threading.current_thread().name = IDLE

    def deliver_in_loop(outcome):
        with suppress(RuntimeError):  # the loop is closed: no call waits any more
            loop.call_soon_threadsafe(deliver, *outcome)

    async def wait_for(awaitable):
        try:
            value = await awaitable
            deliver(value if finish is None else await finished(value, finish), None)
        except BaseException as error:  # SystemExit would end the loop of all conversations
            deliver(None, error)

    call = await tool.prepare() if hasattr(tool, "prepare") else tool  # starts a process before the time limit begins
    task, deadline = None, loop.time() + timeout
    try:
        if inspect.iscoroutinefunction(call):
            task = loop.create_task(wait_for(call(**arguments)))
        else:
            await TOOL_THREADS.submit(work, deliver_in_loop)
            deadline = loop.time() + timeout
        await asyncio.wait({done}, timeout=timeout)
        if done.done() and inspect.isawaitable(done.result()[0]):  # an async function behind a plain decorator
            awaitable, done = done.result()[0], loop.create_future()
            task = loop.create_task(wait_for(awaitable))
            await asyncio.wait({done}, timeout=deadline - loop.time())
    finally:
        if task is not None:
            task.cancel()
    if not done.done():
        if (abandoned := thread) is not None:
            abandoned.name = f"{HUNG}{tool.__name__}"
            if call is tool:  # a process is ended
                warn_of_hung(tool.__name__, timeout)
        if (given_up := GIVEN_UP.get()) is not None:
            given_up.append(done)
        raise ToolTimeout(f"{tool.__name__} took longer than {timeout:g} s")
    result, error = done.result()
    if isinstance(error, ValueError) and NO_SIGNALS in str(error):
        raise ToolsUnavailable(
            f"{tool.__name__} sets a signal handler, such as SIGALRM for a time limit of its own. Python allows this "
            "only in the main thread, and tools and environments run in other threads. Set isolate_tools: true to run "
            "the functions of TOOL_FUNCTIONS in the main thread of a process, or use the trainer's limits instead: "
            "tool_timeout, environment_timeout."
        ) from error
    if NO_SIGNALS in str(getattr(result, "text", result))[:1000]:  # the tool caught the error, and says it
        warn_of_signals(tool.__name__)
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(error_line(error))
    return result
