"""What is in flight while the policy trains: which groups a step takes, and prompts seen early."""

from __future__ import annotations

import collections.abc
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_grpo.base.files import read_json
from mt_grpo.base.ranks import RunError
from mt_grpo.generation.rollout_batch import RolloutBatch
from mt_grpo.rollout import Rollout

IN_FLIGHT = "mt_grpo_in_flight.json"  # with `late_groups: admit`: the prompts that were asked for and not trained


class LookAhead:
    """An iterator over an epoch's batches for `Trainer`, which can also return the next batches of rollouts early.

    `every` is the number of forward passes per batch of rollouts. Each pass takes one item of `batches`.

    >>> epoch = LookAhead(iter("aabbcc"), every=2)  # a batch of rollouts lasts two forward passes
    >>> next(epoch), epoch.next_rollouts(1), next(epoch), next(epoch), epoch.next_rollouts(2), next(epoch)
    ('a', ['b'], 'a', 'b', ['c'], 'b')
    >>> epoch.next_rollouts(2), list(epoch)
    ([], ['c', 'c'])
    """

    def __init__(self, batches: Iterator, every: int):
        self.source, self._every = batches, every
        self._ahead: collections.deque = collections.deque()
        self._taken = self._rollouts = 0

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        batch = self._ahead.popleft() if self._ahead else next(self.source)
        self._taken += 1
        return batch

    def next_rollouts(self, count: int) -> list:
        """The inputs of the next `count` batches of rollouts, fewer at the epoch's end. Once per batch of rollouts."""
        self._rollouts += 1
        first = self._rollouts * self._every - self._taken
        places = range(first, first + count * self._every, self._every)
        while len(self._ahead) <= places[-1]:
            try:
                self._ahead.append(next(self.source))
            except StopIteration:
                break
        return [self._ahead[place] for place in places if place < len(self._ahead)]


Kind = tuple[int, ...]  # of a group: its rollouts on each rank


