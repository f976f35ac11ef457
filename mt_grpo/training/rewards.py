"""The reward functions of a run: their checks and names, their calls within a time limit, and their values as tensors.

A function without `async` runs in the main thread, as in TRL. Only there may it install a signal handler: math-verify
limits its time with SIGALRM, and in another thread it silently reads every answer as wrong.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import hashlib
import inspect
import random
import signal
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from trl.trainer.utils import get_callable_name

from mt_grpo.base.errors import error_line, tell_once
from mt_grpo.base.event_loop import gather_all, run_async, start_in_background
from mt_grpo.base.rows import WrittenRow, column_lists, is_image, prompts_of
from mt_grpo.conversation.environments import tool_methods
from mt_grpo.conversation.tools.running import ToolTimeout, run_tool
from mt_grpo.images.reader import readable_messages
from mt_grpo.rollout import Rollout, ToolCall, Turn, id_hash, join
from mt_grpo.training.batch import NAN, Batch, most_of_ranks, nansum, pad_rows
from mt_grpo.training.policy_scores import ASKED_COLUMNS, asked_of, policy_of, turn_contexts

GRACE = 30.0  # seconds after the limit, at which the process of a function that cannot be interrupted ends
# Nobody else uses it: rewards use SIGALRM, Slurm SIGUSR1, profilers SIGPROF. macOS has no real-time signals.
WAKE = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
REWARD_COLUMNS = (  # arguments of a reward function besides the columns of the data
    "prompts", "completions", "completion_ids", "rollout_turns", "environments", "environment_rewards",
    "trainer_state", "log_extra", "log_metric",
)  # fmt: skip
PLAIN = {int, float, str, bool, type(None)}


class RewardFunctions:
    """The F reward functions of a run, with unique names and a weight each: F_turn turn functions, then the others.

    Of each kind, the user's functions come first, followed by those of the environment and the tools.
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
        """Combine the user's functions and weights with those of `env`, of weight 1. `optional`: there may be none."""
        turn, outcome = ([funcs] if callable(funcs) else list(funcs or []) for funcs in (turn_funcs, outcome_funcs))
        own_turn, own_outcome = environment_rewards(env.environments, env.tools)
        check_rewards(turn + own_turn, outcome + own_outcome, optional)
        own_turn, own_outcome, turn, outcome = named(own_turn, own_outcome, turn, outcome)
        weights = weights_of(turn, turn_weights, "turn") + [1.0] * len(own_turn)
        weights += weights_of(outcome, outcome_weights, "outcome") + [1.0] * len(own_outcome)
        return cls([*turn, *own_turn, *outcome, *own_outcome], weights, len(turn + own_turn))

    @property
    def main_outcome(self) -> str | None:
        """The name of the outcome reward with the largest absolute weight."""
        weights = self.weights[self.num_turn_funcs :]
        return max(zip(weights, self.outcome_names), key=lambda pair: abs(pair[0]), default=(0, None))[1]

    def score(
        self, batch: Batch, columns: dict[str, Any], timeout: float, device: torch.device, only: list | None = None
    ) -> list[list]:
        """Call each function for the B rollouts. Its value per rollout is a number, a list of one per turn, or None.

        Functions do not see rollouts whose environment failed, and others than `only`; these have None. `columns` are
        further arguments: `trainer_state`, `log_extra`, `log_metric`, and `policy` if a function asks for it.
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
        asked = asked_of(self.functions) - of_data.keys()  # a function with **kwargs gets what another one names
        given = {name: column[: len(rows)] for name, column in of_data.items()}
        prompts = [rollout.first_messages or prompt for rollout, prompt in zip(rollouts, prompts_of(rows))]
        given |= {
            "prompts": list(map(readable_messages, prompts)),
            "completions": [readable_messages(rollout.completion) for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "environments": [rollout.environment for rollout in rollouts],
            "environment_rewards": [rollout.reward for rollout in rollouts],
            "rollout_turns": [rollout.turns for rollout in rollouts],
        }
        given |= {name: value for name, value in columns.items() if name not in ASKED_COLUMNS or name in asked}
        given["log_extra"] = lambda column, values: logged[column].extend(values)
        if "turn_contexts" in asked:
            given["turn_contexts"] = [turn_contexts(rollout) for rollout in rollouts]
        if "groups" in asked:  # whole groups: `check_groups`
            given["groups"] = [(batch.first + i) // batch.group_size for i in places]

        with noise_apart(getattr(columns.get("trainer_state"), "global_step", 0), device, batch.num_rounds):
            found = run_rewards(self.functions, given, timeout)
        for f, column in enumerate(found):
            check_reward_values(column, self.names[f], rollouts, per_turn=f < self.num_turn_funcs)
            for place, value in zip(places, column):
                values[f][place] = value
        for name, column in logged.items():
            if len(column) % len(places) and len(places) < len(batch.rollouts):
                wanted = f"expected one for each of {len(places)} rollouts"
                raise ValueError(f"log_extra({name!r}): got {len(column)} values, {wanted}.")
            last = dict(zip(places, column[-len(places) :]))  # of several calls the last one's
            if column:
                columns["log_extra"](name, [last.get(i) for i in range(len(batch.rollouts))])
        return values

    def score_all_ranks(self, trainer: Any, batch: Batch, fresh: torch.Tensor | None = None) -> Scores:
        """Score all ranks' rollouts, or the `fresh` ones, (N,) bool, and set the batch's `values`. Collective."""
        accelerator, local = trainer.accelerator, []
        # INVARIANT: K is the same on all ranks before anything of shape (B, K) is gathered.
        num_turns = max(1, most_of_ranks(max(len(rollout.turns) for rollout in batch.rollouts), accelerator))
        only = [True] * len(batch.rollouts) if fresh is None else batch.own(fresh).tolist()
        columns = {
            "trainer_state": trainer.state,
            "log_extra": batch.add_extra,
            "log_metric": lambda name, value: trainer._log_metric(name, float(value)),
        }
        if "policy" in asked_of(self.functions) - column_lists(batch.rows, batch.data).keys():
            columns["policy"] = policy_of(trainer)

        def run() -> None:
            values = self.score(batch, columns, trainer.args.reward_timeout, accelerator.device, only)
            old = batch.values or values
            batch.values = [[a if new else b for a, b, new in zip(*both, only)] for both in zip(values, old)]
            states = [state_numbers(rollout) if trainer._reads_state else [] for rollout in batch.rollouts]
            tokens = [[sum(turn.per_token(int(turn.trained), 0)) for turn in r.turns] for r in batch.rollouts]
            local.extend(reward_tensors(batch.values, num_turns, self.num_turn_funcs))
            local.extend(turn_flags(batch.rollouts, num_turns))
            local.append(pad_rows(states, num_turns, -1, torch.long))
            local.append(pad_rows(tokens, num_turns, 0, torch.long))

        trainer._on_all_ranks(run, "Rewards")
        return Scores(*(accelerator.gather(each.to(accelerator.device).contiguous()).cpu() for each in local))


def warn_of_uncounted(turns: list[Turn]) -> None:
    """Warn once about the reward of a tool result that no function counts, because it was not announced."""
    for call, result in join(list(zip(turn.calls, turn.results)) for turn in turns):
        if result.reward is not None:
            return tell_once(
                f"The tool {call.name} returned the reward {result.reward:g} with a result. It is ignored. Annotate "
                "the function with -> ToolResult (for tools of `reset`: give the class `tools: list = []`).",
                "rewards of results",
            )


# -- checks, names and weights --


def check_rewards(turn_funcs: list[Callable], outcome_funcs: list[Callable], optional: bool = False) -> None:
    """Raise `ValueError` unless each reward function takes `**kwargs`, and there is one if not `optional`."""
    if not turn_funcs + outcome_funcs and not optional:
        raise ValueError("No reward functions. Expected a file of them as reward_fn, or an environment's get_reward.")
    for func in turn_funcs + outcome_funcs:
        name = get_callable_name(func)
        if isinstance(func, torch.nn.Module):
            raise ValueError(f"Reward {name} is a model. Write a function that runs it, or asks it over HTTP.")
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(func).parameters.values()):
            raise ValueError(f"Reward {name} takes no **kwargs. Add it: every dataset column is passed by name.")


def named(*lists: list[Callable]) -> list[list[Callable]]:
    """INVARIANT: no two rewards have one name, as metrics and logs need: the second `length` becomes `length_2`."""
    taken: set[str] = set()

    def apart(func: Callable) -> Callable:
        first, number = get_callable_name(func), 2
        name = first
        while name in taken:
            name, number = f"{first}_{number}", number + 1
        taken.add(name)
        if getattr(func, "__name__", None) != name:
            func = functools.partial(func)
            func.__name__ = name
        return func

    return [[apart(func) for func in funcs] for funcs in lists]


def weights_of(funcs: list[Callable], weights: list[float] | None, kind: str) -> list[float]:
    """One weight per function, 1.0 by default. Raises `ValueError` for a wrong count or an infinite weight."""
    if weights is not None and len(weights) != len(funcs):
        names = ", ".join(f.__name__ for f in funcs)
        raise ValueError(f"{kind}_reward_weights has {len(weights)} values, expected {len(funcs)}: {names or 'none'}.")
    if not all(map(is_finite, weights or [])):
        raise ValueError(f"{kind}_reward_weights={weights!r}, expected finite numbers.")
    return [1.0] * len(funcs) if weights is None else [float(w) for w in weights]


def environment_rewards(environments: Any, tools: dict[str, Callable]) -> tuple[list, list]:
    """(turn, outcome) reward functions of environments and tools: `environment` (of replies) and `tool` (of results).

    Outcome: one per class with `get_reward`, and its `outcome_reward_funcs`.
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

    hints = [inspect.signature(func).return_annotation for func in tools.values()]
    turn_funcs = [tool] if any("ToolResult" in str(hint) for hint in hints) else []
    if environments is None:
        return turn_funcs, []
    classes = list(dict.fromkeys(environments.by_name.values()))
    hints = [inspect.signature(getattr(cls, name)).return_annotation for cls in classes for name in tool_methods(cls)]
    if any("ToolResult" in str(hint) or hint is inspect.Signature.empty for hint in hints) or any(
        hasattr(cls, "respond") or hasattr(cls, "tools") for cls in classes
    ):
        turn_funcs = [environment, tool]
    further = [func for cls in classes for func in getattr(cls, "outcome_reward_funcs", [])]
    return turn_funcs, [*(of_class(cls) for cls in classes if hasattr(cls, "get_reward")), *further]


