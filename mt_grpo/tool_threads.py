"""Where tools run: async ones on the event loop, others in reusable threads, each within its time."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

HUNG = "hung-tool-"  # how the threads of abandoned calls are called
IDLE = "tool-idle"


class ToolTimeout(Exception):
    """A tool call took longer than it may. Not `TimeoutError`, which a tool may raise for reasons of its own."""


class ToolsUnavailable(RuntimeError):
    """No tool can be run here, whatever the policy calls: the trainer's fault, which the policy must not read."""


class ToolThreads:
    """Daemon threads for synchronous tools: as many as there are calls at the same time, used again afterwards.

    Another thread starts them. `Thread.start` returns when the new thread runs, which takes milliseconds where cores
    are busy: 128 starts in the event loop hold up every conversation for tenths of a second.

    Not asyncio's or `concurrent.futures`' pool: those are of a fixed size and joined at exit, so that hung tools would
    starve the others and hang the end of the process. Not anyio's: it starts its threads in the event loop, and its
    threads are no daemons where the loop runs in the main thread.
    """

    IDLE_SECONDS = 60.0  # until a thread without work ends
    WAIT_SECONDS = 60.0  # for a free thread, where the machine refuses a new one

    def __init__(self):
        # Inboxes of idle threads. Used last-in-first-out, so that surplus ones stay idle and end.
        self._idle: list[queue.SimpleQueue] = []
        self._wanted = 0  # calls that wait for a thread
        self._lock = threading.Lock()
        self._starter = ThreadPoolExecutor(1, "tool-starter")

    async def submit(self, work: Callable[[], Any], deliver: Callable[[Any], None]) -> None:
        """Have a thread run `work`, which must not raise, and then `deliver` with its result.

        Returns when there is a thread for it. Raises `ToolsUnavailable` where none is free or can be started in time.
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
                except RuntimeError as error:  # can't start new thread
                    if time.monotonic() > give_up:
                        raise ToolsUnavailable(
                            f"no thread for a tool within {self.WAIT_SECONDS:g} s: {error}. Check the limit of "
                            "processes (ulimit -u) and the memory, or lower max_concurrent_tools."
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
        if len(self._idle) >= self._wanted:  # asked for by a call that no longer waits
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
                    if inbox in self._idle:  # else work is on its way
                        self._idle.remove(inbox)
                        return


TOOL_THREADS = ToolThreads()


async def run_tool(
    tool: Callable, arguments: dict[str, Any], timeout: float, finish: Callable[[Any], Any] = lambda result: result
) -> Any:
    """Run one tool: an async one as a task, a synchronous one in a daemon thread, or in a process (`ToolProcesses`).

    `finish` is what to make of the result, in that thread: a large one takes its time, and the loop is everybody's.

    Whatever it raises, `SystemExit` included, comes out as an ordinary exception. A call that takes longer than
    `timeout` seconds raises `ToolTimeout` and is abandoned, with its thread or as a cancelled task. Where there is
    neither a thread nor a process for it, it waits for one, outside its time; `ToolsUnavailable` if none comes.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future = loop.create_future()  # of (result, error): a future refuses StopIteration as exception

    def deliver(result, error):
        if not done.done():
            done.set_result((result, error))

    thread, context = None, contextvars.copy_context()

    def work():
        nonlocal thread
        thread = threading.current_thread()
        thread.name = f"tool-{tool.__name__}"
        try:
            result = context.run(tool, **arguments)
            return result if inspect.isawaitable(result) else finish(result), None
        except BaseException as error:
            return None, error
        finally:
            thread = None
            threading.current_thread().name = IDLE

    def deliver_in_loop(outcome):
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(deliver, *outcome)

    async def wait_for(awaitable):
        try:
            deliver(finish(await awaitable), None)
        except BaseException as error:  # a SystemExit here would end the loop that all conversations share
            deliver(None, error)

    call = await tool.prepare() if hasattr(tool, "prepare") else tool  # a process starts before its call's time does
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
        raise ToolTimeout(f"{tool.__name__} took longer than {timeout:g} s")
    result, error = done.result()
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
    return result
