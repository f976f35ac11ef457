"""The reward functions of a run: their checks and names, their calls within a time limit, and their values.

A function without `async` runs in the main thread, as in TRL. Only there may it install a signal handler: math-verify
limits its time with SIGALRM, and in another thread it silently reads every answer as wrong.
"""

from __future__ import annotations

import asyncio
import copy
import faulthandler
import functools
import inspect
import logging
import random
import signal
import threading
import time
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from mt_grpo.base.errors import RunStopped, error_line, tell_once
from mt_grpo.base.event_loop import gather_all, run_async, start_in_background
from mt_grpo.base.rows import WrittenRow, column_lists, is_image, number_of, prompts_of, row_text
from mt_grpo.conversation.environments import tool_methods
from mt_grpo.conversation.tools.running import ToolTimeout, run_tool
from mt_grpo.images.pictures import readable_messages
from mt_grpo.rollout import Rollout, ToolCall, Turn, join
from mt_grpo.training.batch import Batch, pad_rows
from mt_grpo.training.policy_scores import ASKED_COLUMNS, asked_of, scores_of_trainer, turn_contexts
from mt_grpo.training.reward_numbers import (
    Scores,
    check_reward_values,
    is_finite,
    reward_tensors,
    state_numbers,
    turn_flags,
)

logger = logging.getLogger(__name__)
AGAIN = 1.0  # seconds between two interruptions: a `with ThreadPoolExecutor()` goes on waiting after the first
GRACE = 30.0  # seconds behind the limit, after which the process of a function that cannot be interrupted ends
SEARCH_SECONDS = 10.0  # for all calls with one rollout each, after an error
# A signal of nobody's: rewards use SIGALRM, Slurm SIGUSR1, profilers SIGPROF. macOS has no real-time signals.
WAKE = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
REWARD_COLUMNS = (  # arguments of a reward function besides the columns of the data
    "prompts", "completions", "completion_ids", "rollout_turns", "environments", "environment_rewards",
    "trainer_state", "log_extra", "log_metric",
)  # fmt: skip
PLAIN = {int, float, str, bool, type(None)}