def slot_kinds(per_rank: int, group_size: int, num_ranks: int) -> list[Kind]:
    """For each group of a batch, how many of its rollouts are on each rank.

    A group can take the place of another one only if both have the same numbers.

    >>> slot_kinds(per_rank=8, group_size=4, num_ranks=1), slot_kinds(per_rank=6, group_size=4, num_ranks=2)
    ([(4,), (4,)], [(4, 0), (2, 2), (0, 4)])
    """
    ranks = [index // per_rank for index in range(per_rank * num_ranks)]
    groups = [ranks[first : first + group_size] for first in range(0, len(ranks), group_size)]
    return [tuple(group.count(rank) for rank in range(num_ranks)) for group in groups]


def choose_groups(complete: list[bool], kinds: list[Kind], slots: list[Kind]) -> list[int] | None:
    """For each slot of a batch the index of a complete group of its kind, oldest first; None if there are too few.

    >>> left, right = (4, 0), (0, 4)
    >>> choose_groups([False, True, True, True], [left, right, left, right], [left, right])
    [2, 1]
    >>> choose_groups([False, True, False, True], [left, right, left, right], [left, right])
    """
    waiting = {kind: deque(i for i, own in enumerate(kinds) if own == kind and complete[i]) for kind in slots}
    chosen = [waiting[kind].popleft() if waiting[kind] else None for kind in slots]
    return None if None in chosen else chosen


def epoch_order(indices: Iterable[int], num_prompts: int, group_size: int, repeats: int) -> list[int]:
    """Each prompt of an epoch once, in the order of TRL's `RepeatSampler`.

    Args:
        indices: Of the sampler: each prompt of a batch `group_size` times in a row, each batch `repeats` times.
        num_prompts: Of a batch.
        group_size: G.
        repeats: Forward passes of a batch.

    >>> epoch_order([3, 3, 1, 1, 3, 3, 1, 1, 0, 0, 2, 2, 0, 0, 2, 2], num_prompts=2, group_size=2, repeats=2)
    [3, 1, 0, 2]
    """
    size = num_prompts * group_size
    return [k for i, k in enumerate(indices) if i % (size * repeats) < size and i % group_size == 0]


class EpochPrompts:
    """The prompts of an epoch that are still to be asked for, as rows of the dataset.

    Args:
        epoch: Its number.
        order: All its prompts.
        place: How many of them are asked for already.
        again: Of these, the ones to be asked for once more, first of all: they were in flight when a run stopped.

    >>> prompts = EpochPrompts(0, [3, 1, 0, 2], place=3, again=[1])
    >>> prompts.left, prompts.take(), prompts.take(), prompts.left
    (2, 1, 2, 0)
    >>> prompts.state(in_flight=[1, 2], per_batch=2)
    {'epoch': 0, 'place': 4, 'prompts': [1, 2], 'per_batch': 2}
    """

    def __init__(self, epoch: int, order: list[int], place: int = 0, again: Iterable[int] = ()):
        self.epoch, self.order, self.place, self.again = epoch, order, place, deque(again)

    @classmethod
    def resumed(cls, order: list[int], saved: dict[str, Any]) -> EpochPrompts:
        """What `state` gave. The prompts of a batch that was trained in part (`batch`) are asked for first of all.

        Each of them was in flight at the end of the batch before, or was asked for after that.

        >>> saved = {"epoch": 0, "place": 2, "prompts": [1], "batch": [2, 1]}
        >>> prompts = EpochPrompts.resumed([3, 1, 0, 2, 5, 4], saved)
        >>> [prompts.take() for _ in range(prompts.left)]
        [2, 1, 0, 5, 4]
        """
        batch, place = saved.get("batch", []), saved["place"]
        asked = max([place, *(order.index(prompt) + 1 for prompt in batch)])
        others = [prompt for prompt in [*saved["prompts"], *order[place:asked]] if prompt not in batch]
        return cls(saved["epoch"], order, asked, [*batch, *others])

    @property
    def left(self) -> int:
        return len(self.again) + max(len(self.order) - self.place, 0)

    def take(self) -> int:
        """The next prompt."""
        if self.again:
            return self.again.popleft()
        self.place += 1
        return self.order[self.place - 1]

    def end(self) -> None:
        """Leave the rest of the epoch."""
        self.place = len(self.order)
        self.again.clear()

    def state(self, in_flight: list[int], per_batch: int) -> dict[str, Any]:
        """What a resumed run needs, in JSON."""
        prompts = [*in_flight, *self.again]
        return {"epoch": self.epoch, "place": self.place, "prompts": prompts, "per_batch": per_batch}


def read_in_flight(checkpoint: Path, late_groups: str, num_prompts: int) -> dict[str, Any] | None:
    """What `EpochPrompts.state` gave when a checkpoint was saved; None if it was saved without `late_groups: admit`.

    A checkpoint in the middle of a batch has the state of the batch's beginning, and the batch's prompts as `batch`.
    Raises `RunError` where this run would train some prompts twice and others not at all.
    """
    path = checkpoint / IN_FLIGHT
    if not path.exists():
        return None
    state = read_json(path)
    if not isinstance(state, dict) or {"epoch", "place", "prompts", "per_batch"} - state.keys():
        raise RunError(f"{path} is damaged. Expected the prompts that were in flight: use another checkpoint.")
    prompts = state["prompts"] or state.get("batch", [])
    if prompts and late_groups != "admit":
        raise RunError(
            f"{checkpoint} was saved with late_groups: admit, when {len(prompts)} prompts were begun and not trained, "
            f"got late_groups: {late_groups}. Set late_groups: admit, or resume from the end of an epoch."
        )
    if prompts and state["per_batch"] != num_prompts:
        raise RunError(
            f"{checkpoint} has {len(prompts)} prompts in flight, of batches of {state['per_batch']} prompts, got "
            f"{num_prompts}. Set the batch sizes, num_generations and number of processes of the run that saved it."
        )
    return state


def write_in_flight(folder: Path, state: dict[str, Any] | None) -> None:
    """Save the state for `read_in_flight`. None: remove that of another run in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if state is None:
        (folder / IN_FLIGHT).unlink(missing_ok=True)
    else:
        (folder / IN_FLIGHT).write_text(json.dumps(state), encoding="utf-8")


@dataclass(frozen=True)
class GroupInFlight:
    """The conversations of one prompt, of which this rank has all, some or none."""

    prompt: int  # row of the dataset
    kind: Kind
    rows: list[dict[str, Any]]  # of this rank's conversations
    batch: RolloutBatch | None  # None: this rank has none of them

    @property
    def over(self) -> bool:
        """Whether this rank's conversations have ended, or failed."""
        return self.batch is None or self.batch.over

    def cancel(self) -> None:
        if self.batch is not None:
            self.batch.cancel()


class AwaitedGroups:
    """All groups in flight, while a step waits for some of them: what the run's progress is read from."""

    over = False

    def __init__(self, groups: list[GroupInFlight]):
        self.batches = [group.batch for group in groups if group.batch is not None]
        self.rollouts = [rollout for batch in self.batches for rollout in batch.rollouts]

    def cancel(self) -> None:
        for batch in self.batches:
            batch.cancel()


class ChosenGroups(AwaitedGroups):
    """The groups that a step takes, in the place of its batch (`RolloutBatch`).

    Args:
        groups: In the order of the batch's slots.
        first: The index of this rank's first rollout in the batch.
        waited: Seconds that training waited for them.
    """

    over = True

    def __init__(self, groups: list[GroupInFlight], first: int, waited: float):
        super().__init__(groups)
        self.waited = waited
        self.rows = [row for group in groups for row in group.rows]
        for index, rollout in enumerate(self.rollouts, first):
            rollout.index = index
        self.seconds = max((batch.seconds for batch in self.batches), default=0.0)

    def wait(self) -> list[Rollout | None]:
        """As `RolloutBatch.wait`."""
        return [rollout for batch in self.batches for rollout in batch.wait()]
