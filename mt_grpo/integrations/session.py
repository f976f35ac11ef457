"""One rollout whose requests come from a program, an agent or a scheduler. What it asks for becomes turns."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.conversation.formats.choose import HermesFormat
from mt_grpo.conversation.formats.control_tokens import cut_far_beyond
from mt_grpo.images.pictures import has_too_many
from mt_grpo.rollout import Context, Message, Origin, Rollout, StopReason, Turn


class StopsAt:
    """A backend whose samples also end at texts. A prefix of a sample is still on-policy."""

    def __init__(self, llm: Any, stops: tuple[str, ...], text_of: Callable[[list[int]], str]):
        self._llm, self._stops, self._text_of = llm, stops, text_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(self, prompt_ids: list[int], max_tokens: int, sampling_params: dict, index: int = 0) -> Any:
        """Sample one continuation, cut after the token that completes the first stop text."""
        params = {**sampling_params, "stop": [*sampling_params.get("stop", []), *self._stops]}
        sampled = await self._llm.generate(prompt_ids, max_tokens, params, index)
        ids = sampled.token_ids

        def has_stop(size: int) -> bool:
            text = self._text_of(ids[:size])
            return any(stop in text for stop in self._stops)

        size = bisect.bisect_left(range(len(ids) + 1), True, key=has_stop)
        if size > len(ids):
            return sampled
        logprobs = sampled.logprobs and sampled.logprobs[:size]
        return dataclasses.replace(sampled, token_ids=ids[:size], logprobs=logprobs, finish_reason="stop")


def tools_by_name(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """An agent's tools as a tool format takes them: their schemas, as they were sent."""
    functions = [tool["function"] for tool in tools]
    return {each["name"]: SimpleNamespace(json_schema=each, origin=Origin.AGENT) for each in functions}


def ids_of_prompt(
    env: Any, messages: list[Message], tokenizer: PreTrainedTokenizerBase, tools: dict[str, Any], context: float
) -> list[int]:
    """Ids of a prompt. Of one that is surely longer than the context (in tokens), only those of a longer prefix."""
    if len(str([messages, tools])) > 5 * context:  # megabytes take seconds, in which no conversation goes on
        arguments = {**env.format_of(tokenizer).prompt(messages, tools), "tokenize": False}
        text = cut_far_beyond(tokenizer.apply_chat_template(**arguments), context, tokenizer)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return env.prompt_ids(messages, tokenizer, tools)


async def end_all(tasks: Iterable[asyncio.Future]) -> None:
    """Cancel tasks, and wait until they are over."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Sampled:
    """The sample for a request: a node in the tree of a rollout's requests."""

    number: int  # in the rollout, by the order of the requests
    messages: list[Message]  # of the request
    prompt_ids: list[int]  # all that the model read
    turn: Turn
    parent: Sampled | None  # the one that the request goes on from
    said: list[Message]  # messages behind the parent's
    fresh: list[int] | None  # of prompt_ids those behind the parent's ids; None: a record begins
    num_new: int  # of prompt_ids those that were not read before