class RewardFunctions:
    """The F reward functions of a run: F_turn turn functions, then the outcome functions.

    Of each kind, the user's functions come first, followed by those of the environment and the tools.

    Args:
        functions: (F,), each with a unique name.
        weights: (F,), one finite number per function.
        num_turn_funcs: F_turn, the number of turn functions.
    """

    def __init__(self, functions: list[Callable], weights: list[float], num_turn_funcs: int):
        self.functions, self.weights, self.num_turn_funcs = functions, weights, num_turn_funcs
        self.names = [func.__name__ for func in functions]
        self.turn_names, self.outcome_names = self.names[:num_turn_funcs], self.names[num_turn_funcs:]

    @classmethod
    def of(
        cls,
        turn_funcs: list[Callable] | None,
        outcome_funcs: list[Callable] | None,
        env: Any,
        turn_weights: list[float] | None = None,
        outcome_weights: list[float] | None = None,
        optional: bool = False,
    ) -> RewardFunctions:
        """Combine the user's functions and weights (None: 1 each) with those of the class of conversations `env`.

        The functions of an environment and its tools have weight 1. If `optional` is true there may be none at all.
        Raises `ValueError` for invalid functions (`check_rewards`) and weights (`weights_of`).
        """
        turn, outcome = list(turn_funcs or []), list(outcome_funcs or [])
        own_turn, own_outcome = environment_rewards(env.environments, env.tools)
        check_rewards(turn + own_turn, outcome + own_outcome, optional)
        own_turn, own_outcome, turn, outcome = named_apart(own_turn, own_outcome, turn, outcome)
        weights = weights_of(turn, turn_weights, "turn") + [1.0] * len(own_turn)
        weights += weights_of(outcome, outcome_weights, "outcome") + [1.0] * len(own_outcome)
        return cls([*turn, *own_turn, *outcome, *own_outcome], weights, len(turn + own_turn))

    @property
    def main_outcome(self) -> str | None:
        """The name of the outcome reward with the largest absolute weight."""
        weights = self.weights[self.num_turn_funcs :]
        return max(zip(weights, self.outcome_names), key=lambda pair: abs(pair[0]), default=(0, None))[1]

    def score(
        self,
        batch: Batch,
        columns: dict[str, Any],
        timeout: float,
        device: torch.device,
        only: list[bool] | None = None,
    ) -> list[list]:
        """Call each function for the B rollouts. Its value per rollout is a number, a list of one per turn, or None.

        A rollout whose environment failed is not passed to any function, and has None.

        Args:
            batch: The batch, with its rollouts.
            columns: Further arguments besides the columns of the data and of the rollouts: `trainer_state`,
                `log_extra`, `log_metric`, and `policy` if a function asks for it.
            timeout: Seconds that one function may take.
            device: The trainer's device.
            only: Which of the B rollouts the functions see. None: all.

        Raises `RuntimeError` for a function that raised or took too long, with the row of the data, and `ValueError`
        for other values, and for a function with the parameter `groups` where a group is incomplete.
        """
        places = [i for i, r in enumerate(batch.rollouts) if not r.failed and (only is None or only[i])]
        values: list[list] = [[None] * len(batch.rollouts) for _ in self.functions]
        if not places:
            return values
        rollouts, rows = [batch.rollouts[i] for i in places], [batch.rows[i] for i in places]
        if not any(hasattr(func, "of_results") for func in self.functions):
            warn_of_uncounted(join(rollout.turns for rollout in rollouts))
        logged: dict[str, list] = defaultdict(list)  # as in TRL, a further call goes on with the column
        # Also of the rows that nobody sees: a column of theirs is a column of all.
        of_data = column_lists(rows + batch.rows, batch.data)
        asked = asked_of(self.functions) - of_data.keys()  # who takes keywords gets what another one names
        given = {
            **{name: column[: len(rows)] for name, column in of_data.items()},
            **rollout_columns(rollouts, prompts_of(rows)),
            **{name: value for name, value in columns.items() if name not in ASKED_COLUMNS or name in asked},
            "log_extra": lambda column, values: logged[column].extend(values),
        }
        if "turn_contexts" in asked:
            given["turn_contexts"] = [turn_contexts(rollout) for rollout in rollouts]
        if "groups" in asked:  # whole groups: `check_groups`
            given["groups"] = [(batch.first + i) // batch.group_size for i in places]

        def of_row(place: int) -> str:
            number, split = number_of(rows[place], batch.data), "training" if batch.mode == "train" else "test"
            return "" if number is None else f" (row {number} of the {split} data, counted from 0)"

        with noise_apart(getattr(columns.get("trainer_state"), "global_step", 0), device, batch.num_rounds):
            found = run_rewards(self.functions, given, timeout, device, of_row)
        for f, column in enumerate(found):
            check_reward_values(column, self.names[f], rollouts, per_turn=f < self.num_turn_funcs)
            for place, value in zip(places, column):
                values[f][place] = value
        for name, column in logged.items():
            if len(column) % len(places) and len(places) < len(batch.rollouts):
                raise ValueError(
                    f"log_extra({name!r}): got {len(column)} values, expected one for each of {len(places)} rollouts."
                )
            if not column:
                continue
            last = dict(zip(places, column[-len(places) :]))  # of several calls the last one's
            columns["log_extra"](name, [last.get(i) for i in range(len(batch.rollouts))])
        return values

    def score_all_ranks(self, trainer: Any, batch: Batch, fresh: torch.Tensor | None = None) -> Scores:
        """Score the rollouts of all ranks, and set the batch's `values`. Collective.

        `fresh` are the rollouts that functions see, (N,) bool; the others keep their values. None: all.
        """
        accelerator, local = trainer.accelerator, []
        # INVARIANT: K is the same on all ranks before anything of shape (B, K) is gathered.
        num_turns = torch.tensor([max(len(rollout.turns) for rollout in batch.rollouts)], device=accelerator.device)
        num_turns = max(1, int(accelerator.gather(num_turns).max()))
        only = [True] * len(batch.rollouts) if fresh is None else batch.own(fresh).tolist()
        columns = {"trainer_state": trainer.state, "log_extra": batch.add_extra, "log_metric": trainer._log_metric}
        columns |= scores_of_trainer(trainer)

        def run() -> None:
            values = self.score(batch, columns, trainer.args.reward_timeout, accelerator.device, only)
            old = batch.values or values
            batch.values = [
                [a if new else b for a, b, new in zip(*lists, only)] for lists in zip(values, old, strict=True)
            ]
            turns = [rollout.turns for rollout in batch.rollouts]
            states = [state_numbers(rollout) if trainer._reads_state else [] for rollout in batch.rollouts]
            tokens = [[sum(turn.per_token(int(turn.trained), 0)) for turn in each] for each in turns]
            local.extend(reward_tensors(batch.values, num_turns, self.num_turn_funcs))
            local.extend(turn_flags(batch.rollouts, num_turns))
            local.append(pad_rows(states, num_turns, -1, torch.long))
            local.append(pad_rows(tokens, num_turns, 0, torch.long))

        trainer._on_all_ranks(run, "Rewards")
        return Scores(*(accelerator.gather(each.to(accelerator.device).contiguous()).cpu() for each in local))


def warn_of_uncounted(turns: list[Turn]) -> None:
    """Warn once about the reward of a tool result that no function counts, because it was not announced."""
    for call, result in join([list(zip(turn.calls, turn.results)) for turn in turns]):
        if result.reward is not None:
            return tell_once(
                f"The tool {call.name} returned the reward {result.reward:g} with a result. It is ignored, because "
                "the tool is not annotated to return rewards. Annotate the function with -> ToolResult (for tools "
                "that `reset` creates: give the class `tools: list = []`), or read it in a reward function.",
                "rewards of results",
            )


# -- checks, names and weights --


def check_rewards(turn_funcs: list[Callable], outcome_funcs: list[Callable], optional: bool = False) -> None:
    """Raise `ValueError` unless each reward function takes `**kwargs`, and there is one if not `optional`."""
    if not turn_funcs + outcome_funcs and not optional:
        raise ValueError(
            "No reward functions. Expected at least one in TURN_REWARD_FUNCS or OUTCOME_REWARD_FUNCS. Set "
            "reward_fn to a file that defines them, or use an environment with get_reward."
        )
    for name, funcs in (("TURN", turn_funcs), ("OUTCOME", outcome_funcs)):
        for place, func in enumerate(funcs):
            if any(func is other for other in funcs[:place]):
                raise ValueError(
                    f"{name}_REWARD_FUNCS lists {reward_name(func)} twice, so it would count twice. Remove one, and "
                    f"set its weight with {name.lower()}_reward_weights."
                )
            if isinstance(func, torch.nn.Module) or not callable(func):
                raise ValueError(
                    f"A reward must be a function, got {func!r:.100}. For a reward model, write a function that runs "
                    "the model, or that asks it over HTTP, such as rewards/judge_reward.py."
                )
            if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(func).parameters.values()):
                raise ValueError(
                    f"Reward {reward_name(func)} takes no **kwargs. Add it: every dataset column is passed by name."
                )


