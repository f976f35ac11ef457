"""Runs a synchronous reward function where TRL runs it: in the main thread, where signals work, with a time limit.

Only the main thread may install a signal handler. math-verify limits its time with SIGALRM: in another thread it
silently reads every answer as wrong.

At the limit a signal interrupts the function: its handler raises `OutOfTime` inside it. That ends Python code, sleeps,
locks, sockets and subprocesses, after which the run saves a checkpoint and ends. Nothing in this process can end a
call that stays in C. After `GRACE` seconds more, the standard library's `faulthandler` prints where it hangs, and
ends the process: otherwise the run, and all of its ranks, would wait for ever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import faulthandler
import functools
import inspect
import logging
import os
import random
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import gather_all, run_async, start_in_background
from mt_grpo.base.json_types import is_image
from mt_grpo.base.ranks import RunStopped
from mt_grpo.base.rows import WrittenRow, row_text
from mt_grpo.conversation.tools.threads import ToolTimeout, run_tool
from mt_grpo.images.pictures import readable_messages
from mt_grpo.rollout import Rollout, ToolCall, Turn

logger = logging.getLogger(__name__)
GRACE = 30.0  # seconds between the limit and the end of the process
LONGEST = 1e9  # seconds that both a lock and faulthandler can wait
AGAIN = 1.0  # between two interruptions: a `with ThreadPoolExecutor()` goes on waiting after the first
# A signal of nobody's: rewards use SIGALRM, Slurm SIGUSR1, profilers SIGPROF. macOS has no real-time signals.
WAKE = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


class OutOfTime(BaseException):
    """Raised inside a reward at its limit. It is no `Exception`, which many rewards turn into a reward of 0."""


class StopAsked(BaseException):
    """Raised inside a reward when a signal asked the run to stop. It is no `Exception`, for the same reason."""


class RewardCall:
    """A call in the main thread, and the thread that watches its time.

    Attributes:
        runs: Whether the function is running, so that it may be interrupted.
        stop: The error that a handler of SIGTERM or SIGINT raised meanwhile.
    """

    current: RewardCall | None = None

    def __init__(self, name: str, timeout: float):
        self.name, self.timeout = name, min(timeout, LONGEST)
        self.runs, self.late, self.stop = True, False, None
        self._over = threading.Event()

    def begin(self) -> None:
        """Start the timer."""
        RewardCall.current = self
        signal.signal(WAKE, interrupt)  # it stays: a late signal without a handler would end the process
        faulthandler.dump_traceback_later(self.timeout + GRACE, exit=True, file=2)
        threading.Thread(target=self._watch, name=f"limit-of-{self.name}", daemon=True).start()

    def end(self) -> None:
        """Stop the timer, and mark the function as ended."""
        self.runs = False
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        if self._over.wait(self.timeout):
            return
        self.late, warns_at = True, time.monotonic() + GRACE / 2
        while not self._over.is_set():
            signal.pthread_kill(threading.main_thread().ident, WAKE)
            self._over.wait(min(AGAIN, GRACE / 4))
            if time.monotonic() > warns_at and not self._over.is_set():
                warns_at = float("inf")
                logger.error(
                    f"Reward {self.name} took longer than reward_timeout={self.timeout:g} s and cannot be "
                    f"interrupted. It runs C code, or catches all exceptions. In {GRACE / 2:g} s this process exits "
                    "with a traceback of the hang, and without a new checkpoint. Resume from the last checkpoint."
                )


def interrupt(signum: int, frame: Any) -> None:
    """Signal handler of `WAKE`: raises `OutOfTime` inside a reward function that exceeded its limit."""
    call = RewardCall.current
    if call is not None and call.runs and call.late:
        raise OutOfTime


def in_main_thread() -> bool:
    """Whether this is the main thread, the only one in which signals work."""
    return threading.current_thread() is threading.main_thread()


def call_in_main_thread(func: Callable, arguments: dict[str, Any], timeout: float) -> Any:
    """Call a function within a time limit, and return its result. Must be called in the main thread.

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
        raise RuntimeError(error_line(error)) from error
    finally:
        call.end()
        if call.stop is not None:  # also where the function caught it
            raise call.stop


