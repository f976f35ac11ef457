"""The data types of a conversation (turns, calls, results, rollouts), and the protocols of its other side."""

from __future__ import annotations

import array
import hashlib
import itertools
import typing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

Message = dict[str, Any]  # with `role` and `content`, as chat templates take them
# The roles of OpenAI's API, and those of the templates of Llama (`ipython`), GLM (`observation`) and Gemma (`model`).
ROLES = frozenset("system developer user assistant tool function ipython observation environment model".split())


class StopReason(StrEnum):
    """Why a conversation ended; logged as `stop/<reason>`."""

    ANSWERED = "answered"  # a turn without a call gave an answer
    NO_TOOL_CALL = "no_tool_call"  # the model ended its turn with neither a call nor an answer
    MAX_TURNS = "max_turns"  # a further call or reply after max_env_steps observations
    MAX_TOKENS = "max_tokens"  # the budget of the completion, or of a turn without a call, has no room to answer
    CONTEXT_LENGTH = "context_length"  # the model's context is full
    ENVIRONMENT_STOP = "environment_stop"  # the environment ended the conversation
    ENVIRONMENT_ERROR = "environment_error"  # the environment raised or hung; the rollout is not trained on
    AGENT_DONE = "agent_done"  # the agent returned
    AGENT_ERROR = "agent_error"  # the agent raised, or never called the model; the rollout is not trained on
    AGENT_TIMEOUT = "agent_timeout"  # the agent took longer than agent_timeout; scored as what is truncated


FAILURES = (StopReason.ENVIRONMENT_ERROR, StopReason.AGENT_ERROR)


class Origin(StrEnum):
    """The origin of a message. Together with its role it decides which control tokens its texts may contain."""

    OUTSIDE = "outside"  # said while the run goes: an environment's replies, a tool's description and results
    DATA = "data"  # the prompt of a data set: the operator's, who may show tags of formats
    AGENT = "agent"  # an agent's request: read as an inference server would read it