def without_partial(func: Callable) -> Callable:
    """The function inside of a partial, which may be one of a partial."""
    return without_partial(func.func) if isinstance(func, functools.partial) else func


def reward_name(func: Callable) -> str:
    """The name of a reward, as in TRL: that of a partial's function, or of a callable object's class.

    >>> reward_name(functools.partial(functools.partial(sorted), reverse=True)), reward_name(reward_name)
    ('sorted', 'reward_name')
    """
    func = without_partial(func)
    return getattr(func, "__name__", type(func).__name__)


def code_of(func: Callable) -> Callable:
    """The function that is called with a reward: that inside of a partial, or the `__call__` of an object."""
    func = without_partial(func)
    return func if inspect.isroutine(func) or isinstance(func, type) else type(func).__call__


def named_apart(*lists: list[Callable]) -> list[list[Callable]]:
    """Make the `__name__` of each function unique: the second `length` becomes `length_2`. Returns the lists.

    INVARIANT: no two rewards have one name. Metrics, logs and facts are by name: one would stand for both.
    """
    taken: set[str] = set()

    def apart(func: Callable) -> Callable:
        name, number = reward_name(func), 2
        while name in taken:
            name, number = f"{reward_name(func)}_{number}", number + 1
        taken.add(name)
        if name != reward_name(func):
            logger.warning(f"Two rewards are called {reward_name(func)}. The second is logged as {name}. Rename it.")
        return func if getattr(func, "__name__", None) == name else renamed(func, name)

    return [[apart(func) for func in funcs] for funcs in lists]


