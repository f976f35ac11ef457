"""The dataclasses of a conversation, and the ids, masks and messages that are derived from them."""

from __future__ import annotations

import itertools
import typing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Why a conversation ended; logged as `stop/<reason>`."""

    ANSWERED = "answered"  # the model closed an <answer>
    NO_TOOL_CALL = "no_tool_call"  # the model ended its turn with neither a call nor an answer
    MAX_TURNS = "max_turns"  # the model called a tool after max_env_steps observations
    MAX_TOKENS = "max_tokens"  # max_completion_length is used up, or max_turn_tokens outside a call
    CONTEXT_LENGTH = "context_length"  # the model's context is full


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model. `error` is the mistake for which it cannot be run; the model reads this text."""

    name: str | None
    arguments: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """What a call gave, as text that the model reads."""

    text: str
    error: str | None = None  # "call" (the policy's mistake), "tool" (it raised), "timeout"
    seconds: float = 0.0


class Room(typing.NamedTuple):
    """Tokens that are left."""

    completion: float  # of max_completion_length
    context: float  # of the model's context

    @property
    def tokens(self) -> float:
        """Of both."""
        return min(self)


@dataclass(frozen=True)
class Generation:
    """One sampled continuation: the ids, and their logprobs under the sampling distribution (None: not known)."""

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str  # "stop" (end-of-turn token or stop text) or "length"


@dataclass
class Turn:
    """One turn of the model, and the observation that the environment returned."""

    token_ids: list[int]  # as sampled, cut after the token that completes the turn
    logprobs: list[float] | None
    text: str
    finish_reason: str
    tool_call: ToolCall | None = None
    observation: str | None = None  # the text that the model reads, without the tags
    observation_ids: list[int] = field(default_factory=list)  # tokens of end of turn, message and generation prompt
    error: str | None = None  # "call" (the policy's mistake), "tool" (the tool raised), "timeout"
    state_key: Any = None  # key of the state before the turn (`gigpo`); None: the whole conversation so far
    seconds: float = 0.0  # of generation
    tool_seconds: float = 0.0


def result_message(observation: str) -> str:
    """The content of the environment's message. Its role is `user`, as in the paper."""
    return f"<result>\n{observation}\n</result>"


def join(parts: typing.Iterable[list]) -> list:
    """The lists as one list."""
    return list(itertools.chain.from_iterable(parts))


@dataclass
class Rollout:
    """One conversation. All ids and masks are derived from the turns, so they cannot disagree.

    >>> r = Rollout([], [1, 2, 3], turns=[Turn([10, 11], [-.1, -.2], "", "stop", observation_ids=[20]),
    ...                                   Turn([30], [-.3], "", "stop")])
    >>> r.completion_ids, r.loss_mask, r.turn_ids, r.logprobs
    ([10, 11, 20, 30], [1, 1, 0, 1], [0, 0, -1, 1], [-0.1, -0.2, 0.0, -0.3])
    """

    prompt_messages: list[dict[str, str]]
    prompt_ids: list[int]
    index: int = 0  # position in the whole batch: rank * B + i
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason | None = None  # None: the conversation still runs
    policy_version: int = 0  # number of weight changes (optimizer steps, loads) before its first turn

    # `join` runs in C. These properties must be fast: every step reads them for every token of the batch.

    @property
    def completion_ids(self) -> list[int]:
        """The ids of all turns and observations, (C,)."""
        return join(part for t in self.turns for part in (t.token_ids, t.observation_ids))

    @property
    def loss_mask(self) -> list[int]:
        """1 for ids that the policy sampled, 0 for observations, (C,)."""
        return join(part for t in self.turns for part in ([1] * len(t.token_ids), [0] * len(t.observation_ids)))

    @property
    def turn_ids(self) -> list[int]:
        """The index of the turn that sampled an id, -1 for observations, (C,)."""
        return join(
            part for k, t in enumerate(self.turns) for part in ([k] * len(t.token_ids), [-1] * len(t.observation_ids))
        )

    @property
    def logprobs(self) -> list[float] | None:
        """The logprobs of the sampled ids, 0.0 for observations, (C,); None if those of any turn are not known."""
        if any(turn.logprobs is None for turn in self.turns):
            return None
        return join(part for t in self.turns for part in (t.logprobs, [0.0] * len(t.observation_ids)))

    @property
    def messages(self) -> list[dict[str, str]]:
        """The completion as messages: assistant turns, and observations as the user messages that the model saw."""
        messages = []
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.text})
            if turn.observation is not None:
                messages.append({"role": "user", "content": result_message(turn.observation)})
        return messages
