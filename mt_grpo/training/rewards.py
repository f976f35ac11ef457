"""Runs reward functions, and checks what they return."""

from __future__ import annotations

import array
import concurrent.futures
import copy
import functools
import hashlib
import inspect
import logging
import threading
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mt_grpo.base.event_loop import gather_all, run_async, start_in_background
from mt_grpo.base.ranks import RunError, RunStopped
from mt_grpo.base.rows import WrittenRow, column_lists, number_of, prompts_of
from mt_grpo.conversation.environments import tool_methods
from mt_grpo.conversation.tools.results import error_text
from mt_grpo.conversation.tools.threads import ToolTimeout, run_tool
from mt_grpo.rollout import Rollout, ToolCall, Turn
from mt_grpo.training.batch import Batch
from mt_grpo.training.reward_calls import call_in_main_thread, in_main_thread
from mt_grpo.training.reward_errors import RewardError, raises_alone, row_shown, where_raised
from mt_grpo.training.tensors import NAN, nansum, pad_rows

logger = logging.getLogger(__name__)
BLOCKED_SECONDS = 30.0  # behind reward_timeout; then an async function blocks the loop on which its limit is kept


def check_rewards(turn_funcs: list[Callable], outcome_funcs: list[Callable], optional: bool = False) -> None:
    """Raise `ValueError` unless each has a name and takes `**kwargs`, and, if not `optional`, there is one."""
    if not turn_funcs + outcome_funcs and not optional:
        raise ValueError(
            "No reward functions. Expected TURN_REWARD_FUNCS or OUTCOME_REWARD_FUNCS to hold at least one: set "
            "reward_fn to a file that defines them, or use an environment with get_reward."
        )
    for func in turn_funcs + outcome_funcs:
        if not callable(func) or isinstance(func, torch.nn.Module):
            raise ValueError(f"A reward must be a function, got {func!r}.")
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(func).parameters.values()):
            raise ValueError(
                f"Reward {reward_name(func)} takes no **kwargs. Add it: every dataset column is passed by name."
            )


def reward_name(func: Callable) -> str:
    """How a reward is called, as in TRL: a partial by its function, a callable object by its class.

    >>> reward_name(functools.partial(functools.partial(sorted), reverse=True)), reward_name(reward_name)
    ('sorted', 'reward_name')
    """
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", type(func).__name__)


def named_apart(*lists: list[Callable]) -> list[list[Callable]]:
    """The same lists, in which each function has a `__name__` of its own: the second `length` is `length_2`.

    INVARIANT: no two rewards have one name. Metrics, logs and facts are by name: one would stand for both.
    """
    taken: set[str] = set()

    def apart(func: Callable) -> Callable:
        name, number = reward_name(func), 2
        while name in taken:
            name, number = f"{reward_name(func)}_{number}", number + 1
        taken.add(name)
        if name != reward_name(func):
            logger.warning(f"Two rewards are called {reward_name(func)}: this one is logged as {name}. Rename it.")
        return func if getattr(func, "__name__", None) == name else renamed(func, name)

    return [[apart(func) for func in funcs] for funcs in lists]


