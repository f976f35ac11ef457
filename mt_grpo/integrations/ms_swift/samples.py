"""A scheduler's responses, and which one a request goes on from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from mt_grpo.conversation.formats.control_tokens import placeholders_of
from mt_grpo.conversation.tools.results import cut_far_beyond
from mt_grpo.conversation.turn_lists import first_unknown, num_ids
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure, num_same
from mt_grpo.integrations.ms_swift.messages import Key, keys_of
from mt_grpo.integrations.session import Sampled
from mt_grpo.rollout import Message


@dataclass
class Sample(Sampled):
    """A response, and what the scheduler made of its message."""

    key: str  # the only one of all conversations
    tools: str  # of the request, as JSON
    start: str  # what its message says before it
    is_cut: bool = False  # it goes on in the parent's message, of which only the beginning is left
    behind: list[int] = field(default_factory=list)  # ids that the scheduler put between the parent's and its own
    bare: str = ""  # what its message says with it
    text: str = ""  # the same, with what the scheduler put behind
    tail: list[int] = field(default_factory=list)  # the ids of that
    is_read: bool = False  # by a later request
    is_last: bool = False  # it is of the last message of an output
    masked: bool = False  # the scheduler gave a mask for it
    weight: bool | None = None  # whether its message says that it is trained
    taken_back: bool = False  # the scheduler cut all of it

    @property
    def before(self) -> list[Key]:
        """The messages before the sample's own message."""
        return keys_of(self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages)

    @property
    def ids(self) -> list[int]:
        """The sampled ids, followed by those that the scheduler appended."""
        return self.turn.token_ids + self.tail


class GoesOn(NamedTuple):
    """How a request goes on from a response."""

    parent: Sample
    said: list[Message]  # behind its message
    kept: int  # how many of its ids are there
    with_tail: bool  # whether what the scheduler put behind is there
    behind: str  # what it put behind now

    @property
    def is_whole(self) -> bool:
        """Whether all of the response is there as it was, so that its record may go on."""
        return self.kept == len(self.parent.turn.token_ids) and (self.with_tail or not self.parent.tail)