def own_copy(value: Any) -> Any:
    """A deep copy of lists, dicts, rows, tuples, turns, calls and images. Other objects are not copied."""
    kind = type(value)
    if kind in (list, tuple):
        if PLAIN.issuperset(map(type, value)):  # ids and logprobs: there are many
            return value[:]
        return kind([own_copy(v) for v in value])
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

    INVARIANT: no reward changes what a run samples. Its draws differ by step and `call`, and not in a resumed run.
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
    """Raised inside a reward at its limit. Many rewards catch any `Exception`."""


@contextmanager
def named_errors(func: Callable, timeout: float) -> Iterator[None]:
    """Context manager in which an error of a reward function becomes a `RuntimeError` that names the function."""
    try:
        yield
    except ToolTimeout:
        text = f"Reward {func.__name__} took longer than reward_timeout={timeout:g} s. Raise it if it needs longer."
        raise RuntimeError(text) from None
    except Exception as error:
        cause = None if isinstance(error, StopIteration) else error  # which a context manager would raise again
        raise RuntimeError(f"Reward {func.__name__} raised {error_line(error)}") from cause


def waits(func: Callable) -> bool:
    """Whether a reward is async: a function, or an object with an async `__call__`."""
    own = func.func if isinstance(func, functools.partial) else func
    return inspect.iscoroutinefunction(own) or inspect.iscoroutinefunction(type(own).__call__)


