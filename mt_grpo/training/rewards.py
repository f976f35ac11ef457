"""The reward functions of a run: their validation, their names, and their values for a batch."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
import typing
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object

from mt_grpo.base.errors import tell_once
from mt_grpo.base.rows import column_lists, number_of, prompts_of
from mt_grpo.conversation.environments import tool_methods
from mt_grpo.rollout import Rollout, Turn, join
from mt_grpo.training.batch import Batch
from mt_grpo.training.policy_scores import ASKED_COLUMNS, asked_of, join_rounds, turn_contexts
from mt_grpo.training.reward_calls import RewardError, noise_apart, rollout_columns, run_rewards
from mt_grpo.training.reward_numbers import check_reward_values, reward_tensors, state_numbers, turn_flags
from mt_grpo.training.tensors import pad_rows

logger = logging.getLogger(__name__)


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
    for func in turn_funcs + outcome_funcs:
        if isinstance(func, (str, torch.nn.Module)):
            raise ValueError(
                f"A reward must be a function, got {func if isinstance(func, str) else type(func).__name__!r:.100}. "
                "Reward models are not supported, by name or as modules. Write a function that runs the model, or "
                "that asks it over HTTP, such as rewards/judge_reward.py."
            )
        if not callable(func):
            raise ValueError(f"A reward must be a function, got {func!r:.100}. List functions without calling them.")
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(func).parameters.values()):
            raise ValueError(
                f"Reward {reward_name(func)} takes no **kwargs. Add it, since every dataset column is passed by name."
            )


def reward_name(func: Callable) -> str:
    """The name of a reward, as in TRL: that of a partial's function, or of a callable object's class.

    >>> reward_name(functools.partial(functools.partial(sorted), reverse=True)), reward_name(reward_name)
    ('sorted', 'reward_name')
    """
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", type(func).__name__)


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


def environment_rewards(environments: Any, tools: dict[str, Callable]) -> tuple[list, list]:
    """(turn, outcome) reward functions that return the rewards of environments and tools, named as they are logged.

    Turn: `environment` (of replies) and `tool` (of results). Outcome: `get_reward`, under the name of each class, and
    the class's `outcome_reward_funcs`.
    """

    def environment(rollout_turns: list, **kwargs) -> list:
        return [[turn.reward for turn in turns] for turns in rollout_turns]

    def tool(rollout_turns: list, **kwargs) -> list:
        return [[summed(result.reward for result in turn.results) for turn in turns] for turns in rollout_turns]

    tool.of_results = True

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

    Of each kind, the user's functions come first, followed by those of the environment and the tools.

    Attributes:
        functions: (F,), each with a unique name.
        weights: (F,), one finite number per function.
        num_turn_funcs: F_turn, the number of turn functions.
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
        optional: bool = False,
    ) -> RewardFunctions:
        """Combine the user's functions with those of an environment and its tools, which keep their names.

        An environment's and its tools' rewards have weight 1.

        Args:
            turn_funcs, outcome_funcs: The user's functions, as `MTGRPOEnvTrainer` takes them.
            env: The class of conversations (`MultiTurnToolEnv`).
            turn_weights, outcome_weights: One weight per user function; None: 1 each.
            optional: Whether there may be no function.

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
        guests: Guests | None = None,
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
            guests: Rollouts of other ranks, for functions that see whole groups; their values are stored in it. The
                values that other ranks compute for this one's are None.

        Raises:
            RuntimeError: A function raised, or took too long. The message names the row of the data.
            ValueError: A function returned something else.
        """
        guests, first = guests or Guests(), batch.first
        visible = visible_places(batch, only)
        if not any(hasattr(func, "of_results") for func in self.functions):
            turns = join(batch.rollouts[i].turns for i in visible)
            paid = [turn for turn in turns if any(result.reward is not None for result in turn.results)]
            if paid:
                tell_of_results(paid[0])
        own = {first + i: (batch.rows[i], batch.rollouts[i]) for i in visible}
        whole = {n: each for n, each in own.items() if n - first not in guests.away}
        whole |= {n: (guests.rows[n], guests.rollouts[n]) for n in sorted(guests.rows)}
        by_groups = [f for f, func in enumerate(self.functions) if self._sees_groups(func, batch)]
        others = [f for f in range(len(self.functions)) if f not in by_groups]
        if not guests.rows and not guests.away:  # all see the same: one call of all, in which async ones run together
            by_groups, others = [], list(range(len(self.functions)))
        found: dict[int, dict[int, Any]] = {}
        for numbers, seen in ((others, own), (by_groups, whole)):
            if numbers and seen:
                found |= self._call(numbers, seen, batch, columns, timeout, device, guests)
        guests.values = {f: {n: v for n, v in found.get(f, {}).items() if n in guests.rows} for f in by_groups}
        numbers = range(first, first + len(batch.rollouts))
        return [[found.get(f, {}).get(n) for n in numbers] for f in range(len(self.functions))]

    @staticmethod
    def _sees_groups(function: Callable, batch: Batch) -> bool:
        return "groups" in asked_of([function]) and "groups" not in column_lists(batch.rows, batch.data)

    def _call(
        self,
        numbers: list[int],
        seen: dict[int, tuple],
        batch: Batch,
        columns: dict[str, Any],
        timeout: float,
        device: torch.device,
        guests: Guests,
    ) -> dict[int, dict[int, Any]]:
        """Function number -> rollout number -> value, of the functions `numbers` for the rollouts `seen`.

        `seen`: number of the rollout in the batch -> its row and itself. The others are as in `score`.
        """
        functions, places = [self.functions[f] for f in numbers], list(seen)
        rows, rollouts = [row for row, _ in seen.values()], [rollout for _, rollout in seen.values()]
        extra: dict[str, list] = defaultdict(list)  # as in TRL, a further call goes on with the column
        # Also of the rows that nobody sees: a column of theirs is a column of all.
        of_data = column_lists(rows + batch.rows, batch.data)
        asked = asked_of(self.functions) - of_data.keys()  # who takes keywords gets what another one names
        if not any(self._sees_groups(function, batch) for function in functions):
            asked -= {"groups"}
        given = {
            **{name: column[: len(rows)] for name, column in of_data.items()},
            **rollout_columns(rollouts, prompts_of(rows)),
            **{name: value for name, value in columns.items() if name not in ASKED_COLUMNS or name in asked},
            "log_extra": lambda column, values: extra[column].extend(values),
        }
        if "turn_contexts" in asked:
            given["turn_contexts"] = [turn_contexts(rollout) for rollout in rollouts]
        if "groups" in asked:
            given["groups"] = [number // batch.group_size for number in places]
        try:
            with noise_apart(getattr(columns.get("trainer_state"), "global_step", 0), device, batch.num_rounds):
                values = run_rewards(functions, given, timeout, device)
        except RewardError as error:
            number = None if error.place is None else number_of(rows[error.place], batch.data)
            split = "training" if batch.mode == "train" else "test"
            named = "" if number is None else f" (row {number} of the {split} data, counted from 0)"
            raise RuntimeError(f"{error}{named}") from error.__cause__
        own = range(batch.first, batch.first + len(batch.rollouts))
        for name, logged in extra.items():
            if places == list(own):
                columns["log_extra"](name, logged)
                continue
            if len(logged) % len(places):
                raise ValueError(
                    f"log_extra({name!r}): got {len(logged)} values, expected one for each of {len(places)} rollouts."
                )
            placed = dict(zip(places, logged[-len(places) :]))  # of several functions the last one's
            columns["log_extra"](name, [placed.get(number) for number in own])
            guests.extra[name] = {n: value for n, value in placed.items() if n not in own}
        for f, column in zip(numbers, values):
            check_reward_values(column, self.names[f], rollouts, per_turn=f < self.num_turn_funcs)
        return {f: dict(zip(places, column)) for f, column in zip(numbers, values)}

    def score_all_ranks(
        self,
        batch: Batch,
        columns: dict[str, Any],
        timeout: float,
        accelerator: Any,
        on_all_ranks: Callable[[Callable[[], None], str], Any],
        reads_state: bool,
        fresh: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Score the rollouts of all ranks. Collective.

        Args:
            batch, columns, timeout: See `score`.
            accelerator: The trainer's accelerator.
            on_all_ranks: Runs a function that may fail on one rank, and raises on all (`ResumableTrainer`).
            reads_state: Whether the estimator compares turns by their states.
            fresh: (N,) bool, the rollouts that functions see. None: all.

        Returns:
            On the CPU, with K turns in the longest of all N rollouts: the numbers per rollout (N, F) and per
            turn (N, K, F_turn), NaN for None; whether a turn has an observation, and whether it exists, (N, K)
            bool; the hashes of the turns' states, (N, K) int64, -1 without a turn; the turns' trained tokens,
            (N, K) int64.
        """
        # INVARIANT: K is the same on all ranks before anything of shape (B, K) is gathered.
        num_turns = torch.tensor([max(len(rollout.turns) for rollout in batch.rollouts)], device=accelerator.device)
        num_turns = max(1, int(accelerator.gather(num_turns).max()))
        only = None if fresh is None else batch.own(fresh).tolist()
        by_groups = any(self._sees_groups(function, batch) for function in self.functions)
        guests = exchange(batch, visible_places(batch, only), on_all_ranks) if by_groups else Guests()
        values: list[list] = []
        local: list[torch.Tensor] = []

        def run() -> None:
            try:
                values.extend(self.score(batch, columns, timeout, accelerator.device, only, guests))
            finally:
                join_rounds(columns)
            local.extend(turn_flags(batch.rollouts, num_turns))
            states = [state_numbers(rollout) if reads_state else [] for rollout in batch.rollouts]
            local.append(pad_rows(states, num_turns, -1, torch.long))
            tokens = [[sum(turn.per_token(int(turn.trained), 0)) for turn in each.turns] for each in batch.rollouts]
            local.append(pad_rows(tokens, num_turns, 0, torch.long))

        on_all_ranks(run, "Rewards")
        if by_groups:
            give_back(guests, batch, values, columns["log_extra"], on_all_ranks)
        local = [*reward_tensors(values, num_turns, self.num_turn_funcs), *local]
        return tuple(accelerator.gather(each.to(accelerator.device).contiguous()).cpu() for each in local)