def goes_on(
    samples: list[Sample], messages: list[Message], tools: str, text_of: Callable[[list[int]], str]
) -> GoesOn | None:
    """The response whose message a request repeats, as it is, with more behind, or (in the same message) cut.

    None where there is none: the request begins a record. A message of the assistant that was not sampled here is one
    that the policy never wrote.
    """
    keys = keys_of(messages)
    place = max((k for k, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if place is None:
        return None
    said, text = messages[place + 1 :], messages[place]["content"]
    found: list[tuple[tuple, GoesOn]] = []
    for sample in samples:
        if sample.tools != tools or sample.before != keys[:place]:
            continue
        for whole, with_tail in ((sample.text, True), (sample.bare, False)):
            size, same = len(sample.turn.token_ids), whole.strip() == text.strip() if said else whole == text
            if same or (whole and text.startswith(whole)):
                behind = "" if same else text[len(whole) :]
                rank = (2, same, len(whole), not sample.is_read, with_tail, -sample.number)
                found.append((rank, GoesOn(sample, said, size, with_tail, behind)))
        if not said and text.startswith(sample.start):
            kept = num_kept(sample.turn.token_ids, text[len(sample.start) :], text_of)
            if kept:
                whole = sample.start + text_of(sample.turn.token_ids[:kept])
                rank = (1, False, len(whole), not sample.is_read, False, -sample.number)
                found.append((rank, GoesOn(sample, said, kept, False, text[len(whole) :])))
    return max(found, key=lambda each: each[0])[1] if found else None


def num_kept(ids: list[int], text: str, text_of: Callable[[list[int]], str]) -> int:
    """How many of the ids a text begins with.

    What a token holds beyond that is not kept. A beginning of the ids may end inside a character.

    >>> num_kept([104, 105, 33], "hi there", lambda ids: bytes(ids).decode(errors="replace"))
    2
    >>> num_kept([*"😀a".encode()], "😀b", lambda ids: bytes(ids).decode(errors="replace"))
    4
    """

    def fits(size: int) -> bool:
        return text.startswith(text_of(ids[:size]).rstrip("\N{REPLACEMENT CHARACTER}"))

    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    while low and not (text_of(ids[:low]) and text.startswith(text_of(ids[:low]))):
        low -= 1
    return low


def messages_of(sample: Sample) -> list[list[Sample]]:
    """The responses up to one, in the messages of the assistant that they are parts of."""
    chain = [sample]
    while (earlier := one_before(chain[0])) is not None:
        chain.insert(0, earlier)
    groups: list[list[Sample]] = []
    for each in chain:
        if groups and not each.said and not each.is_cut:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def one_before(sample: Sample) -> Sample | None:
    """The response before one in its conversation. One that it cuts is none of it: it may be another one's."""
    parent = sample.parent
    if parent is None or not sample.is_cut:
        return parent
    while parent.parent is not None and not parent.said and not parent.is_cut:
        parent = parent.parent
    return parent.parent if parent.said else one_before(parent)


# What a scheduler makes of a response: ids with a mask, a text behind it, a cut.
#
# INVARIANT: a response that a later request has read keeps its ids. Only its mask may change.


def without_turns(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A scheduler's own text in the assistant's message, in which special tokens are broken: none ends the turn.

    Its tags, such as those of thinking, stay tokens.
    """
    special = [*tokenizer.all_special_tokens, *placeholders_of(tokenizer)]
    special = sorted(map(re.escape, special), key=len, reverse=True)
    return re.sub("|".join(special), lambda found: f"{found[0][0]} {found[0][1:]}", text) if special else text


def revise(sample: Sample, text: str, same_message: bool, written: Any, context: float) -> None:
    """Have a response's message say another text, without ids for it.

    One that a request has read stays: the next request begins a record.

    Args:
        sample: The response.
        text: What its message says now.
        same_message: Whether the next request goes on in it.
        written: The tool format.
        context: Of the model, in tokens.
    """
    if sample.is_read:
        return
    if text.startswith(sample.text):
        put_behind(sample, text, written, context)
    elif text.startswith(sample.start) and (same_message or sample.bare.startswith(text)):
        ids = sample.turn.token_ids
        kept = num_kept(ids, text[len(sample.start) :], written.text)
        if not kept:
            sample.taken_back = True
            return
        logprobs, mask = sample.turn.logprobs, sample.turn.mask
        sample.turn = dataclasses.replace(
            sample.turn,
            token_ids=ids[:kept],
            logprobs=logprobs and logprobs[:kept],
            mask=mask and mask[:kept],
            text=written.text(ids[:kept]),
            calls=[],
            answer=None,
        )
        sample.bare = sample.text = sample.start + sample.turn.text
        sample.tail = []
        put_behind(sample, text, written, context)


def put_behind(sample: Sample, text: str, written: Any, context: float) -> None:
    """What a text says behind a response becomes part of its message, as ids that are read, or fill the context."""
    behind = text[len(sample.text) :]
    if behind:
        readable = cut_far_beyond(without_turns(behind, written.tokenizer), context, written.tokenizer)
        sample.tail = sample.tail + written.text_ids(readable)
        sample.text = text


def keep(
    sample: Sample,
    text: str,
    ids: list[int],
    mask: list[int],
    logprobs: list[float] | None,
    written: Any,
    context: float,
) -> None:
    """Have a response's message end with these ids. Raises `SchedulerFailure` where one of mask 1 was not sampled.

    Args:
        sample: The response. One that a request has read gets a mask, and keeps its ids.
        text: What its message says. What the ids do not say of it stands behind them.
        ids: A beginning of what was sampled, and what the scheduler put behind.
        mask: 1 for what is trained.
        logprobs: Of the ids with mask 1; None: as they were sampled.
        written: The tool format.
        context: Of the model, in tokens.
    """
    ids, mask = without_prompt(sample, ids, mask)
    sampled, known = sample.turn.token_ids, sample.turn.logprobs
    same = num_same(ids, sampled)
    if any(mask[same:]):
        raise not_sampled(ids, mask, same, len(sampled))
    size = num_ids(written.tokenizer)
    if (unknown := first_unknown(ids[same:], size)) is not None:
        raise SchedulerFailure(
            f"response_token_ids has the id {unknown!r:.100} behind what was sampled, expected numbers from 0 to "
            f"{size - 1}, the ids of the tokenizer."
        )
    known = known and known[:same]
    if logprobs is not None and known is not None:
        given = iter(logprobs)
        known = [next(given) if one else logprob for one, logprob in zip(mask, known)]
    kept = mask[:same] if 0 in mask[:same] else None
    if sample.is_read:
        kept = [*mask[:same], *[0] * (len(sampled) - same)]
        sample.turn.mask = kept if 0 in kept else None
        return
    said = sample.turn.text if same == len(sampled) else written.text(sampled[:same])
    sample.turn = dataclasses.replace(sample.turn, token_ids=sampled[:same], logprobs=known, mask=kept, text=said)
    sample.tail, sample.bare = ids[same:], sample.start + said
    spoken = sample.bare + written.text(ids[same:])
    # A text may be cut inside a token: then the ids say more than it does, and they are what is read.
    sample.text = spoken if text.startswith(spoken) else text
    put_behind(sample, text, written, context)


def without_prompt(sample: Sample, ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    """Ids without those in front that the generation prompt has already, such as an opened thinking's."""
    sampled, read = sample.turn.token_ids, sample.prompt_ids
    if ids[: len(sampled)] == sampled[: len(ids)]:
        return ids, mask
    most = next((k for k, one in enumerate(mask) if one), len(mask))
    same = next((size for size in range(most, 0, -1) if read[-size:] == ids[:size]), 0)
    return ids[same:], mask[same:]


def not_sampled(ids: list[int], mask: list[int], place: int, size: int) -> SchedulerFailure:
    """The error for an id that may not be trained: the first one with mask 1 from a place on."""
    place += mask[place:].index(1)
    return SchedulerFailure(
        f"response_loss_mask is 1 for id {ids[place]} at {place}, which the policy did not sample: the response has "
        f"{size} ids. Expected 0 for all that the scheduler adds."
    )


def choose(group: list[Sample], ids: list[int], given: list[int] | None, ends: frozenset[int]) -> None:
    """Have these ids of a message be trained as the mask says, and what they leave out not. Its records stay.

    Left out may be an end of turn, and what was sampled last. Raises `SchedulerFailure` for any other difference.

    Args:
        group: The responses of the message.
        ids: What an output says that it consists of.
        given: 1 for what is trained; None: all of them that were sampled.
        ends: The ids that end a turn.
    """
    ids, mask = without_prompt(group[0], ids, given or [1] * len(ids))
    place = 0
    for sample, later in zip(group, [*group[1:], None]):
        chosen = []
        for token in sample.turn.token_ids:
            there = place < len(ids) and ids[place] == token
            if not there and place < len(ids) and token not in ends:
                raise SchedulerFailure(
                    f"response_token_ids has {ids[place]} at {place}, expected {token}: the ids that were sampled, "
                    "and those that the scheduler put behind them."
                )
            chosen.append(mask[place] if there else 0)
            place += there
        same = num_same(ids[place:], later.behind if later else sample.tail)
        if given and any(mask[place : place + same]):
            raise not_sampled(ids, mask, place, len(sample.turn.token_ids))
        place += same
        sample.turn.mask = chosen if 0 in chosen else None
    if given and any(mask[place:]):
        raise not_sampled(ids, mask, place, len(group[-1].turn.token_ids))
