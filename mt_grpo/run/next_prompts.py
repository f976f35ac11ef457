"""Which prompts a run asks for next, as rows of its dataset, and which groups of them fill a batch."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

Kind = tuple[int, ...]  # of a group: its rollouts on each rank


def slot_kinds(per_rank: int, group_size: int, num_ranks: int) -> list[Kind]:
    """For each group of a batch the rollouts on each rank. A group can only replace one with the same numbers.

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


class EpochOrder(Sampler):
    """TRL's sampler, with an order that depends on the number of the epoch, not on the epochs of this process."""

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler, self.epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + self.epoch())
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


class Prompts:
    """The prompts of an epoch that are still to be asked for.

    `order_of` returns the order of an epoch, `place` of its prompts were asked for, and those in `again` are asked for
    once more, before all others. If it is `endless`, the next epoch follows: with `refill_groups` an epoch of
    `Trainer` is no pass through the data.

    >>> orders = [[3, 1, 0, 2], [0, 3, 1, 2]]
    >>> prompts = Prompts(orders.__getitem__, 0, place=3, again=[1])
    >>> prompts.left, prompts.take(), prompts.take(), prompts.left
    (2, 1, 2, 0)
    >>> prompts = Prompts(orders.__getitem__, 0, place=2, again=[1], endless=True)
    >>> [prompts.take() for _ in range(5)], prompts.passes, prompts.state([3])
    ([1, 0, 2, 0, 3], 1.5, {'epoch': 1, 'place': 2, 'prompts': [3], 'endless': True})
    """

    def __init__(self, order_of: Callable, epoch: int, place: int = 0, again: Iterable[int] = (), endless=False):
        self.order_of, self.epoch, self.place, self.endless = order_of, epoch, place, endless
        self.order, self.again = order_of(epoch), deque(again)

    @property
    def left(self) -> int:
        return sys.maxsize if self.endless else len(self.again) + max(len(self.order) - self.place, 0)

    @property
    def passes(self) -> float:
        """Passes through the data so far."""
        return self.epoch + self.place / len(self.order)

    def take(self) -> int:
        """Return the index of the next prompt."""
        if self.again:
            return self.again.popleft()
        if self.endless and self.place >= len(self.order):
            self.epoch, self.order, self.place = self.epoch + 1, self.order_of(self.epoch + 1), 0
        self.place += 1
        return self.order[self.place - 1]

    def state(self, not_trained: Iterable[int]) -> dict[str, Any]:
        """What a resumed run needs, as JSON data: the position, and the prompts asked for and not trained."""
        prompts = [*not_trained, *self.again]
        return {"epoch": self.epoch, "place": self.place, "prompts": prompts, "endless": self.endless}