def renamed(func: Callable, name: str) -> Callable:
    """Wrap a callable, which may be a partial or an object, in a function with this name."""
    inner = code_of(func)

    async def run_async(*args: Any, **kwargs: Any) -> Any:
        return await func(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    run = run_async if inspect.iscoroutinefunction(inner) else run
    run.__name__, run.__doc__, run.__module__ = name, inner.__doc__, inner.__module__
    run.__signature__, run.__wrapped__ = inspect.signature(func), inner  # its source is read from there
    return run


def weights_of(funcs: list[Callable], weights: list[float] | None, kind: str) -> list[float]:
    """One weight per function, 1.0 by default. Raises `ValueError` for a wrong count or an infinite weight."""
    if weights is not None and len(weights) != len(funcs):
        names = ", ".join(f.__name__ for f in funcs)
        raise ValueError(f"{kind}_reward_weights has {len(weights)} values, expected {len(funcs)}: {names or 'none'}.")
    if not all(map(is_finite, weights or [])):
        raise ValueError(f"{kind}_reward_weights={weights!r}, expected finite numbers.")
    return [1.0] * len(funcs) if weights is None else [float(w) for w in weights]


def environment_rewards(environments: Any, tools: dict[str, Callable]) -> tuple[list, list]:
    """(turn, outcome) reward functions that return the rewards of environments and tools, named as they are logged.

    Turn: `environment` (of replies) and `tool` (of results). Outcome: `get_reward`, under the name of each class, and
    the class's `outcome_reward_funcs`.
    """

    def environment(rollout_turns: list, **kwargs) -> list:
        return [[turn.reward for turn in turns] for turns in rollout_turns]

    def tool(rollout_turns: list, **kwargs) -> list:
        rewards = [[[r.reward for r in turn.results if r.reward is not None] for turn in t] for t in rollout_turns]
        return [[sum(given) if given else None for given in turns] for turns in rewards]

    tool.of_results = True

    def of_class(cls: type) -> Callable:
        def get_reward(environments: list, environment_rewards: list, **kwargs) -> list:
            return [r if type(e) is cls else None for e, r in zip(environments, environment_rewards)]

        get_reward.__name__ = cls.__name__
        return get_reward

    def may_reward(func: Callable, unsaid: bool) -> bool:
        hint = inspect.signature(func).return_annotation
        return "ToolResult" in str(hint) or (unsaid and hint is inspect.Signature.empty)

    turn_funcs = [tool] if any(may_reward(func, False) for func in tools.values()) else []
    if environments is None:
        return turn_funcs, []
    classes = list(dict.fromkeys(environments.by_name.values()))
    methods = [getattr(cls, name) for cls in classes for name in tool_methods(cls)]
    if any(may_reward(method, True) for method in methods) or any(
        hasattr(cls, "respond") or hasattr(cls, "tools") for cls in classes
    ):
        turn_funcs = [environment, tool]
    further = [func for cls in classes for func in getattr(cls, "outcome_reward_funcs", [])]
    return turn_funcs, [*(of_class(cls) for cls in classes if hasattr(cls, "get_reward")), *further]


# -- the arguments of reward functions --


def rollout_columns(rollouts: list[Rollout], prompts: list) -> dict[str, list]:
    """The arguments of reward functions that come from the rollouts. `prompts` are those of the rows of the data."""
    return {
        "prompts": [readable_messages(rollout.first_messages or prompt) for rollout, prompt in zip(rollouts, prompts)],
        "completions": [readable_messages(rollout.completion) for rollout in rollouts],
        "completion_ids": [rollout.completion_ids for rollout in rollouts],
        "environments": [rollout.environment for rollout in rollouts],
        "environment_rewards": [rollout.reward for rollout in rollouts],
        "rollout_turns": [rollout.turns for rollout in rollouts],
    }


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


# -- calls within a time limit --


class OutOfTime(BaseException):
    """Raised inside a reward at its limit, and by a signal that stops the run. Many rewards catch any `Exception`."""


def run_rewards(
    funcs: list[Callable],
    columns: dict[str, Any],
    timeout: float,
    device: torch.device,
    of_row: Callable[[int], str] = lambda place: "",
) -> list:
    """Call all reward functions for a batch. Async functions run concurrently, the others one after another.

    INVARIANT: each function gets its own copy of the columns. A function that changes them affects no other function.

    Raises `RuntimeError` for the first function that raised, or took longer than `timeout` seconds. The message names
    the rollout for which it raises, with its row (`of_row`).
    """

    def call(func: Callable, given: dict[str, Any], seconds: float) -> Any:
        if inspect.iscoroutinefunction(func):
            return run_async(run_tool(func, own_copy(given), seconds))
        return call_in_time(func, given, seconds, device)

    def message(func: Callable, error: Exception) -> str:
        if isinstance(error, ToolTimeout):
            return (
                f"Reward {func.__name__} took longer than reward_timeout={timeout:g} s for {len(columns['prompts'])} "
                "rollouts. Check the server that it may ask, or raise reward_timeout if it needs longer."
            )
        text, place = error_line(error), place_that_raises(func, error, columns, call)
        if isinstance(error, KeyError) and error.args and error.args[0] not in columns:
            text += f": there is no such column. Columns: {', '.join(columns)}"
        row = "It does not raise this for any single rollout."
        if place is not None:
            trained = {*REWARD_COLUMNS, "turn_contexts"}
            of_data = {k: v[place] for k, v in columns.items() if k not in trained and isinstance(v, list)}
            row = f"It raises this for rollout {place} alone, whose row is {row_text(of_data)}{of_row(place)}"
        return f"Reward {func.__name__} raised {text} ({where_raised(func, error)}). {row}"

    async def awaited(func: Callable) -> Any:
        began = time.monotonic()
        try:
            value = await run_tool(func, own_copy(columns), timeout)
            if time.monotonic() - began > timeout + 0.5:  # no limit reaches what does not await
                raise RuntimeError(
                    f"it, or another async reward, blocked the event loop for longer than {timeout:g} s"
                )
            return value
        except Exception as error:
            raised.append((func, error))
            raise

    async def all_awaited() -> list:
        return await gather_all([awaited(func) for func in funcs if inspect.iscoroutinefunction(func)])

    values: dict[int, Any] = {}
    raised: list[tuple[Callable, Exception]] = []
    running = start_in_background(all_awaited())
    try:
        for i, func in enumerate(funcs):
            if not inspect.iscoroutinefunction(func):
                try:
                    values[i] = call_in_time(func, columns, timeout, device)
                except Exception as error:
                    raised.insert(0, (func, error))
                    raise
        found = iter(running.result(min(timeout + GRACE, threading.TIMEOUT_MAX)))
    except RunStopped:
        raise
    except Exception:
        running.cancel()
        if not raised:
            raise RuntimeError(
                f"Rewards took longer than {timeout + GRACE:g} s: an async function blocks the event loop. Use `await`"
                " inside it (aiohttp, asyncio.sleep), or remove `async`, so that it runs in the main thread."
            ) from None
        func, error = raised[0]
        raise RuntimeError(message(func, error)) from (None if isinstance(error, ToolTimeout) else error)
    finally:
        running.cancel()
    return [values[i] if i in values else next(found) for i in range(len(funcs))]


def call_in_time(func: Callable, columns: dict[str, Any], timeout: float, device: torch.device) -> Any:
    """Call a function without `async` on a copy of its columns. It may return an awaitable, which is then awaited.

    At the limit a signal interrupts it, and is repeated until it ends. That ends Python code, sleeps, locks, sockets
    and subprocesses. If it stays in C, `faulthandler` prints where it hangs after `GRACE` seconds more, and ends the
    process: otherwise the run, and all of its ranks, would wait for ever.

    Raises `ToolTimeout`, or the error of the function. `SystemExit` and the like become `RuntimeError`.
    """
    if threading.current_thread() is not threading.main_thread():
        return call_in_thread(func, columns, timeout, device)
    over, began, runs, late, stopped = threading.Event(), time.monotonic(), True, False, None

    def interrupt(signum: int, frame: Any) -> None:
        if late and runs:
            raise OutOfTime

    def watch() -> None:
        nonlocal late
        late = not over.wait(min(timeout, threading.TIMEOUT_MAX))
        while not over.is_set():
            signal.pthread_kill(threading.main_thread().ident, WAKE)
            over.wait(AGAIN)

    def passing(handler: Callable) -> Callable:
        def handle(signum: int, frame: Any) -> None:
            nonlocal stopped
            try:
                handler(signum, frame)
            except Exception as error:  # a signal asks the run to stop
                stopped = error
                if runs:
                    raise OutOfTime from error

        return handle

    arguments = own_copy(columns)
    loop = asyncio._get_running_loop()  # of a notebook: without it, a function may call `asyncio.run`
    stops = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stops = {number: handler for number, handler in stops.items() if callable(handler)}
    alarm, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.signal(WAKE, interrupt)  # it stays: a late signal without a handler would end the process
    faulthandler.dump_traceback_later(min(timeout, 1e9) + GRACE, exit=True, file=2)
    try:
        try:
            asyncio._set_running_loop(None)
            for number, handler in stops.items():
                signal.signal(number, passing(handler))
            threading.Thread(target=watch, name=f"limit-of-{func.__name__}", daemon=True).start()
            returned = func(**arguments)
        finally:
            runs = False
            over.set()
            faulthandler.cancel_dump_traceback_later()
            asyncio._set_running_loop(loop)
            for number, handler in stops.items():
                signal.signal(number, handler)
            left = max(timer[0] - (time.monotonic() - began), 0.001) if timer[0] else 0.0
            signal.setitimer(signal.ITIMER_REAL, left, timer[1])  # an alarm that the function leaves ends with it
            if alarm is not None:  # None: it was installed by C code
                signal.signal(signal.SIGALRM, alarm)
        if late or stopped:  # it caught the interruption, and returns what it returns for whatever fails
            raise OutOfTime
    except OutOfTime:
        raise stopped or ToolTimeout(f"{func.__name__} took longer than {timeout:g} s") from None
    except (Exception, KeyboardInterrupt):
        if stopped:
            raise stopped from None
        raise
    except BaseException as error:  # such as SystemExit, which would end the run without a word
        raise RuntimeError(error_line(error)) from error
    if not inspect.isawaitable(returned):
        return returned

    async def rest() -> Any:
        return await returned

    rest.__name__ = func.__name__
    return run_async(run_tool(rest, {}, timeout - (time.monotonic() - began)))


def call_in_thread(func: Callable, columns: dict[str, Any], timeout: float, device: torch.device) -> Any:
    """Call a function without `async` where training itself does not run in the main thread. No signal works there."""
    tell_once(
        "Training does not run in the main thread, so rewards run in other threads, which cannot install signal "
        "handlers. A time limit with SIGALRM raises ValueError there. Train in the main thread for such rewards.",
        "rewards in threads",
    )

    def on_device(**kwargs: Any) -> Any:  # every thread has its own current GPU
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return func(**own_copy(kwargs))  # in the thread: a large copy would block the loop

    on_device.__name__ = func.__name__
    return run_async(run_tool(on_device, columns, timeout))


def place_that_raises(func: Callable, error: Exception, columns: dict[str, Any], call: Callable) -> int | None:
    """The place of the first rollout for which a function raises alone, the same kind of error at the same line.

    The function is called with each rollout alone, for `SEARCH_SECONDS` at most, and logs nothing meanwhile.
    """
    end = time.monotonic() + SEARCH_SECONDS
    silent = {name: lambda *args: None for name in ("log_extra", "log_metric") if name in columns}
    for place in range(len(columns["prompts"])):
        part = {key: [v[place]] if isinstance(v, list) else v for key, v in columns.items()} | silent
        try:
            call(func, part, max(end - time.monotonic(), 0.001))
        except ToolTimeout:
            return None
        except RunStopped:
            raise
        except Exception as again:
            if type(again) is type(error) and where_raised(func, again) == where_raised(func, error):
                return place
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
    code = getattr(code_of(inspect.unwrap(without_partial(func))), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == getattr(code, "co_filename", None)]
    return ", which called ".join(
        dict.fromkeys(f"{frame.filename}, line {frame.lineno}" for frame in [*own[-1:], *frames[-1:]])
    )