def tell_of_results(turn: Turn) -> None:
    """Warn once about the reward of a tool result that no function counts, because it was not announced."""
    found = next((call, result) for call, result in zip(turn.calls, turn.results) if result.reward is not None)
    tell_once(
        f"The tool {found[0].name} returned the reward {found[1].reward:g} with a result. It is ignored, because the "
        "tool is not annotated to return rewards. Annotate the function with -> ToolResult (for tools that `reset` "
        "creates: give the class `tools: list = []`), or read the reward in a reward function.",
        "rewards of results",
    )


def visible_places(batch: Batch, only: list[bool] | None) -> list[int]:
    """The indices of this rank's rollouts that functions see, without those whose environment failed."""
    return [i for i, rollout in enumerate(batch.rollouts) if not rollout.failed and (only is None or only[i])]


def weights_of(funcs: list[Callable], weights: list[float] | None, kind: str) -> list[float]:
    """One weight per function, 1.0 by default. Raises `ValueError` for a wrong count or an infinite weight."""
    if weights is not None and len(weights) != len(funcs):
        names = ", ".join(f.__name__ for f in funcs)
        raise ValueError(f"{kind}_reward_weights has {len(weights)} values, expected {len(funcs)}: {names or 'none'}.")
    if not all(abs(float(weight)) <= torch.finfo(torch.float32).max for weight in weights or []):  # NaN is refused too
        raise ValueError(f"{kind}_reward_weights={weights!r}, expected finite numbers.")
    return [1.0] * len(funcs) if weights is None else [float(w) for w in weights]


