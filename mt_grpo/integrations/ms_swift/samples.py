"""A scheduler's responses: which one a request goes on from, and what a scheduler makes of one.

INVARIANT: a response that a later request has read keeps its ids. Only its mask may change.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mt_grpo.conversation.environments import first_unknown, num_ids
from mt_grpo.conversation.formats.control_tokens import cut_far_beyond, placeholders_of
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.integrations.ms_swift.messages import keys_of
from mt_grpo.integrations.session import Sampled
from mt_grpo.rollout import Message


@dataclass
class Sample(Sampled):
    """A response, and what the scheduler made of its message."""

    tools: str  # of the request, as JSON
    start: str  # what its message says before it
    bare: str  # what its message says with it
    text: str  # the same, with what the scheduler added to it
    added: list[int]  # ids that the scheduler put between the parent's and its own
    tail: list[int] = field(default_factory=list)  # ids that the scheduler put after it
    is_read: bool = False  # a later request of its record has read it
    is_last: bool = False  # it is part of the last message of an output
    masked: bool = False  # the scheduler gave a mask for it
    dropped: bool = False  # the scheduler cut all of it
    drive: list[Sample] = field(default_factory=list)  # the responses of a conversation by `drive` that it ended
    given: tuple | None = None  # the ids and masks that the output of this conversation got

    @property
    def before(self) -> list[tuple[str, str]]:
        """The messages before the sample's own message."""
        return keys_of(self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages)


class GoesOn(NamedTuple):
    """How a request goes on from a response."""

    parent: Sample
    said: list[Message]  # the messages after its message
    added: str  # what the scheduler put after it, in the same message