@contextmanager
def stops_pass(call: RewardCall) -> Iterator[None]:
    """Context manager in which SIGTERM and SIGINT end the function even if it has an `except Exception`."""

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
    """Context manager that cancels a SIGALRM which a function leaves pending, such as an interrupted one."""
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
    """Context manager in which a function may call `asyncio.run`, also in a notebook with a running loop."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


BLOCKED_SECONDS = 30.0  # after reward_timeout; then an async function blocks the loop that enforces its limit

AWAIT = "Use `await` inside it (aiohttp, asyncio.sleep), or remove `async`, so that it runs in the main thread."

REWARD_COLUMNS = (  # arguments of a reward function besides the columns of the data
    "prompts", "completions", "completion_ids", "rollout_turns", "environments", "environment_rewards",
    "trainer_state", "log_extra", "log_metric",
)  # fmt: skip


def rollout_columns(rollouts: list[Rollout], prompts: list) -> dict[str, list]:
    """The arguments of reward functions that come from the rollouts, in addition to the columns of the data.

    Args:
        rollouts: The rollouts of this rank.
        prompts: The rows' prompts, for rollouts whose environment has not replaced them.
    """
    return {
        "prompts": [readable_messages(rollout.first_messages or prompt) for rollout, prompt in zip(rollouts, prompts)],
        "completions": [readable_messages(rollout.completion) for rollout in rollouts],
        "completion_ids": [rollout.completion_ids for rollout in rollouts],
        "environments": [rollout.environment for rollout in rollouts],
        "environment_rewards": [rollout.reward for rollout in rollouts],
        "rollout_turns": [rollout.turns for rollout in rollouts],
    }


PLAIN = {int, float, str, bool, type(None)}


def own_copy(value: Any) -> Any:
    """A deep copy of lists, dicts, rows, tuples, turns, calls and images. Other objects are not copied."""
    kind = type(value)
    if kind in (list, tuple):
        return kind([v if type(v) in PLAIN else own_copy(v) for v in value])  # ids and logprobs: there are many
    if kind in (dict, WrittenRow):
        return kind((k, own_copy(v)) for k, v in value.items())
    if kind in (Turn, ToolCall):
        copied = copy.copy(value)
        vars(copied).update(own_copy(vars(value)))
        return copied
    return value.copy() if is_image(value) else value


@contextmanager
def noise_apart(step: int, device: torch.device, call: int = 0) -> Iterator[None]:
    """Context manager in which functions draw random numbers of torch, `random` and numpy that are not the run's.

    INVARIANT: no reward changes what a run samples or trains, or what environments draw. One that calls
    `torch.manual_seed(0)` or `random.seed(0)` would otherwise give every step the same noise. What functions draw
    differs from step to step and from `call` to call of a step. It is the same in a resumed run.
    """
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        state = torch.get_rng_state().numpy().tobytes()
        seed = zlib.crc32(state + str(step).encode() + b"+%d" % call * bool(call))
        for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
            set_seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            numpy.random.set_state(of_numpy)


def run_rewards(funcs: list[Callable], columns: dict[str, Any], timeout: float, device: torch.device) -> list:
    """Call all reward functions for a batch. Async functions run concurrently, the others one after another.

    INVARIANT: each function gets its own copy of the columns. A function that changes them affects no other function.

    Functions without `async` run in the main thread, as in TRL: see `reward_calls`. If training itself runs in
    another thread, they run in threads, in which signals do not work.

    Raises:
        RuntimeError: A function raised, or took longer than `timeout` seconds. The message names the first such one.
    """

    def failure(func: Callable, error: Exception) -> RuntimeError:
        if isinstance(error, ToolTimeout):
            return RuntimeError(
                f"Reward {func.__name__} took longer than reward_timeout={timeout:g} s for {len(columns['prompts'])} "
                "rollouts. Check the server that it may ask, or raise reward_timeout if it needs longer."
            )
        text = error_line(error)
        hint = " (rewards run in threads here)" if "thread" in text and not in_main_thread() else ""
        if isinstance(error, KeyError) and error.args and error.args[0] not in columns:
            hint = f": there is no such column. Columns: {', '.join(columns)}"
        where = where_raised(func, error)
        return RewardError(f"Reward {func.__name__} raised {text}{hint} ({where})", func)

    async def run_awaited(func: Callable) -> Any:
        started = time.monotonic()
        try:
            value = await run_tool(func, own_copy(columns), timeout)
        except Exception as error:
            raise failure(func, error) from (None if isinstance(error, ToolTimeout) else error)
        if (took := time.monotonic() - started) > timeout + 0.5:  # no limit reaches what does not await
            raise RuntimeError(
                f"Reward {func.__name__} took {took:.3g} s, longer than reward_timeout={timeout:g} s. It, or another "
                f"async reward, blocks the event loop. {AWAIT}"
            )
        return value

    async def all_awaited() -> None:
        for i, value in zip(awaited, await gather_all([run_awaited(funcs[i]) for i in awaited])):
            values[i] = value

    values: list = [None] * len(funcs)
    awaited = [i for i, func in enumerate(funcs) if inspect.iscoroutinefunction(func)]
    running, began = start_in_background(all_awaited()), time.monotonic()
    try:
        for i in sorted(set(range(len(funcs))) - set(awaited)):
            try:
                values[i] = run_synchronous(funcs[i], columns, timeout, device)
            except RunStopped:
                raise
            except Exception as error:
                raise failure(funcs[i], error) from (None if isinstance(error, ToolTimeout) else error)
        left = began + timeout + BLOCKED_SECONDS - time.monotonic()
        running.result(min(max(0.0, left), threading.TIMEOUT_MAX))  # a lock takes no longer limit
    except RewardError as error:
        raise with_row(error, columns, device) from error.__cause__
    except concurrent.futures.TimeoutError:
        raise RuntimeError(
            f"Rewards took longer than {timeout + BLOCKED_SECONDS:g} s. An async function blocks the event loop, "
            f"so its time limit cannot be enforced. {AWAIT}"
        ) from None
    finally:
        running.cancel()
    return values


def with_row(error: RewardError, columns: dict[str, Any], device: torch.device) -> RewardError:
    """The error with the rollout for which the function raises alone, and its row: see `raises_alone`."""
    func = error.func

    def call(part: dict[str, Any], seconds: float) -> None:
        if inspect.iscoroutinefunction(func):
            run_async(run_tool(func, own_copy(part), seconds))
        else:
            run_synchronous(func, part, seconds, device)

    places, count = raises_alone(func, error.__cause__, columns, call), len(columns["prompts"])
    if not places:
        return RewardError(f"{error}. It does not raise this for any single rollout.", func)
    of_data = {
        key: value
        for key, value in columns.items()
        if key not in (*REWARD_COLUMNS, "turn_contexts") and isinstance(value, list)
    }
    return RewardError(
        f"{error}. Called with one rollout at a time, it raises this for {len(places)} of {count}, first for rollout "
        f"{places[0]}, whose row is {row_shown(of_data, places[0])}",
        func,
        places[0],
    )


@functools.cache
def warn_of_threads() -> None:
    """Warn once that rewards run in threads, in which signals do not work."""
    logger.warning(
        "Training does not run in the main thread, so rewards run in other threads, which cannot install signal "
        "handlers. A time limit with SIGALRM raises ValueError there. Train in the main thread for such rewards."
    )


def run_synchronous(func: Callable, columns: dict[str, Any], timeout: float, device: torch.device) -> Any:
    """Call a function without `async` and return its result. It may return an awaitable, which is then awaited.

    Raises `ToolTimeout`, or the error of the function.
    """
    if not in_main_thread():
        warn_of_threads()

        def on_device(**kwargs: Any) -> Any:  # every thread has its own current GPU
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return func(**own_copy(kwargs))  # in the thread: a large copy would block the loop

        on_device.__name__ = func.__name__
        return run_async(run_tool(on_device, columns, timeout))
    began = time.monotonic()
    returned = call_in_main_thread(func, own_copy(columns), timeout)
    if not inspect.isawaitable(returned):
        return returned

    async def rest() -> Any:
        return await returned

    rest.__name__ = func.__name__
    return run_async(run_tool(rest, {}, timeout - (time.monotonic() - began)))


SEARCH_SECONDS = 10.0  # for all calls with one rollout each; the run waits so long to end


class RewardError(RuntimeError):
    """A reward function raised.

    Attributes:
        func: It.
        place: The place in the batch of the first rollout for which it raises alone; None: not known.
    """

    def __init__(self, message: str, func: Callable, place: int | None = None):
        super().__init__(message)
        self.func, self.place = func, place


def file_of(func: Callable) -> str | None:
    """The file in which a function, or the class of a callable object, is written; None for a built-in one."""
    while isinstance(func, functools.partial):
        func = func.func
    func = inspect.unwrap(func)
    try:
        return inspect.getsourcefile(func if inspect.isroutine(func) or isinstance(func, type) else type(func))
    except TypeError:
        return None


def where_raised(func: Callable, error: BaseException) -> str:
    """The file and the line of the function's own file that ran last, and of what it called, if that raised.

    >>> import json
    >>> try:
    ...     json.loads("{")
    ... except ValueError as error:
    ...     where_raised(json.loads, error).rpartition("/")[2].rpartition(",")[0]
    'decoder.py'
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown location"
    own = [frame for frame in frames if frame.filename == file_of(func)]
    places = dict.fromkeys(f"{short(frame.filename)}, line {frame.lineno}" for frame in [*own[-1:], frames[-1]])
    return ", which called ".join(places)