def renamed(func: Callable, name: str) -> Callable:
    """A function of this name that calls another one, which may be a partial or an object."""
    inner = func
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inner if inspect.isroutine(inner) or isinstance(inner, type) else type(inner).__call__
    if inspect.iscoroutinefunction(inner):

        async def run(*args: Any, **kwargs: Any) -> Any:
            return await func(*args, **kwargs)

    else:

        def run(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    run.__name__, run.__doc__, run.__module__ = name, inner.__doc__, inner.__module__
    run.__signature__, run.__wrapped__ = inspect.signature(func), inner  # its source is read from there
    return run


REWARD_COLUMNS = (  # arguments of a reward function besides the columns of the data
    "prompts", "completions", "completion_ids", "rollout_turns", "environments", "environment_rewards",
    "trainer_state", "log_extra", "log_metric",
)  # fmt: skip


def environment_rewards(environments: Any, tools: dict[str, Callable]) -> tuple[list, list]:
    """(turn, outcome) reward functions with what environments and tools give, named as they are logged.

    Turn: `environment`, of replies, and `tool`, of results. Outcome: `get_reward` under the name of each class, and
    what it lists as `outcome_reward_funcs`.
    """

    def environment(rollout_turns: list, **kwargs) -> list:
        return [[turn.reward for turn in turns] for turns in rollout_turns]

    def tool(rollout_turns: list, **kwargs) -> list:
        return [[summed(result.reward for result in turn.results) for turn in turns] for turns in rollout_turns]

    def of_class(cls: type) -> Callable:
        def get_reward(environments: list, environment_rewards: list, **kwargs) -> list:
            return [r if type(e) is cls else None for e, r in zip(environments, environment_rewards)]

        get_reward.__name__ = cls.__name__
        return get_reward

    returned = [inspect.signature(tool).return_annotation for tool in tools.values()]
    turn_funcs = [tool] if any("ToolResult" in str(hint) for hint in returned) else []
    if environments is None:
        return turn_funcs, []
    classes = list(dict.fromkeys(environments.by_name.values()))
    methods = [getattr(cls, name) for cls in classes for name in tool_methods(cls)]
    returned = [inspect.signature(method).return_annotation for method in methods]
    may_give = any(hint is inspect.Signature.empty or "ToolResult" in str(hint) for hint in returned)
    if may_give or any(hasattr(cls, "respond") or hasattr(cls, "tools") for cls in classes):
        turn_funcs = [environment, tool]
    further = [func for cls in classes for func in getattr(cls, "outcome_reward_funcs", [])]
    return turn_funcs, [*(of_class(cls) for cls in classes if hasattr(cls, "get_reward")), *further]


@dataclass(frozen=True)
class RewardFunctions:
    """The F reward functions of a run: F_turn turn functions, then the outcome functions.

    Of each kind those that were given come first, and then what the environment and the tools give.

    Attributes:
        functions: (F,), each of a name of its own.
        weights: (F,), one finite number per function.
        num_turn_funcs: F_turn.
    """

    functions: list[Callable]
    weights: list[float]
    num_turn_funcs: int

    @classmethod
    def of(
        cls,
        turn_funcs: list[Callable] | None,
        outcome_funcs: list[Callable] | None,
        env: Any,
        turn_weights: list[float] | None = None,
        outcome_weights: list[float] | None = None,
        environment_weight: float = 1.0,
        optional: bool = False,
    ) -> RewardFunctions:
        """Those that are given, and those of an environment and its tools, which keep their names.

        Args:
            turn_funcs, outcome_funcs: As `MTGRPOEnvTrainer` takes them.
            env: The conversations.
            turn_weights, outcome_weights: One per given function; None: 1 each.
            environment_weight: Of what the environment and the tools give.
            optional: There may be no function.

        Raises `ValueError` for functions as `check_rewards` does, and for weights as `weights_of` does.
        """
        turn, outcome = list(turn_funcs or []), list(outcome_funcs or [])
        own_turn, own_outcome = environment_rewards(env.environments, env.tools)
        check_rewards(turn + own_turn, outcome + own_outcome, optional)
        own_turn, own_outcome, turn, outcome = named_apart(own_turn, own_outcome, turn, outcome)
        weights = weights_of(turn, turn_weights, "turn") + [environment_weight] * len(own_turn)
        weights += weights_of(outcome, outcome_weights, "outcome") + [environment_weight] * len(own_outcome)
        return cls([*turn, *own_turn, *outcome, *own_outcome], weights, len(turn + own_turn))

    @property
    def names(self) -> list[str]:
        return [func.__name__ for func in self.functions]

    @property
    def turn_names(self) -> list[str]:
        return self.names[: self.num_turn_funcs]

    @property
    def outcome_names(self) -> list[str]:
        return self.names[self.num_turn_funcs :]

    @property
    def main_outcome(self) -> str | None:
        """The name of the outcome reward that counts most."""
        weights = self.weights[self.num_turn_funcs :]
        return max(zip(weights, self.outcome_names), key=lambda pair: abs(pair[0]), default=(0, None))[1]

    def score(self, batch: Batch, columns: dict[str, Any], timeout: float, device: torch.device) -> list[list]:
        """What each function gives for each of the B rollouts: a number, a list of one per turn, or None.

        No function sees a rollout whose environment failed. It has None.

        Args:
            batch: With its rollouts.
            columns: What a function gets beside the columns of the data and of the rollouts: `trainer_state`,
                `log_extra`, `log_metric`.
            timeout: Seconds that one function may take.
            device: Of the trainer.

        Raises:
            RuntimeError: A function raised, or took too long. The message names the row of the data.
            ValueError: A function gave something else.
        """
        count, log_extra = len(batch.rollouts), columns["log_extra"]
        places = [i for i, rollout in enumerate(batch.rollouts) if not rollout.failed]
        rows, rollouts = [batch.rows[i] for i in places], [batch.rollouts[i] for i in places]

        def log_in_place(column: str, values: list) -> None:
            placed = dict(zip(places, values, strict=True))
            log_extra(column, [placed.get(i) for i in range(count)])

        of_data = column_lists(batch.rows, batch.data)
        columns = {
            **{name: [column[i] for i in places] for name, column in of_data.items()},
            **rollout_columns(rollouts, prompts_of(rows)),
            **columns,
            "log_extra": log_extra if len(places) == count else log_in_place,
        }
        try:
            values = run_rewards(self.functions, columns, timeout, device) if places else [[] for _ in self.functions]
        except RewardError as error:
            number = None if error.place is None else number_of(rows[error.place], batch.data)
            split = "training" if batch.mode == "train" else "test"
            found = "" if number is None else f" (row {number} of the {split} data)"
            raise RuntimeError(f"{error}{found}") from error.__cause__
        for f, (column, name) in enumerate(zip(values, self.names)):
            check_reward_values(column, name, rollouts, per_turn=f < self.num_turn_funcs)
        placed = [dict(zip(places, column)) for column in values]
        return [[of_place.get(i) for i in range(count)] for of_place in placed]


def weights_of(funcs: list[Callable], weights: list[float] | None, kind: str) -> list[float]:
    """One finite weight per function, 1.0 by default. Raises `ValueError` for other weights."""
    if weights is not None and len(weights) != len(funcs):
        names = ", ".join(f.__name__ for f in funcs)
        raise ValueError(f"{kind}_reward_weights has {len(weights)} values, expected {len(funcs)}: {names or 'none'}.")
    if not all(abs(float(weight)) <= torch.finfo(torch.float32).max for weight in weights or []):  # NaN is refused too
        raise ValueError(f"{kind}_reward_weights={weights!r}, expected finite numbers.")
    return [1.0] * len(funcs) if weights is None else [float(w) for w in weights]


def summed(rewards: typing.Iterable[float | None]) -> float | None:
    """The sum of those that are there; None if none is."""
    given = [reward for reward in rewards if reward is not None]
    return sum(given) if given else None


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


def check_reward_values(values: Any, name: str, rollouts: list[Rollout], per_turn: bool) -> None:
    """Raise `ValueError` unless a function gave one value per rollout, which may be a list if `per_turn` is true.

    Such a list has one value per turn. Every value is a finite number or None.
    """
    if not isinstance(values, (list, tuple)) or len(values) != len(rollouts):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"Reward {name} returned {got}, expected a list of {len(rollouts)}, one per rollout.")
    for value, rollout in zip(values, rollouts, strict=True):
        if isinstance(value, (list, tuple)) and not per_turn:
            raise ValueError(f"Reward {name} gives a list per rollout: move it from OUTCOME_ to TURN_REWARD_FUNCS.")
        if isinstance(value, (list, tuple)) and len(value) != len(rollout.turns):
            raise ValueError(f"Reward {name} gave {len(value)} values for a rollout of {len(rollout.turns)} turns.")
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if number is not None and not abs(float(number)) <= torch.finfo(torch.float32).max:  # NaN is refused too
                raise ValueError(
                    f"Reward {name} gave {number!r}, expected a finite number, or None for 'does not apply'."
                )