def summed(rewards: typing.Iterable[float | None]) -> float | None:
    """The sum of the rewards that are not None, or None if there is none."""
    given = [reward for reward in rewards if reward is not None]
    return sum(given) if given else None


@dataclass
class Guests:
    """Rollouts of other ranks that this rank scores, because their groups begin here.

    Attributes:
        rows, rollouts: Number of the rollout in the batch -> row or rollout of another rank.
        away: The indices of this rank's rollouts whose groups begin on another rank.
        values: The values of functions for the guests: number of the function -> number of the rollout -> value.
        extra: The columns that functions logged for them: column -> number of the rollout -> value.
    """

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)
    values: dict[int, dict[int, Any]] = field(default_factory=dict)
    extra: dict[str, dict[int, Any]] = field(default_factory=dict)


def sendable(rollout: Rollout) -> Rollout:
    """A copy of a rollout that can be sent to another process: without its environment and its tools."""
    sent = copy.copy(rollout)
    sent.environment, sent.tools, sent.rendered, sent.given_up = None, None, None, []
    return sent


def exchange(batch: Batch, visible: list[int], on_all_ranks: Callable[[Callable[[], None], str], Any]) -> Guests:
    """Send rollouts to the ranks on which their groups begin. Collective if a group lies on several ranks.

    Args:
        batch: The batch, with its rollouts.
        visible: The indices of the rollouts that functions see.
        on_all_ranks: See `RewardFunctions.score_all_ranks`. A rollout that cannot be sent is an error on all ranks.
    """
    size, count, first, packed = batch.group_size, len(batch.rollouts), batch.first, []
    if count % size == 0:  # on all ranks
        return Guests()
    away = {i for i in range(count) if (first + i) // size * size < first}
    sent = [(first + i, batch.rows[i], sendable(batch.rollouts[i])) for i in visible if i in away]
    what = "Sending rollouts to reward functions with the parameter groups"
    on_all_ranks(lambda: packed.append([(each[0], pickle.dumps(each)) for each in sent]), what)
    everyone = [each for part in gather_object(packed) for each in part]
    here = [data for n, data in everyone if n >= first + count and first <= n // size * size < first + count]
    loaded: list[tuple] = []
    on_all_ranks(lambda: loaded.extend(map(pickle.loads, here)), what)
    return Guests({n: row for n, row, _ in loaded}, {n: rollout for n, _, rollout in loaded}, away)


def give_back(
    guests: Guests,
    batch: Batch,
    values: list[list],
    add_extra: Callable[[str, list], None],
    on_all_ranks: Callable[[Callable[[], None], str], Any],
) -> None:
    """Put what other ranks found for this rank's rollouts into `values`, (F, B). Collective.

    Args:
        guests: Of `exchange`, with what this rank found for others.
        batch: Of this rank.
        values: Of this rank, None where a rollout is away.
        add_extra: Takes a column of B values, None where nothing was logged.
        on_all_ranks: See `exchange`.
    """
    if len(batch.rollouts) % batch.group_size == 0:
        return
    own, packed = range(batch.first, batch.first + len(batch.rollouts)), []
    what = "Returning the values of reward functions with the parameter groups"
    on_all_ranks(lambda: packed.append(pickle.dumps((guests.values, guests.extra))), what)
    for found, extra in map(pickle.loads, gather_object(packed)):
        for f, by_number in found.items():
            for number, value in by_number.items():
                if number in own:
                    values[f][number - batch.first] = value
        for column, by_number in extra.items():
            if mine := {n: value for n, value in by_number.items() if n in own}:
                add_extra(column, [mine.get(n) for n in own])