@dataclass(frozen=True)
class ToolCall:
    """One tool call that the model wrote. `error` says why it cannot be read, and its result why it cannot run."""

    name: str | None
    arguments: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool call, as the model reads it. A tool may return one to give the calling turn a reward."""

    text: str
    error: str | None = None  # "call" (the policy's mistake), "tool" (it raised), "timeout"
    seconds: float = 0.0
    reward: float | None = None  # added to the reward of the turn that called
    pictures: tuple[Any, ...] = field(default=(), repr=False, compare=False)  # the images that `text` refers to


@dataclass
class Reply:
    """The reply of an environment to a turn. At most one of the first four fields is set.

    If none is, the results of the turn's calls are appended; without a call the conversation ends.
    """

    messages: list[Message] | None = None  # what the model reads next, after the results
    continuation: str | None = None  # appended to the turn's own text, which the model then continues
    history: list[Message] | None = None  # replaces the whole conversation so far
    stop: bool = False  # ends the conversation
    reward: float | None = None  # the reward of this turn
    info: dict[str, Any] = field(default_factory=dict)  # for rewards and the log


@dataclass(frozen=True)
class Generation:
    """One sampled continuation: its token ids, and their logprobs under the sampling distribution (None: unknown)."""

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str  # "stop" (end-of-turn token or stop text) or "length"
    saw: bytes | None = None  # `hash_of_ids` of the prompt that the backend reports to have read
    policy_versions: tuple[int, int] | None = None  # the oldest and the newest weights that may have sampled it


class Parsed(typing.NamedTuple):
    """The text, calls and answer that a tool format reads in a turn."""

    text: str  # without the token that ended the turn
    calls: list[ToolCall] = []
    answer: str | None = None  # of a turn without a call
    open_thinking: bool = False  # the turn ended inside its thinking


class Context(typing.NamedTuple):
    """The messages and ids that the model reads before a turn, if the history was edited before it."""

    messages: list[Message]
    ids: list[int]  # generation prompt included
    new_tokens: int = 0  # of them, those that max_completion_length counts


@dataclass
class Turn:
    """One turn of the model, with its calls and their results, and the environment's reply."""

    token_ids: list[int]  # as sampled, truncated after the token that completes the turn
    logprobs: list[float] | None
    text: str
    finish_reason: str
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)  # one per call that was answered, as the model reads them
    answer: str | None = None
    messages: list[Message] = field(default_factory=list)  # what was appended after the turn
    continuation: str | None = None  # text that the environment appended to the turn's own; the next turn continues it
    observation_ids: list[int] = field(default_factory=list)  # end of turn, messages, generation prompt
    context: Context | None = None  # None: the model read all that was before this turn, or up to the turn `after`
    after: int | None = None  # the turn that this one goes on from; None: the one before it
    trained: bool = True  # False: its tokens are only read, like those of observations
    mask: list[int] | None = None  # per token 1, or 0 for one that is only read; None: all ones
    went_on: bool = False  # the other side replied to it or continued it, in any record
    reward: float | None = None  # from the environment's reply
    info: dict[str, Any] = field(default_factory=dict)  # from the environment's replies
    state_key: Any = None  # names the state in which the turn began (`gigpo`); None: the whole conversation so far
    open_thinking: bool = False
    seconds: float = 0.0  # of generation
    generations: list[Generation] = field(default_factory=list, repr=False, compare=False)  # its samples
    tools: list[dict[str, Any]] | None = None  # that an agent offered, as JSON schemas, where its record begins

    @property
    def tool_call(self) -> ToolCall | None:
        """The turn's first tool call, None without a call."""
        return self.calls[0] if self.calls else None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The valid calls in the form of TRL and of chat templates: dicts with `type` and `function`."""
        calls = [call for call in self.calls if call.name is not None and call.error is None]
        return [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]

    @property
    def messages_with_results(self) -> list[Message]:
        """The messages after the turn, with all results in messages of role `tool` (`xml` writes them as the user)."""
        shown = list(self.messages)
        for k, (message, call, result) in enumerate(zip(self.messages, self.calls, self.results)):
            if message["role"] == "user" and result.text in message["content"]:
                shown[k] = {"role": "tool", "name": call.name or "unknown", "content": result.text}
        return shown

    @property
    def observation(self) -> str | None:
        """The text that the model reads after this turn: the results without tags, otherwise the messages."""
        texts = [result.text for result in self.results] or [str(message["content"]) for message in self.messages]
        return "\n".join(texts) if self.messages else None

    @property
    def has_observation(self) -> bool:
        """Whether a call was answered, or the other side replied to the turn or continued it, read or not."""
        return self.went_on or bool(self.results or self.messages or self.continuation)

    @property
    def error(self) -> str | None:
        """The first error among the turn's results: "call" (the policy's mistake), "tool" (it raised), "timeout"."""
        return next((result.error for result in self.results if result.error), None)

    @property
    def tool_seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    def per_token(self, value: int, masked: int) -> list[int]:
        """A number per sampled token: `value`, or `masked` if the token's mask is 0."""
        return [value] * len(self.token_ids) if self.mask is None else [value if one else masked for one in self.mask]


def join(parts: typing.Iterable[list]) -> list:
    """Concatenate lists into one list."""
    return list(itertools.chain.from_iterable(parts))


class TurnTokens:
    """Lists with one entry per token of the turns, (C,): sampled ids, and ids that were only read."""

    turns: list[Turn]
    numbers: list[int] | None = None  # of the turns in the rollout; None: 0, 1, ...

    @property
    def owners(self) -> list[int]:
        """One number per turn: its index in the rollout, or -1 if it is not trained on."""
        numbers = range(len(self.turns)) if self.numbers is None else self.numbers
        return [k if turn.trained else -1 for k, turn in zip(numbers, self.turns)]

    # `join` runs in C. These properties must be fast: every step reads them for every token of the batch.

    @property
    def completion_ids(self) -> list[int]:
        """The ids of all turns and observations, (C,)."""
        return join(part for t in self.turns for part in (t.token_ids, t.observation_ids))

    @property
    def loss_mask(self) -> list[int]:
        """1 for ids that the policy sampled, 0 for observations, (C,)."""
        turns = [(t.per_token(int(t.trained), 0), t.observation_ids) for t in self.turns]
        return join(part for sampled, read in turns for part in (sampled, [0] * len(read)))

    @property
    def turn_ids(self) -> list[int]:
        """The index of the rollout's turn that sampled an id, -1 for observations, (C,)."""
        turns = zip(self.owners, self.turns)
        return join(part for k, t in turns for part in (t.per_token(k, -1), [-1] * len(t.observation_ids)))

    @property
    def logprobs(self) -> list[float] | None:
        """The logprobs of the sampled ids, 0.0 for observations, (C,); None if those of any turn are not known."""
        if any(turn.logprobs is None for turn in self.turns):
            return None
        return join(part for t in self.turns for part in (t.logprobs, [0.0] * len(t.observation_ids)))


