"""Reward functions that see whole groups: those that name a parameter `groups`.

A group may lie on several ranks. The rank that has its first rollout then scores all of it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import gather_object

from mt_grpo.rollout import Rollout
from mt_grpo.training.batch import Batch


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