def is_plain(key: Any) -> bool:
    """Whether `repr` of a key is the same in every process. That of sets, and of objects with an address, is not."""
    if isinstance(key, (tuple, list)):
        return all(is_plain(part) for part in key)
    return key is None or isinstance(key, (str, int, float))


def state_numbers(rollout: Rollout) -> list[int]:
    """For each turn the hash of its state: of its `state_key`, or of the tokens that it reads if that is None.

    The hash is the same in every process; Python's own `hash` of a text is not. Raises `ValueError` for a key whose
    `repr` may differ between processes.
    """
    numbers = {}  # turn -> number
    for record in rollout.records:
        history = hashlib.blake2b(digest_size=8)  # of the tokens that the turn reads, 8 bytes per id
        history.update(array.array("q", record.prompt_ids))
        for k, turn in zip(record.numbers, record.turns):
            state = history
            if turn.state_key is not None:
                if not is_plain(turn.state_key):
                    raise ValueError(
                        f"A state key is {turn.state_key!r}, expected a string, a number or a tuple of them."
                    )
                state = hashlib.blake2b(repr(turn.state_key).encode(), digest_size=8)
            numbers[k] = int.from_bytes(state.digest(), "big") >> 1  # never -1, which means "no turn"
            history.update(array.array("q", turn.token_ids + turn.observation_ids))
    return [numbers[k] for k in sorted(numbers)]


