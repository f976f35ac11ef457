"""Runs a synchronous reward function where TRL runs it: in the main thread, where signals work, with a time limit.

Only the main thread may install a signal handler. math-verify limits its time by SIGALRM: in another thread it reads
every answer as wrong, without a word.

At the limit a signal interrupts the function: its handler raises `OutOfTime` inside it. That ends Python code, sleeps,
locks, sockets and subprocesses, after which the run saves a checkpoint and ends. Nothing in this process can end a
call that stays in C. After `GRACE` seconds more, the standard library's `faulthandler` prints where it hangs, and
ends the process: otherwise the run, and all of its ranks, would wait for ever.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mt_grpo.conversation.tools.threads import ToolTimeout

logger = logging.getLogger(__name__)
GRACE = 30.0  # seconds between the limit and the end of the process
LONGEST = 1e9  # seconds that both a lock and faulthandler can wait
AGAIN = 1.0  # between two interruptions: a `with ThreadPoolExecutor()` goes on waiting behind the first
# A signal of nobody's: rewards use SIGALRM, Slurm SIGUSR1, profilers SIGPROF. macOS has no real-time signals.
WAKE = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


class OutOfTime(BaseException):
    """Raised inside a reward at its limit. It is no `Exception`, which many rewards turn into a reward of 0."""


class StopAsked(BaseException):
    """Raised inside a reward when a signal asked the run to stop. It is no `Exception`, for the same reason."""


class RewardCall:
    """A call in the main thread, and the thread that watches its time.

    Attributes:
        runs: Whether the function runs, so that it may be interrupted.
        stop: What a handler of SIGTERM or SIGINT raised meanwhile.
    """

    current: RewardCall | None = None

    def __init__(self, name: str, timeout: float):
        self.name, self.timeout = name, min(timeout, LONGEST)
        self.runs, self.late, self.stop = True, False, None
        self._over = threading.Event()

    def begin(self) -> None:
        """Let the time begin."""
        RewardCall.current = self
        signal.signal(WAKE, interrupt)  # it stays: a late signal without a handler would end the process
        faulthandler.dump_traceback_later(self.timeout + GRACE, exit=True, file=2)
        threading.Thread(target=self._watch, name=f"limit-of-{self.name}", daemon=True).start()

    def end(self) -> None:
        """Let it end, with whatever the function has set up."""
        self.runs = False
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        if self._over.wait(self.timeout):
            return
        self.late, told = True, time.monotonic() + GRACE / 2
        while not self._over.is_set():
            signal.pthread_kill(threading.main_thread().ident, WAKE)
            self._over.wait(min(AGAIN, GRACE / 4))
            if time.monotonic() > told and not self._over.is_set():
                told = float("inf")
                logger.error(
                    f"Reward {self.name} took longer than reward_timeout={self.timeout:g} s, and nothing interrupts "
                    f"it: it is in C code, or catches everything. In {GRACE / 2:g} s this process ends, with a "
                    "traceback of where it hangs, and without a new checkpoint. Resume from the last one."
                )


def interrupt(signum: int, frame: Any) -> None:
    """The handler of `WAKE`."""
    call = RewardCall.current
    if call is not None and call.runs and call.late:
        raise OutOfTime


def in_main_thread() -> bool:
    """Whether signals work here."""
    return threading.current_thread() is threading.main_thread()


def call_in_main_thread(func: Callable, arguments: dict[str, Any], timeout: float) -> Any:
    """What a function returns. Call it in the main thread.

    Raises:
        ToolTimeout: The function exceeded `timeout` seconds, and was interrupted.
        Exception: The error of the function, or of a signal that asked the run to stop. `SystemExit` and the like
            become `RuntimeError`.
    """
    call = RewardCall(func.__name__, timeout)
    try:
        with stops_pass(call), own_alarm(), no_running_loop():
            try:
                call.begin()
                returned = func(**arguments)
                if call.late:  # it caught the interruption, and gives what it gives for whatever fails
                    raise OutOfTime
                return returned
            finally:
                call.end()
    except (Exception, KeyboardInterrupt):
        raise
    except OutOfTime:
        raise ToolTimeout(f"{call.name} took longer than {timeout:g} s") from None
    except BaseException as error:  # such as SystemExit, which would end the run without a word
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        call.end()
        if call.stop is not None:  # also where the function caught it
            raise call.stop


@contextmanager
def stops_pass(call: RewardCall) -> Iterator[None]:
    """Have what handlers of SIGTERM and SIGINT raise end the function, which might catch it: `except Exception`."""

    def passing(handler: Callable) -> Callable:
        def handle(signum: int, frame: Any) -> None:
            try:
                handler(signum, frame)
            except Exception as error:
                call.stop = error
                if call.runs:
                    raise StopAsked from error

        return handle

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number, handler in handlers.items():
            signal.signal(number, passing(handler))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def own_alarm() -> Iterator[None]:
    """Have a SIGALRM that a function leaves pending, as one that is interrupted may, end with it."""
    handler, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    seconds, interval = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        left = max(seconds - (time.monotonic() - began), 0.001) if seconds else 0.0
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        if handler is not None:  # None: it was installed by C code
            signal.signal(signal.SIGALRM, handler)


@contextmanager
def no_running_loop() -> Iterator[None]:
    """Let a function call `asyncio.run` in a notebook, too, whose main thread runs a loop."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