def run_rewards(funcs: list[Callable], columns: dict[str, Any], timeout: float) -> list:
    """Call all reward functions for a batch. Async functions run concurrently, the others one after another.

    INVARIANT: each function gets its own copy of the columns. Raises `RuntimeError` for the first function that
    raised, or took longer than `timeout` seconds.
    """

    async def awaited(func: Callable) -> Any:
        began = time.monotonic()
        with named_errors(func, timeout):
            value = await run_tool(func, own_copy(columns), timeout)
            if time.monotonic() - began > timeout + 0.5:  # no limit reaches what blocks the event loop
                raise ToolTimeout
            return value

    running = start_in_background(gather_all([awaited(func) for func in funcs if waits(func)]))
    values: list[Any] = [None] * len(funcs)
    try:
        for i, func in enumerate(funcs):
            if not waits(func):
                with named_errors(func, timeout):
                    values[i] = call_in_time(func, columns, timeout)
        found = iter(running.result(min(timeout + GRACE, threading.TIMEOUT_MAX)))
    except TimeoutError:
        raise RuntimeError("An async reward blocks the event loop. Use `await` in it, or remove `async`.") from None
    finally:
        running.cancel()
    return [next(found) if waits(func) else value for func, value in zip(funcs, values)]


def call_in_time(func: Callable, columns: dict[str, Any], timeout: float) -> Any:
    """Call a function on a copy of its columns. It may return an awaitable, which is then awaited.

    At the limit a signal interrupts it, again and again. If it goes on, or stays in C, `faulthandler` prints where it
    hangs after `GRACE` seconds more, and ends the process: otherwise all ranks would wait for ever.
    """
    began, over, thread = time.monotonic(), threading.Event(), threading.get_ident()

    def interrupt(signum: int, frame: Any) -> None:
        if not over.is_set():
            raise OutOfTime

    def interrupt_until_over() -> None:
        wait = min(timeout, threading.TIMEOUT_MAX)
        while not over.wait(wait):
            signal.pthread_kill(thread, WAKE)
            wait = 0.1  # a loop that asks again catches one, and is left by the next one, before it asks

    arguments = own_copy(columns)
    signal.signal(WAKE, interrupt)  # it stays: a late signal without a handler would end the process
    faulthandler.dump_traceback_later(min(timeout, 1e9) + GRACE, exit=True, file=2)
    try:
        try:
            threading.Thread(target=interrupt_until_over, daemon=True).start()
            returned = func(**arguments)
        finally:
            over.set()
        if time.monotonic() - began > timeout:  # it caught the interruption, and returns what it gives to any failure
            raise OutOfTime
    except OutOfTime:
        raise ToolTimeout(f"{func.__name__} took longer than {timeout:g} s") from None
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # such as SystemExit, which would end the run without a word, and without a save
        raise RuntimeError(error_line(error)) from error
    finally:
        over.set()  # again: the interruption may come in the first one's place
        faulthandler.cancel_dump_traceback_later()
    if not inspect.isawaitable(returned):
        return returned
    rest = functools.update_wrapper(lambda: returned, func)  # `run_tool` awaits what it returns
    return run_async(run_tool(rest, {}, timeout - (time.monotonic() - began)))


