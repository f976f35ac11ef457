"""A scheduler's responses, and which one a request goes on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mt_grpo.adapters.swift_messages import Key, keys_of
from mt_grpo.rollout import Message, Turn


@dataclass
class Sample:
    """A response, and what the scheduler made of its message."""

    key: str  # the only one of all conversations
    number: int  # of the request
    messages: list[Message]  # of the request
    tools: str  # of the request, as JSON
    start: str  # what its message says before it
    prompt_ids: list[int]  # all that the model read
    turn: Turn
    parent: Sample | None = None  # the one that the request goes on from
    fresh: list[int] | None = None  # of prompt_ids those behind the parent's; None: it begins a record
    num_new: int = 0  # of prompt_ids those that were not read before
    said: list[Message] = field(default_factory=list)  # messages behind the parent's
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
        """What was said before its message."""
        return keys_of(self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages)

    @property
    def ids(self) -> list[int]:
        """What was sampled, and what the scheduler put behind it."""
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