def with_turns(messages: list[Message], turns: list[Turn], begun: bool = True, for_trl: bool = False) -> list[Message]:
    """Append the messages of turns. A turn that continues the one before it is joined to the message of that one.

    `begun`: whether an assistant's message at the end of `messages`, which is not a prompt's, begins the first turn.
    `for_trl`: whether messages are in TRL's form, with `tool_calls` and results of role `tool`.

    >>> prompt = [{"role": "assistant", "content": "So"}]
    >>> [[m["content"] for m in with_turns(prompt, [Turn([1], None, " 4", "stop")], begun)] for begun in (True, False)]
    [['So 4'], ['So', ' 4']]
    """
    messages, goes_on = list(messages), begun
    for turn in turns:
        content, calls = turn.text + (turn.continuation or ""), turn.tool_calls if for_trl else []
        if messages and messages[-1]["role"] == "assistant" and goes_on:
            before = messages.pop()
            content = before["content"] + content
            calls = [*before.get("tool_calls", []), *calls] if for_trl else []
        messages.append({"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})
        messages += turn.messages_with_results if for_trl else turn.messages
        goes_on = turn.continuation is not None
    return messages


@dataclass(frozen=True)
class Record(TurnTokens):
    """One sequence of ids that the loss reads: turns that each go on from the one before.

    INVARIANT: `prompt_ids + completion_ids` is what the model saw and sampled. Every turn is in one record.
    """

    prompt_ids: list[int]
    turns: list[Turn]
    numbers: list[int] | None = None


@dataclass
class Rollout(TurnTokens):
    """One conversation. All ids and masks are derived from the turns, so they cannot disagree.

    >>> r = Rollout([], [1, 2, 3], turns=[Turn([10, 11], [-.1, -.2], "", "stop", observation_ids=[20]),
    ...                                   Turn([30], [-.3], "", "stop")])
    >>> r.completion_ids, r.loss_mask, r.turn_ids, r.logprobs
    ([10, 11, 20, 30], [1, 1, 0, 1], [0, 0, -1, 1], [-0.1, -0.2, 0.0, -0.3])
    >>> r.turns[0].mask, r.turns[1].context = [0, 1], Context([], [1, 2, 7])  # an edit before turn 1
    >>> r.turns.append(Turn([40], [-.4], "", "stop", after=0))  # two conversations by turns
    >>> [(record.prompt_ids, record.completion_ids, record.turn_ids) for record in r.records]
    [([1, 2, 3], [10, 11, 20, 40], [-1, 0, -1, 2]), ([1, 2, 7], [30], [1])]
    """

    prompt_messages: list[Message]
    prompt_ids: list[int]
    index: int = 0  # position in the whole batch, rank * B + i; only `place` changes it
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason | None = None  # None: still open
    policy_version: int = 0  # number of weight changes (optimizer steps, loads) when it began
    row: dict[str, Any] = field(default_factory=dict)  # the row of the dataset
    environment: Any = None  # this conversation's own instance, if it has one
    first_messages: list[Message] | None = None  # the prompt after the environment's `reset`
    reward: float | None = None  # the return value of the environment's `get_reward`
    tools: dict[str, Any] | None = None  # name -> function, with those of its environment; None: the tools of all
    edited: Context | None = None  # what the model reads next, if the history was edited after the last turn
    error: Exception | None = None  # from its environment, with `environment_error`, or from a too long prompt
    abandoned: bool = False  # a call into its environment was abandoned, and may still run
    given_up: list[Any] = field(default_factory=list, repr=False)  # futures of such calls, done when a call is over
    pictures: list[Any] = field(default_factory=list, repr=False, compare=False)  # the images of its messages
    rendered: Any = field(default=None, repr=False, compare=False)  # the `PromptCache` of its batch, None without one

    def __setattr__(self, name: str, value: Any) -> None:
        # A rollout with another one's index would wait for ever where a process generates for all of them at once.
        if name == "index" and "index" in self.__dict__:
            change = f"from {self.index} to {value!r:.100}"
            raise AttributeError(f"rollout.index is set by the trainer and cannot be changed {change}.")
        super().__setattr__(name, value)

    def place(self, index: int) -> None:
        """Set the rollout's position in the batch. Only the trainer calls this."""
        self.__dict__["index"] = index

    @property
    def failed(self) -> bool:
        """Whether the environment or agent failed, or the prompt fills the context. Then it is not trained on."""
        return self.stop_reason in FAILURES or (self.stop_reason == StopReason.CONTEXT_LENGTH and not self.turns)

    @property
    def records(self) -> list[Record]:
        """The records of the rollout, at least one. Each turn with a context of its own begins another one.

        INVARIANT: of all turns that go on from the same one, at most one has no such context.
        """
        chains, chain_of = [[]], []  # lists of numbers of turns; the one of each turn
        for k, turn in enumerate(self.turns):
            chain = chain_of[k - 1 if turn.after is None else turn.after] if k else chains[0]
            if turn.context is not None and k > 0:
                chains.append(chain := [])
            chain.append(k)
            chain_of.append(chain)
        prompts = [self.prompt_ids, *(self.turns[chain[0]].context.ids for chain in chains[1:])]
        return [Record(ids, [self.turns[k] for k in chain], chain) for ids, chain in zip(prompts, chains)]

    @property
    def messages(self) -> list[Message]:
        """The completion as messages: assistant turns, and what was appended after them, as the model saw it."""
        return with_turns([], self.turns)

    @property
    def completion(self) -> list[Message]:
        """The completion as reward functions get it, in TRL's form: with `tool_calls`, and results of role `tool`."""
        return with_turns([], self.turns, for_trl=True)

    @property
    def prefill(self) -> str:
        """The text that the next turn continues (`Reply.continuation`), empty if the turn begins a new message.

        >>> turns = [Turn([1], None, "So <answer>", "stop", continuation="It"), Turn([2], None, " is", "length")]
        >>> turns[1].continuation = " not "
        >>> Rollout([], [], turns=turns).prefill
        'So <answer>It is not '
        """
        text = ""
        for turn in reversed(self.turns):
            if turn.continuation is None:
                break
            text = turn.continuation + text
            if turn.calls:
                break
            text = turn.text + text
        return text

    @property
    def history(self) -> list[Message]:
        """The messages that the model reads next: all of them, or those since the history was edited."""
        if self.edited is not None:
            return list(self.edited.messages)
        first = max((k for k, turn in enumerate(self.turns) if turn.context is not None), default=None)
        if first is None:
            return with_turns(self.prompt_messages, self.turns, begun=False)
        return with_turns(self.turns[first].context.messages, self.turns[first:])

    @property
    def history_ids(self) -> list[int]:
        """The token ids that the model reads next: prompt and completion of the current record."""
        if self.edited is not None:
            return self.edited.ids
        record = self.records[-1]
        return record.prompt_ids + record.completion_ids

    @property
    def new_tokens(self) -> int:
        """Tokens that max_completion_length counts: sampled and newly read ones, but not an edited history."""
        contexts = [*(turn.context for turn in self.turns), self.edited]
        own = sum(len(turn.token_ids) + len(turn.observation_ids) for turn in self.turns)
        return own + sum(context.new_tokens for context in contexts if context is not None)


class Environment(Protocol):
    """The other side of one conversation. Every method may be async; all but `reset` are optional."""

    def reset(self, **row: Any) -> str | list | None:
        """Begin a conversation for a dataset row. Text extends the last message; messages replace the prompt."""

    def respond(self, rollout: Rollout, turn: Turn) -> Reply | None:
        """Reply to a turn whose calls have run. None: append its results, or end the conversation without a call."""

    def get_reward(self) -> float:
        """Return the outcome reward. Called once, after the conversation."""

    def conversation_over(self) -> None:
        """Called when the conversation is over. `most_conversations` of the class bounds how many are open at once."""

    def close(self) -> None:
        """Called after the rewards, whatever happened."""


class Backend(Protocol):
    """A generation backend: token ids in, sampled ids out."""

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None, index: int
    ) -> Generation:
        """Sample one continuation of at most `max_tokens` tokens. `index` is the position of the rollout."""


def id_hash(ids: list[int], state: Any = None) -> Any:
    """A hash of hashlib with 16 bytes, to which token ids are added, 8 bytes each. None: a new one."""
    state = state or hashlib.blake2b(digest_size=16)
    state.update(array.array("q", ids))
    return state


def hash_of_ids(ids: list[int]) -> bytes:
    """The hash of a list of ids, 16 bytes."""
    return id_hash(ids).digest()