# -- the values of reward functions --


class Scores(NamedTuple):
    """What the F reward functions gave for all N rollouts, on the CPU, with K turns in the longest; NaN for None."""

    whole: torch.Tensor  # (N, F) the numbers per rollout, those of the F_turn turn functions first
    per_turn: torch.Tensor  # (N, K, F_turn) the numbers per turn
    has_observation: torch.Tensor | None = None  # (N, K) bool
    sampled: torch.Tensor | None = None  # (N, K) bool: the rollout has this turn
    state: torch.Tensor | None = None  # (N, K) int64: the hash of the turn's state, -1 without a turn
    num_tokens: torch.Tensor | None = None  # (N, K) int64: the turn's trained tokens

    def weighted(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of a `RewardTable`: the weighted `outcome`, `rollout_turn` (N,), `turn` (N, K), and the flags."""
        first, flags = self.per_turn.shape[2], self._asdict()  # the first outcome function
        # INVARIANT: weight 0 gives no number. With None, 0 times a number would be the reward 0, which is compared.
        weights = torch.where(weights == 0, NAN, weights)
        numbers, per_turn = flags.pop("whole") * weights, flags.pop("per_turn") * weights[:first]
        # Without outcome functions R^O is 0; NaN would mean that every one of them gave None.
        has_outcome = not weights[first:].isnan().all()
        outcome = nansum(numbers[:, first:], 1) if has_outcome else numbers.new_zeros(len(numbers))
        return {"outcome": outcome, "rollout_turn": nansum(numbers[:, :first], 1), "turn": nansum(per_turn, 2)} | flags

    def logged(self) -> torch.Tensor:
        """(N, F) for TRL's logs: a turn function's sum over the turns, where it gave a list."""
        sums, logged = nansum(self.per_turn, 1), self.whole.clone()
        first = sums.shape[1]
        logged[:, :first] = torch.where(sums.isnan(), logged[:, :first], sums)
        return logged

    def count_used(self, weights: torch.Tensor, moves: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """How many numbers each function gave, and how many of these move an advantage, (F,) both; 0 with weight 0."""
        whole, per_turn, first = ~self.whole.isnan(), ~self.per_turn.isnan(), self.per_turn.shape[2]
        kinds = ["rollout_turn"] * first + ["outcome"] * (whole.shape[1] - first)
        used = whole & torch.stack([moves[kind] for kind in kinds], 1)
        given, moved = whole.sum(0), used.sum(0)
        given[:first] += per_turn.sum((0, 1))
        moved[:first] += (per_turn & moves["turn"][:, :, None]).sum((0, 1))
        return given * (weights != 0), moved * (weights != 0)


def check_reward_values(values: Any, name: str, rollouts: list[Rollout], per_turn: bool) -> None:
    """Raise `ValueError` unless a function gave each rollout a finite number or None, or a list if `per_turn`."""
    if not isinstance(values, (list, tuple)) or len(values) != len(rollouts):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"Reward {name} returned {got}, expected a list of {len(rollouts)}, one per rollout.")
    for i, (value, turns) in enumerate(zip(values, [rollout.turns for rollout in rollouts])):
        is_list = isinstance(value, (list, tuple))
        if is_list and not per_turn:
            raise ValueError(f"Reward {name} returned a list per rollout. Move it from OUTCOME_ to TURN_REWARD_FUNCS.")
        if is_list and len(value) != len(turns):
            raise ValueError(f"Reward {name} returned {len(value)} values for rollout {i} of {len(turns)} turns.")
        for number in value if is_list else [value]:
            if number is not None and not is_finite(number):
                raise ValueError(f"Reward {name} returned {number!r:.100}, expected None or a finite number.")


def is_finite(number: Any) -> bool:
    """Whether a value is a number that is finite in float32. Texts and tensors of several numbers are not."""
    try:
        return not isinstance(number, (str, bytes)) and abs(float(number)) <= torch.finfo(torch.float32).max
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def reward_tensors(values: list[list], num_turns: int, num_turn_funcs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Scores.whole` and `Scores.per_turn` of this rank's B rollouts. `num_turns` is K, the same on all ranks."""
    whole = torch.full((len(values[0]), len(values)), NAN)
    per_turn = torch.full((len(values[0]), num_turns, num_turn_funcs), NAN)
    for f, column in enumerate(values):
        for i, value in enumerate(column):
            if isinstance(value, (list, tuple)):
                per_turn[i, : len(value), f] = torch.tensor([NAN if v is None else float(v) for v in value])
            elif value is not None:
                whole[i, f] = float(value)
    return whole, per_turn


def turn_flags(rollouts: list[Rollout], num_turns: int) -> list[torch.Tensor]:
    """Two bool tensors (B, K): whether a turn has an observation, and whether the rollout has the turn."""
    flags = [[turn.has_observation for turn in rollout.turns] for rollout in rollouts]
    return [pad_rows(rows, num_turns, False, torch.bool) for rows in (flags, [[True] * len(row) for row in flags])]


def state_numbers(rollout: Rollout) -> list[int]:
    """One hash per turn that identifies its state: of its `state_key`, or of the tokens that it reads without one.

    INVARIANT: it is the same in every process. So a key is refused whose `repr` may differ, such as a set.
    """
    numbers = {}  # turn -> number
    for record in rollout.records:
        history = id_hash(record.prompt_ids)
        for k, turn in zip(record.numbers, record.turns):
            digest = history.digest()
            if turn.state_key is not None:
                if not is_plain(turn.state_key):
                    raise ValueError(f"state_key returned {turn.state_key!r}, expected a string, a number or a tuple.")
                digest = hashlib.blake2b(repr(turn.state_key).encode(), digest_size=8).digest()
            numbers[k] = int.from_bytes(digest[:8], "big") >> 1  # never -1, which means "no turn"
            id_hash(turn.token_ids + turn.observation_ids, history)
    return [numbers[k] for k in sorted(numbers)]


def is_plain(key: Any) -> bool:
    """Whether the `repr` of a key is the same in every process."""
    return all(map(is_plain, key)) if isinstance(key, (tuple, list)) else isinstance(key, tuple(PLAIN))