def short(path: str) -> str:
    """A path as one types it, from the working directory if it lies below."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def raises_alone(func: Callable, error: BaseException, columns: dict[str, Any], call: Callable) -> list[int]:
    """The places of the rollouts for which a function raises alone, the same kind of error at the same line.

    The function is called once more with each rollout alone, for `SEARCH_SECONDS` at most. It logs nothing meanwhile.
    A call that takes longer ends the search.

    Args:
        func: It has raised `error`.
        error: What it raised.
        columns: What it got: a list per column, and what is of no single rollout.
        call: Calls it with columns, and seconds that it may take.
    """
    where, end, places = where_raised(func, error), time.monotonic() + SEARCH_SECONDS, []
    silent = {name: lambda *args: None for name in ("log_extra", "log_metric") if name in columns}
    for i in range(len(columns["prompts"])):
        part = {key: [v[i]] if isinstance(v, list) else v for key, v in columns.items()} | silent
        try:
            call(part, max(end - time.monotonic(), 0.001))
        except ToolTimeout:
            break
        except Exception as again:
            if type(again) is type(error) and where_raised(func, again) == where:
                places.append(i)
        if time.monotonic() >= end:
            break
    return places


def row_shown(columns: dict[str, list], place: int) -> str:
    """A rollout's row, without what is no column of the data, as JSON that is cut."""
    return row_text({key: values[place] for key, values in columns.items()})