def reward_tensors(values: list[list], num_turns: int, num_turn_funcs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `RewardFunctions.score` returns, as tensors with NaN for None.

    Args:
        values: Of each of the F functions, turn functions first, for each of B rollouts.
        num_turns: K, the same on all ranks.
        num_turn_funcs: F_turn, the number of turn functions.

    Returns:
        (B, F), the values that are one number per rollout, and (B, K, F_turn), the values that are one per turn.
    """
    whole = torch.full((len(values[0]), len(values)), NAN)
    per_turn = torch.full((len(values[0]), num_turns, num_turn_funcs), NAN)
    for f, column in enumerate(values):
        rows = [value if isinstance(value, (list, tuple)) else [] for value in column]
        if any(rows):
            numbers = [[NAN if v is None else float(v) for v in row] for row in rows]
            per_turn[:, :, f] = pad_rows(numbers, num_turns, NAN)
        missing = (list, tuple, type(None))
        whole[:, f] = torch.tensor([NAN if isinstance(v, missing) else float(v) for v in column])
    return whole, per_turn


def turn_flags(rollouts: list[Rollout], num_turns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bool tensors (B, K): whether something came of a turn (`Turn.observed`), and whether the rollout has it."""
    flags = [[turn.observed for turn in rollout.turns] for rollout in rollouts]
    observed = pad_rows(flags, num_turns, False, torch.bool)
    sampled = pad_rows([[True] * len(row) for row in flags], num_turns, False, torch.bool)
    return observed, sampled


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


def weighted_rewards(whole: torch.Tensor, per_turn: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(outcome, turn rewards per rollout, turn rewards per turn): (N,), (N,), (N, K), NaN where none was given.

    Args:
        whole: (N, F) numbers per rollout, those of the turn functions first.
        per_turn: (N, K, F_turn) numbers per turn.
        weights: (F,).

    >>> nan = float("nan")
    >>> weighted_rewards(torch.tensor([[nan, 1.0]]), torch.tensor([[[0.5], [nan]]]), torch.tensor([2.0, 3.0]))
    (tensor([3.]), tensor([nan]), tensor([[1., nan]]))
    """
    num_turn_funcs = per_turn.shape[2]
    of_turns, outcomes = whole[:, :num_turn_funcs], whole[:, num_turn_funcs:]
    turn_weights, outcome_weights = weights[:num_turn_funcs], weights[num_turn_funcs:]
    # Without outcome functions R^O is 0; NaN would mean that every one of them gave None.
    outcome = nansum(outcomes * outcome_weights, 1) if outcomes.shape[1] else whole.new_zeros(len(whole))
    return outcome, nansum(of_turns * turn_weights, 1), nansum(per_turn * turn_weights, 2)


def logged_rewards(whole: torch.Tensor, per_turn: torch.Tensor) -> torch.Tensor:
    """(N, F) for TRL's logs: a turn function's sum over the turns, where it gave a list.

    >>> nan = float("nan")
    >>> logged_rewards(torch.tensor([[nan, 1.0]]), torch.tensor([[[0.5], [0.25]]]))
    tensor([[0.7500, 1.0000]])
    """
    logged, sums = whole.clone(), nansum(per_turn, 1)
    own = logged[:, : per_turn.shape[2]]
    logged[:, : per_turn.shape[2]] = torch.where(sums.isnan(), own, sums)
    return logged


MOST = 1e18  # that float32 can square and add up


def check_advantages(rewards: Any, advantages: torch.Tensor, step: int, coef: float) -> None:
    """Raise `RunError` where float32 cannot compare the rewards: what overflows can vanish, or poison every weight.

    The square of a value beyond `MOST` is infinite in float32.

    Args:
        rewards: The `RewardTable` of all ranks, so that all of them raise.
        advantages: Of its turns, (N, K).
        step: The optimizer step, for the message.
        coef: `turn_advantage_coef`, for the message.
    """
    for name, x in (("outcome", rewards.outcome), ("turn", rewards.turn), ("turn", rewards.rollout_turn)):
        if (x.nan_to_num(0.0).abs() > MOST).any():
            raise RunError(
                f"Step {step}: a weighted {name} reward is {x.nan_to_num(0.0).abs().max():.3g}. At most {MOST:g} can "
                f"be compared in float32. Nothing of this batch is trained. Lower {name}_reward_weights, or what the "
                "reward functions give."
            )
    if not advantages.isfinite().all():
        raise RunError(
            f"Step {step}: an advantage is not finite, with turn_advantage_coef={coef:g}. Nothing of this batch is "
            "trained. Lower turn_advantage_coef, or what the reward functions give."
        )
    of_turns = rewards.turn.double().abs().nansum(1) + rewards.rollout_turn.double().abs().nan_to_num(0.0)
    sums = rewards.outcome.double().abs().nan_to_num(0.0) + max(abs(coef), 1.0) * of_turns  # (N,)
    if (sums > MOST).any():
        raise RunError(
            f"Step {step}: the rewards of a rollout add up to {sums.max():.3g}, with turn_advantage_coef={coef:g}. At "
            f"most {MOST:g} can be compared in float32. Nothing of this batch is trained. Lower turn_advantage_coef, "
            "or what the reward functions give."
        )
