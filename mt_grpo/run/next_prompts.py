"""Which prompts a run asks for next, and what a checkpoint remembers of them.

`LookAhead` shows the batches of `Trainer` early. `EpochPrompts` has the prompts of an epoch for groups that end in
another order, and `PassPrompts` those of passes without an end.
"""

from __future__ import annotations

import collections.abc
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mt_grpo.base.files import read_json
from mt_grpo.base.json_types import fits_type
from mt_grpo.base.ranks import RunError

IN_FLIGHT = "mt_grpo_in_flight.json"  # with `late_groups: admit` or `refill_groups`: the prompts that are next


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
        """Restore the output of `state`. The prompts of a partly trained batch (`batch`) come first.

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
        """Return the index of the next prompt."""
        if self.again:
            return self.again.popleft()
        self.place += 1
        return self.order[self.place - 1]

    def end(self) -> None:
        """Leave the rest of the epoch."""
        self.place = len(self.order)
        self.again.clear()

    def state(self, in_flight: list[int], per_batch: int) -> dict[str, Any]:
        """The state that a resumed run needs, as JSON data."""
        prompts = [*in_flight, *self.again]
        return {"epoch": self.epoch, "place": self.place, "prompts": prompts, "per_batch": per_batch}


class PassPrompts(EpochPrompts):
    """Prompts without an end: after a pass through the data the next one begins, in an order of its own.

    With `refill_groups` a step may take more prompts than a batch has. So passes are not the epochs of `Trainer`,
    which are so many batches.

    Args:
        number: Of the first pass.
        order_of: Gives the order of a pass.
        place, again: See `EpochPrompts`.

    >>> prompts = PassPrompts(0, [[3, 1, 0], [0, 3, 1]].__getitem__, place=2, again=[1])
    >>> [prompts.take() for _ in range(4)], prompts.passes
    ([1, 0, 0, 3], 1.6666666666666665)
    """

    def __init__(self, number: int, order_of: Callable[[int], list[int]], place: int = 0, again: Iterable[int] = ()):
        self.order_of = order_of
        super().__init__(number, order_of(number), place, again)

    @property
    def left(self) -> int:
        return sys.maxsize

    @property
    def passes(self) -> float:
        """Passes through the data so far."""
        return self.epoch + self.place / len(self.order)

    def take(self) -> int:
        if not self.again and self.place >= len(self.order):
            self.epoch, self.order, self.place = self.epoch + 1, self.order_of(self.epoch + 1), 0
        return super().take()

    def end(self) -> None:
        """An epoch of `Trainer` ends, and a pass goes on."""

    def state(self, in_flight: list[int], per_batch: int) -> dict[str, Any]:
        return {**super().state(in_flight, per_batch), "passes": True}


def read_in_flight(
    checkpoint: Path, late_groups: str, num_prompts: int, refills: bool = False
) -> dict[str, Any] | None:
    """Read the prompts' `state` from a checkpoint. None if it was saved with neither `late_groups: admit` nor
    `refill_groups`.

    A checkpoint in the middle of a batch has the batch's prompts as `batch`, and the state at the batch's beginning;
    with `refill_groups` the current state, in which the batch's prompts are taken already.
    Raises `RunError` if this run would train some prompts twice and others not at all.
    """
    path = checkpoint / IN_FLIGHT
    if not path.exists():
        return None
    state = read_json(path)
    numbers, lists = {"epoch", "place", "per_batch"}, {"prompts", "batch"}
    if (
        not isinstance(state, dict)
        or not numbers | {"prompts"} <= state.keys()
        or not all(type(state[name]) is int for name in numbers)
        or not all(fits_type(state[name], list[int]) for name in lists & state.keys())
    ):
        raise RunError(f"{path} is damaged. Expected the prompts that were in flight. Resume from another checkpoint.")
    if state.get("passes") and not refills:
        raise RunError(
            f"{checkpoint} was saved with refill_groups, after {state['epoch']} passes and {state['place']} prompts, "
            "got refill_groups: 0. Set refill_groups, or ignore_data_skip: true to restart the epoch."
        )
    prompts = state["prompts"] or state.get("batch", [])
    if state["prompts"] and late_groups != "admit" or prompts and late_groups != "admit" and not refills:
        raise RunError(
            f"{checkpoint} was saved with late_groups: admit and {len(prompts)} prompts in flight, got late_groups: "
            f"{late_groups}. Set late_groups: admit, or resume from a checkpoint at the end of an epoch."
        )
    if prompts and state["per_batch"] != num_prompts:
        raise RunError(
            f"{checkpoint} has {len(prompts)} prompts in flight, from batches of {state['per_batch']} prompts, got "
            f"{num_prompts}. Use the batch sizes, num_generations and number of processes of the run that saved it."
        )
    return state


def write_in_flight(folder: Path, state: dict[str, Any] | None) -> None:
    """Save the state for `read_in_flight`. None: remove the file of another run in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if state is None:
        (folder / IN_FLIGHT).unlink(missing_ok=True)
    else:
        (folder / IN_FLIGHT).write_text(json.dumps(state), encoding="utf-8")
