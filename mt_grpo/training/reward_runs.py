"""What reward functions get, and running them within their time limits."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from mt_grpo.base.event_loop import gather_all, run_async, start_in_background
from mt_grpo.base.ranks import RunStopped
from mt_grpo.base.rows import WrittenRow
from mt_grpo.conversation.tools.results import error_text
from mt_grpo.conversation.tools.threads import ToolTimeout, run_tool
from mt_grpo.rollout import Rollout, ToolCall, Turn
from mt_grpo.training.reward_calls import call_in_main_thread, in_main_thread
from mt_grpo.training.reward_errors import RewardError, raises_alone, row_shown, where_raised

logger = logging.getLogger(__name__)
BLOCKED_SECONDS = 30.0  # behind reward_timeout; then an async function blocks the loop on which its limit is kept

REWARD_COLUMNS = (  # arguments of a reward function besides the columns of the data
    "prompts", "completions", "completion_ids", "rollout_turns", "environments", "environment_rewards",
    "trainer_state", "log_extra", "log_metric",
)  # fmt: skip


def rollout_columns(rollouts: list[Rollout], prompts: list) -> dict[str, list]:
    """What reward functions get of the rollouts, beside the columns of the data.

    Args:
        rollouts: Those of this rank.
        prompts: The rows' prompts, in the place of the messages that an environment did not bring.
    """
    return {
        "prompts": [rollout.first_messages or prompt for rollout, prompt in zip(rollouts, prompts)],
        "completions": [rollout.completion for rollout in rollouts],
        "completion_ids": [rollout.completion_ids for rollout in rollouts],
        "environments": [rollout.environment for rollout in rollouts],
        "environment_rewards": [rollout.reward for rollout in rollouts],
        "rollout_turns": [rollout.turns for rollout in rollouts],
    }


def own_copy(value: Any) -> Any:
    """A deep copy of lists, dicts, rows, tuples, turns and calls. Others, such as environments, are not copied."""
    kind = type(value)
    if kind in (list, tuple):
        return kind([own_copy(v) if type(v) in COPIED else v for v in value])  # ids need no copy
    if kind in (dict, WrittenRow):
        return kind((k, own_copy(v)) for k, v in value.items())
    if kind in (Turn, ToolCall):
        copied = copy.copy(value)
        vars(copied).update(own_copy(vars(value)))
        return copied
    return value


COPIED = {list, tuple, dict, WrittenRow, Turn, ToolCall}


def run_rewards(funcs: list[Callable], columns: dict[str, Any], timeout: float, device: torch.device) -> list:
    """What each function returns for the batch. Async functions run at the same time, the others one after another.

    INVARIANT: each function gets its own copy of the columns. A function that changes them affects no other function.

    Functions without `async` run in the main thread, as in TRL: see `reward_calls`. Where training itself runs in
    another thread they run in threads, in which signals do not work.

    Raises:
        RuntimeError: A function raised, or took longer than `timeout` seconds. The message names the first such one.
    """

    def failure(func: Callable, error: Exception) -> RuntimeError:
        if isinstance(error, ToolTimeout):
            return RuntimeError(
                f"Reward {func.__name__} took longer than reward_timeout={timeout:g} s for {len(columns['prompts'])} "
                "rollouts. Expected an answer in that time: is its server up? Raise reward_timeout if it needs longer."
            )
        text = error_text(error)
        hint = " (rewards run in threads here)" if "thread" in text and not in_main_thread() else ""
        if isinstance(error, KeyError) and error.args and error.args[0] not in columns:
            hint = f": there is no such column in {', '.join(columns)}"
        where = where_raised(func, error)
        return RewardError(f"Reward {func.__name__} raised {type(error).__name__}: {text}{hint} ({where})", func)

    async def run_awaited(func: Callable) -> Any:
        try:
            return await run_tool(func, own_copy(columns), timeout)
        except Exception as error:
            raise failure(func, error) from (None if isinstance(error, ToolTimeout) else error)

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
            f"Rewards took longer than {timeout + BLOCKED_SECONDS:g} s: an async function blocks the event loop, "
            "where no time limit can reach it. Await inside it (aiohttp, asyncio.sleep), or remove `async`, and it "
            "runs in the main thread."
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
        return RewardError(f"{error}. It does not raise so for a rollout alone.", func)
    of_data = {key: value for key, value in columns.items() if key not in REWARD_COLUMNS}
    return RewardError(
        f"{error}. It raises so for rollout {places[0]} alone ({len(places)} of {count} do); its row is "
        f"{row_shown(of_data, places[0])}",
        func, places[0],
    )  # fmt: skip


@functools.cache
def warn_of_threads() -> None:
    """Say once where signals do not work."""
    logger.warning(
        "Training does not run in the main thread, and so rewards run in threads of their own. No signal handler can "
        "be installed there: a time limit by SIGALRM raises ValueError. Train in the main thread for rewards with one."
    )


def run_synchronous(func: Callable, columns: dict[str, Any], timeout: float, device: torch.device) -> Any:
    """What a function without `async` returns. It may be one behind a decorator that hides its `async`.

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