def goes_on(samples: list[Sample], messages: list[Message], tools: str) -> GoesOn | None:
    """The response whose message a request repeats as its last one of the assistant, as it is or with more text."""
    place = max((k for k, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if place is None:
        return None
    before, said, text = keys_of(messages[:place]), messages[place + 1 :], messages[place]["content"]
    found = []
    for sample in samples:
        same = sample.text.strip() == text.strip() if said else sample.text == text
        fits = same or (sample.text and text.startswith(sample.text))
        if fits and sample.tools == tools and sample.before == before:
            rank = (same, len(sample.text), not sample.is_read, -sample.number)
            found.append((rank, GoesOn(sample, said, "" if same else text[len(sample.text) :])))
    return max(found, key=lambda each: each[0])[1] if found else None


def messages_of(sample: Sample) -> list[list[Sample]]:
    """The responses up to one, in the messages of the assistant that they are parts of."""
    groups = [[sample]]
    while (first := groups[0][0]).parent is not None:
        if first.said:
            groups.insert(0, [first.parent])
        else:
            groups[0].insert(0, first.parent)
    return groups


def num_same(first: list[int], second: list[int]) -> int:
    """The number of equal values at the beginning of two lists."""
    return sum(itertools.takewhile(bool, map(operator.eq, first, second)))


def num_kept(ids: list[int], text: str, text_of: Callable[[list[int]], str]) -> int:
    """How many of the ids a text begins with. A beginning of the ids may end inside a character.

    >>> num_kept([104, 105, 33], "hi there", lambda ids: bytes(ids).decode(errors="replace"))
    2
    >>> num_kept([*"😀a".encode()], "😀b", lambda ids: bytes(ids).decode(errors="replace"))
    4
    """

    def differs(size: int) -> bool:
        return not text.startswith(text_of(ids[:size]).rstrip("\N{REPLACEMENT CHARACTER}"))

    kept = bisect.bisect_left(range(1, len(ids) + 1), True, key=differs)
    while kept and not (text_of(ids[:kept]) and text.startswith(text_of(ids[:kept]))):
        kept -= 1
    return kept


def own_ids(text: str, written: Any, context: float) -> list[int]:
    """The ids of a scheduler's own text in the assistant's message: no special token in it ends the turn."""
    tokenizer = written.tokenizer
    special = sorted([*tokenizer.all_special_tokens, *placeholders_of(tokenizer)], key=len, reverse=True)
    if special:
        text = re.sub("|".join(map(re.escape, special)), lambda found: f"{found[0][0]} {found[0][1:]}", text)
    return written.text_ids(cut_far_beyond(text, context, tokenizer)) if text else []


def checked_mask(ids: list[int], mask: list[int]) -> list[int]:
    """The mask that a scheduler gave for ids. Raises `SchedulerFailure` unless it has a 0 or a 1 for each."""
    if len(mask) != len(ids) or not set(mask) <= {0, 1}:
        raise SchedulerFailure(
            f"response_loss_mask has {len(mask)} values, {sorted(set(mask))}. Expected a 0 or a 1 for each of the "
            f"{len(ids)} response_token_ids."
        )
    return mask


def check_sampled(ids: list[int], mask: list[int], place: int, end: int) -> None:
    """Raise `SchedulerFailure` if an id from a place to an end, which was not sampled, has mask 1."""
    if 1 in mask[place:end]:
        place += mask[place:end].index(1)
        raise SchedulerFailure(
            f"response_loss_mask is 1 for id {ids[place]} at {place}, which the policy did not sample. Expected 0 for "
            "all that the scheduler adds."
        )


def without_prefill(sample: Sample, ids: list[int], mask: list[int] | None) -> tuple[list[int], list[int] | None]:
    """The ids and the mask of a message without the ids in front of its first response, which the model has read.

    Raises `SchedulerFailure` if one of these has mask 1.
    """
    read = sample.prompt_ids
    ends = [0, *(size for size in range(1, len(ids)) if ids[size - 1 : size] == read[-1:])]
    sizes = [size for size in ends if ids[:size] == read[len(read) - size :]]
    start = max(sizes, key=lambda size: (num_same(ids[size:], sample.turn.token_ids), -size), default=0)
    if mask:
        check_sampled(ids, checked_mask(ids, list(mask)), 0, start)
    return list(ids[start:]), list(mask[start:]) if mask else None


def edit(
    sample: Sample,
    text: str | None,
    same_message: bool,
    ids: list[int] | None,
    mask: list[int] | None,
    written: Any,
    context: float,
) -> None:
    """Take over what a step made of a response: ids with a mask, text after it, or a cut.

    Args:
        text: What its message says; None: the history before it was edited.
        same_message: Whether the next request goes on in its message.
        ids: A beginning of what was sampled, and what the scheduler put after it. None: the text says it.
        mask: 1 for what is trained. None: what was sampled.
    """
    turn, sampled, kept = sample.turn, sample.turn.token_ids, None
    if mask and not ids:
        raise SchedulerFailure("response_loss_mask was returned without response_token_ids. Return both.")
    if ids:
        ids, mask = without_prefill(sample, list(ids), mask)
        same = num_same(ids, sampled)
        size = num_ids(written.tokenizer, len(written.tokenizer))
        if (unknown := first_unknown(ids[same:], size)) is not None:
            raise SchedulerFailure(
                f"response_token_ids has {unknown!r:.100} after what was sampled, expected a flat list of numbers "
                f"from 0 to {size - 1}, the ids of the tokenizer."
            )
        if sampled and not (same or mask):
            raise SchedulerFailure(
                f"response_token_ids begins with {ids[0]}, expected {sampled[0]}, as what was sampled. For ids of the "
                "scheduler's own, return a response_loss_mask of zeros."
            )
        kept = checked_mask(ids, mask) if mask else [1] * same + [0] * (len(ids) - same)
        check_sampled(ids, kept, same, len(ids))
        text = sample.text if text is None else text
    elif text is None or sample.is_read:
        return
    elif text.startswith(sample.text):
        ids, same = sampled, len(sampled)
    elif not same_message and text.strip() == sample.text.strip():
        return
    elif text.startswith(sample.start) and (same_message or sample.bare.startswith(text)):
        same = num_kept(sampled, text[len(sample.start) :], written.text)
        ids, sample.dropped = sampled[:same], not same
    else:
        return
    if sample.is_read:
        kept = [*kept[:same], *[0] * (len(sampled) - same)]
        turn.mask = kept if 0 in kept else None
    elif not sample.dropped:
        said = turn.text if same == len(sampled) else written.text(sampled[:same])
        sample.turn = dataclasses.replace(
            turn,
            token_ids=sampled[:same],
            logprobs=turn.logprobs and turn.logprobs[:same],
            mask=kept[:same] if kept and 0 in kept[:same] else None,
            text=said,
            calls=turn.calls if said == turn.text else [],
            answer=turn.answer if said == turn.text else None,
        )
        sample.bare, sample.tail = sample.start + said, ids[same:]
        # A text may be cut inside a token: then the ids say more than it does, and they are what is read.
        spoken = sample.bare + written.text(sample.tail)
        if text.startswith(spoken):
            sample.tail = sample.tail + own_ids(text[len(spoken) :], written, context)
        sample.text = text


def choose(group: list[Sample], ids: list[int], mask: list[int] | None, ends: frozenset[int]) -> None:
    """Train the given ids of a message under the mask, and drop sampled ids that they leave out. Its records stay.

    An end of turn may be left out, and what was sampled last. Raises `SchedulerFailure` if any other id differs, or
    one of mask 1 was not sampled.
    """
    ids, mask = without_prefill(group[0], ids, mask)
    place, kept = 0, checked_mask(ids, mask) if mask else [1] * len(ids)
    for sample, later in zip(group, [*group[1:], None]):
        chosen = []
        for token in sample.turn.token_ids:
            there = place < len(ids) and ids[place] == token
            if not there and place < len(ids) and token not in ends:
                raise SchedulerFailure(
                    f"response_token_ids has {ids[place]} at {place}, expected {token}: the ids that were sampled, "
                    "and those that the scheduler put after them."
                )
            chosen.append(kept[place] if there else 0)
            place += there
        size = num_same(ids[place:], later.added if later else sample.tail)
        if mask:
            check_sampled(ids, kept, place, place + size)
        place += size
        sample.turn.mask, sample.masked = chosen if 0 in chosen else None, bool(mask)
    if mask:
        check_sampled(ids, kept, place, len(ids))
