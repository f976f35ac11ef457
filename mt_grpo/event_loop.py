"""One event loop in a background thread, so that synchronous calls also work inside a notebook's running loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import resource
import threading
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any

LOOP_THREAD, CONTROL_THREAD = "mt-grpo-rollouts", "mt-grpo-control"


@functools.cache
def background_loop(thread: str = LOOP_THREAD) -> asyncio.AbstractEventLoop:
    """One event loop in a daemon thread, so that synchronous calls also work in a notebook's running loop."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            try:
                return loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a task that an async tool has started: it gets it as well
                pass

    threading.Thread(target=run, name=thread, daemon=True).start()
    return loop


def start_in_background(coroutine: Coroutine) -> concurrent.futures.Future:
    """Run a coroutine on the background loop; returns at once."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


def run_async(coroutine: Coroutine, timeout: float | None = None) -> Any:
    """Run a coroutine on the background loop and wait for its result; cancels it when the wait is interrupted.

    Raises `concurrent.futures.TimeoutError` after `timeout` seconds, also where the loop itself is blocked.
    """
    if threading.current_thread().name == LOOP_THREAD:
        coroutine.close()
        raise RuntimeError(
            "generate, step and chat wait for this very loop: from an async tool await converse instead."
        )
    future = start_in_background(coroutine)
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


async def gather_all(coroutines: list[Awaitable]) -> list:
    """Like `asyncio.gather`, but the first error cancels the rest instead of leaving them running."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def allow_many_open_files(wanted: int = 65_535) -> None:
    """Raise this process's soft limit, often 1,024: a conversation has a connection, a tool's process two pipes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # as far as the machine lets us
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def close_on(loop: asyncio.AbstractEventLoop, closing: Coroutine, timeout: float = 5.0) -> None:
    """Run what closes something on the loop that it belongs to, whatever that loop is doing."""
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(closing, loop)
    elif loop.is_closed():
        run_async(closing, timeout)
    else:  # in a thread, since this one may run another loop
        thread = threading.Thread(target=loop.run_until_complete, args=(closing,), daemon=True)
        thread.start()
        thread.join(timeout)