class RolloutSession:
    """The policy's side of a rollout: its room, its samples, and how it ended.

    Args:
        env: The conversations, with their limits and their tool format.
        rollout: What is filled in the end.
        sampling_params: The policy's. A request changes nothing but `stop` and `max_tokens`.

    Attributes:
        samples: What was sampled, in the order of the requests.
        stop_reason: Why no further request is answered. None: the rollout goes on.
        over: Set where the program is not waited for any longer, or only for a while.
        failure: What the trainer must hear of: the server is lost, or the set-up is wrong.
        closed: Whether the program is over, so that nothing more is sampled.
    """

    def __init__(self, env: Any, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None):
        self.env, self.rollout, self.llm, self.params = env, rollout, llm, sampling_params or {}
        self.tokenizer = env._tokenizer(llm)
        self.format: HermesFormat = env.format_of(self.tokenizer)
        self.samples: list[Any] = []  # each a `Sampled`
        self.stop_reason: StopReason | None = None
        self.over = asyncio.Event()
        self.failure: Exception | None = None
        self.closed = False
        self._num_requests, self._num_calls = 0, 0
        self._waited, self._in_flight, self._since, self._began = 0.0, 0, 0.0, time.monotonic()

    @property
    def policy_seconds(self) -> float:
        """Seconds in which at least one request was in flight."""
        return self._waited + (time.monotonic() - self._since if self._in_flight else 0.0)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last answer, or since the beginning; 0 while a request is in flight."""
        return 0.0 if self._in_flight else time.monotonic() - self._began

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Context manager that counts a request as running, for the idle timer."""
        if not self._in_flight:
            self._since = time.monotonic()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._began = time.monotonic()
                self._waited += self._began - self._since

    def stop(self, reason: StopReason) -> None:
        """Answer no further request. The first reason counts."""
        self.stop_reason = self.stop_reason or reason

    @property
    def context(self) -> float:
        """The length of the model's context in tokens."""
        return self.env._context(self.llm)

    def left(self, num_new: int) -> int:
        """How many tokens may be sampled behind so many new ones.

        max_completion_length counts sampled tokens, and what was newly read before them.
        """
        spent = sum(each.num_new + len(each.turn.token_ids) for each in self.samples)
        return self.env.max_completion_length - spent - num_new

    def count_calls(self, prompt_ids: list[int], count: int = 1) -> StopReason | None:
        """Count calls that read these ids. Where there are none left, or no context, why: then none is counted."""
        if len(prompt_ids) >= self.context or has_too_many(prompt_ids):
            return StopReason.CONTEXT_LENGTH
        if self._num_calls + count > self.env.max_model_calls:
            return StopReason.MAX_TURNS
        self._num_calls += count
        return None

    async def sample(
        self,
        messages: list[Message],
        prompt_ids: list[int],
        num_new: int,
        most: int | None,
        tools: dict[str, Any],
        stops: tuple[str, ...],
    ) -> Turn | None:
        """A turn in the room that is left. Requests at the same time share it: the last one may be cut.

        Args:
            messages, prompt_ids: What the model reads.
            num_new: Of these ids, those that were not read before.
            most: Tokens of the turn; None: all that are left.
            tools: By name, of the request.
            stops: Texts that end the turn, too.

        Returns:
            None, and a stop reason, where nothing is left.
        """
        env, rollout = self.env, self.rollout
        if (left := self.left(num_new)) > 0:
            # What is not in the room counts as spent, so that `sample_turn` keeps to it.
            edited = Context(messages, prompt_ids, env.max_completion_length - min(left, most or left))
            asked = Rollout(
                [], [], rollout.index, row=rollout.row, environment=rollout.environment, tools=tools, edited=edited
            )
            llm = StopsAt(self.llm, stops, self.format.text) if stops else self.llm
            turn = await env.sample_turn(asked, llm, self.params)
            left = self.left(num_new)
            if len(turn.token_ids) <= left:
                return turn
        if left <= 0:
            self.stop(StopReason.MAX_TOKENS)
            return None
        turn.token_ids, turn.logprobs = turn.token_ids[:left], turn.logprobs and turn.logprobs[:left]
        turn.text, turn.calls, _, turn.open_thinking = self.format.parse(turn.token_ids, prompt_ids, tools)
        turn.finish_reason, turn.answer = "length", None
        return turn


def fill_turns(rollout: Rollout, samples: list[Any]) -> None:
    """Write what was sampled into a rollout as its turns, in the order of the requests.

    INVARIANT: a turn goes on in the record of its parent where `fresh` are the ids between them: at most one for each
    parent. Else it begins a record with all that it read. So each sampled token is trained once, in its own context.
    """
    number = {id(each): k for k, each in enumerate(samples)}
    for k, each in enumerate(samples):
        each.turn.context, each.turn.after = None, None
        if each.fresh is not None:
            each.turn.after = number[id(each.parent)]
            each.parent.turn.observation_ids, each.parent.turn.messages = each.fresh, each.said
        elif k > 0:
            each.turn.context = Context(each.messages, each.prompt_ids)
        else:
            rollout.prompt_ids, rollout.prompt_messages = each.prompt_ids, list(each.messages)
            rollout.first_messages = list(each.messages)
    rollout.turns = [each.turn for each in samples]
