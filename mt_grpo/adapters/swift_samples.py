"""A scheduler's responses: what each was sampled behind, and what the scheduler made of its message."""

from __future__ import annotations

from dataclasses import dataclass, field

from mt_grpo.adapters.swift_messages import Key, keys_of
from mt_grpo.rollout import Message, Turn


@dataclass
class Sample:
    """A response, and what the scheduler made of its message."""

    number: int
    messages: list[Message]  # of the request
    start: str  # what its message says before it
    prompt_ids: list[int]  # all that the model read
    turn: Turn
    parent: Sample | None = None  # the one that the request goes on from
    fresh: list[int] | None = None  # of prompt_ids those behind the parent's; None: it begins a record
    said: list[Message] = field(default_factory=list)  # messages behind the parent's
    text: str = ""  # what its message says, with what the scheduler put behind
    tail: list[int] = field(default_factory=list)  # the ids of that
    is_read: bool = False  # by a later request
    driven: bool = False  # it is a turn of `drive`, and not of a scheduler's own `run`
    is_last: bool = False  # it is of the last message of an output
    weighed: bool = False  # its message says itself whether it is trained
    masked: bool = False  # the scheduler gave a mask for it

    @property
    def before(self) -> list[Key]:
        """What was said before its message."""
        return keys_of(self.messages[:-1] if self.goes_on else self.messages)

    @property
    def goes_on(self) -> bool:
        """Whether its message had begun before."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def ids(self) -> list[int]:
        """What was sampled, and what the scheduler put behind it."""
        return self.turn.token_ids + self.tail


def messages_of(sample: Sample) -> list[list[Sample]]:
    """The responses up to one, in the messages of the assistant that they are parts of."""
    chain = [sample]
    while chain[0].parent is not None:
        chain.insert(0, chain[0].parent)
    groups: list[list[Sample]] = []
    for each in chain:
        if groups and not each.said and each.parent is not None:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups
