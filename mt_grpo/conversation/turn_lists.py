"""Validation of the lists of a rollout's turns, as the loss reads them, once a conversation is over.

An environment gets the rollout itself, and may change it by mistake.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.conversation.environments import EnvironmentFailure, failures_end, is_number
from mt_grpo.images.pictures import KNOWN, PictureId, is_picture, picture_of, runs_of
from mt_grpo.rollout import Rollout, Turn, join


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's largest id plus one. It may exceed the tokenizer's length: ids may have gaps."""
    return greatest_id(tokenizer, len(tokenizer)) + 1


@functools.lru_cache(maxsize=8)
def greatest_id(tokenizer: PreTrainedTokenizerBase, length: int) -> int:
    """The tokenizer's largest id, cached. `length` is part of the cache key, since tokens may be added later."""
    return max(tokenizer.get_vocab().values(), default=length - 1)


def keep_whole(rollout: Rollout, vocab_size: int) -> None:
    """Mark a rollout as its environment's failure, and drop its turns, if `check_turns` raises."""
    if rollout.failed:
        return
    with failures_end(rollout):
        try:
            check_turns(rollout, vocab_size)
        except EnvironmentFailure:
            rollout.turns, rollout.edited = [], None
            raise


def check_turns(rollout: Rollout, vocab_size: int) -> None:
    """Raise `EnvironmentFailure` unless every token of a rollout's turns has its mask and its logprob.

    Ids that were read and not sampled have to be below `vocab_size` (`num_ids` of the tokenizer).
    """
    for number, turn in enumerate(rollout.turns):
        if not isinstance(turn, Turn):
            raise altered(f"rollout.turns[{number}] is {turn!r:.100}, expected a Turn")
        size, where = len(turn.token_ids), f"turn {number}"
        if turn.mask is not None and (len(turn.mask) != size or not set(turn.mask) <= {0, 1}):
            got = f"{turn.mask!r:.100} with {len(turn.mask)} values"
            raise altered(f"{where}: mask is {got}, expected None, or a 0 or 1 for each of the {size} tokens")
        if turn.logprobs is not None and len(turn.logprobs) != size:
            raise altered(f"{where} has {len(turn.logprobs)} logprobs, expected one for each of the {size} tokens")
        if turn.reward is not None and not is_number(turn.reward):
            raise altered(f"{where}: reward is {turn.reward!r:.100}, expected a finite number or None")
        context = [] if turn.context is None else turn.context.ids
        for name, ids in (("observation_ids", turn.observation_ids), ("context", context)):
            if (wrong := first_unknown(ids, vocab_size)) is not None:
                raise altered(
                    f"{where}: {name} has the id {wrong!r:.100}, expected numbers from 0 to {vocab_size - 1}"
                )
    try:
        found = join(record.turns for record in rollout.records)
    except (LookupError, TypeError, AttributeError) as error:
        raise altered(f"its turns form no valid records ({type(error).__name__}: {error})") from error
    if len(found) != len(rollout.turns):
        raise altered(f"its records contain {len(found)} turns, expected {len(rollout.turns)}")


def first_unknown(ids: list[int], vocab_size: int) -> Any:
    """The first id that is neither below `vocab_size` nor part of a complete image, None if there is none.

    >>> first_unknown([0, 7], 8), first_unknown([0, 8, -1], 8), first_unknown([1, -1], 8), first_unknown([1.5], 8)
    (None, 8, -1, 1.5)
    """
    # In C, for whole batches: the first one is looked for only where there is one.
    if not ids or (set(map(type, ids)) == {int} and 0 <= min(ids) and max(ids) < vocab_size):
        return None
    if any(type(each) is PictureId for each in ids):
        if (lost := next((each for each in ids if is_picture(each) and each not in KNOWN), None)) is not None:
            return lost
        runs = runs_of(ids, partial=True)
        whole = [run for run in runs if is_picture(run[0]) and len(run) == picture_of(run[0]).num_tokens]
        ids = [each for run in runs if run not in whole for each in run]
    return next((each for each in ids if type(each) is not int or not 0 <= each < vocab_size), None)


def altered(what: str) -> EnvironmentFailure:
    """The error for a rollout that its environment has changed."""
    return EnvironmentFailure(
        f"The rollout cannot be trained: {what}. An environment must not change the rollout. Return a reply instead."
    )
