"""An event loop in a background thread, and functions that run on it, or in threads of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import os
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

LOOP_THREAD, CONTROL_THREAD = "mt-grpo-rollouts", "mt-grpo-control"
EXIT_SECONDS = 60  # that threads may take at the end of the process
LOOPS, STARTING = {}, threading.Lock()  # event loops by the names of their threads


def background_loop(thread: str) -> asyncio.AbstractEventLoop:
    """The event loop of a daemon thread of this name, which is started once. A notebook's own loop may be running."""
    with STARTING:  # two threads may ask for it first
        if thread not in LOOPS:
            LOOPS[thread] = asyncio.new_event_loop()
            threading.Thread(target=run_forever, args=[LOOPS[thread]], name=thread, daemon=True).start()
        return LOOPS[thread]


def run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # a task of an async tool raised it: the loop must go on
            loop.run_forever()


def start_in_background(coroutine: Coroutine, thread: str = LOOP_THREAD) -> concurrent.futures.Future:
    """Start a coroutine on the event loop of a thread; returns at once."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop(thread))


async def run_on_thread(coroutine: Coroutine, thread: str = LOOP_THREAD) -> Any:
    """Run a coroutine on the event loop of a thread, also of this one. A caller that is cancelled cancels it."""
    if asyncio.get_running_loop() is background_loop(thread):
        return await coroutine
    return await asyncio.wrap_future(start_in_background(coroutine, thread))


def run_async(coroutine: Coroutine, timeout: float | None = None, thread: str = LOOP_THREAD) -> Any:
    """Run a coroutine on another thread's loop, and wait up to `timeout` seconds. An interruption cancels it."""
    if threading.current_thread().name == thread:  # which would wait for itself
        coroutine.close()
        raise RuntimeError("generate, step and chat block this event loop. In an async tool, await converse instead.")
    future = start_in_background(coroutine, thread)
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


async def gather_all(coroutines: list[Awaitable]) -> list:
    """Like `asyncio.gather`, but the first error cancels the other coroutines, so that none keeps running."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def at_once(function: Callable[[Any], Any], items: list) -> list:
    """The results of `function` for all items, in threads of their own."""
    with concurrent.futures.ThreadPoolExecutor(max(len(items), 1)) as threads:
        # A single one runs in this thread, where an interruption ends it.
        return list(threads.map(function, items)) if len(items) > 1 else list(map(function, items))


def allow_many_open_files() -> None:
    """Raise this process's soft limit of open files, which is often 1,024. A conversation needs a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_535 if hard == resource.RLIM_INFINITY else min(65_535, hard)
    with suppress(ValueError, OSError):  # where the system refuses, the old limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def run_to_exit(main: Callable[[], None]) -> None:
    """Run a process's `main`. Afterwards a thread that hangs in a tool or a reward does not keep the process."""
    code = 1

    def leave() -> None:
        while True:
            time.sleep(EXIT_SECONDS)
            pools = concurrent.futures.thread._threads_queues  # whose threads Python joins, too, daemons or not
            if names := [t.name for t in threading.enumerate()[1:] if not t.daemon or t in pools]:
                print(f"warning: threads still run, and are left: {', '.join(names)}", file=sys.stderr, flush=True)
                os._exit(code)

    try:
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        threading.Thread(target=leave, daemon=True).start()
