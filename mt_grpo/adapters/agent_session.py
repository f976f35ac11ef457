"""One rollout as the model that an agent talks to: what it asks is sampled, in its budget, and becomes turns."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from mt_grpo.adapters.agent_prompts import AgentPrompts, tools_by_name
from mt_grpo.adapters.chains import Chains, Completion, keys_of
from mt_grpo.adapters.chat_messages import Answer, ApiError, ModelRequest, tool_call
from mt_grpo.adapters.policy_time import PolicyTime
from mt_grpo.hermes import HermesFormat
from mt_grpo.rollout import Context, Message, Rollout, StopReason, Turn
from mt_grpo.tool_results import error_text

logger = logging.getLogger(__name__)


class StopsAt:
    """A backend whose samples end at texts, too. A prefix of a sample is still on-policy."""

    def __init__(self, llm: Any, stops: tuple[str, ...], text_of: Callable[[list[int]], str]):
        self._llm, self._stops, self._text_of = llm, stops, text_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(self, prompt_ids: list[int], max_tokens: int, sampling_params: dict, index: int = 0) -> Any:
        """Sample one continuation, cut behind the token that completes the first stop text."""
        params = {**sampling_params, "stop": [*sampling_params.get("stop", []), *self._stops]}
        sampled = await self._llm.generate(prompt_ids, max_tokens, params, index)
        ids = sampled.token_ids
        if not self._ends(ids):
            return sampled
        size = 1 + bisect.bisect_left(range(1, len(ids) + 1), True, key=lambda size: self._ends(ids[:size]))
        logprobs = sampled.logprobs and sampled.logprobs[:size]
        return dataclasses.replace(
            sampled, token_ids=sampled.token_ids[:size], logprobs=logprobs, finish_reason="stop"
        )

    def _ends(self, ids: list[int]) -> bool:
        text = self._text_of(ids)
        return any(stop in text for stop in self._stops)


class AgentSession(PolicyTime):
    """The model of one rollout.

    Args:
        env: The conversations, with their limits and their tool format.
        rollout: It is filled by `finish`.
        llm: The backend.
        sampling_params: The policy's. A request changes nothing but `stop` and `max_tokens`.

    Attributes:
        key: The secret that an agent's requests bring.
        stop_reason: Why no further request is answered. None: the rollout goes on.
        over: Set with it.
        failure: What the trainer must hear of: the server is lost, or the set-up is wrong.
        closed: Whether the agent is over, so that nothing more is sampled.
        last_error: The last request that was refused.
        context_is_full: Whether the last request that went on from an answer did not fit into the context.
    """

    def __init__(self, env: Any, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None):
        super().__init__()
        self.env, self.rollout, self.llm, self.params = env, rollout, llm, sampling_params or {}
        self.key = f"mt-{secrets.token_urlsafe(24)}"
        self.tokenizer = env._tokenizer(llm)
        self.format: HermesFormat = env.format_of(self.tokenizer)
        self.prompts = AgentPrompts(self.format, self.tokenizer)
        self.chains = Chains(self.format.thinking)
        self.responses: dict[str, list[Message]] = {}  # of /v1/responses: the messages up to each one
        self.stop_reason: StopReason | None = None
        self.over = asyncio.Event()
        self.failure: Exception | None = None
        self.closed, self.context_is_full = False, False
        self.last_error: ApiError | None = None
        self._num_requests, self._num_calls, self._num_written = 0, 0, 0
        self._tasks: dict[str, asyncio.Task] = {}  # by request: the last one of each
        self._rewards: dict[int, float] = {}  # by number of the completion

    # -- what the server asks --

    async def answer(
        self, request: ModelRequest, body: dict[str, Any], is_retry: bool, reward: float | None = None
    ) -> Answer:
        """The answer to a request. It is sampled even if the client goes away meanwhile: it will ask again.

        The same request joins the one in flight; a retry gets what was sampled; any other repetition is a new sample.
        A new one may bring a reward for the turn that it goes on from.

        Raises:
            ApiError: what the API refuses; 429 where the rollout is over.
        """
        same = json.dumps(body, sort_keys=True)
        task = self._tasks.get(same)
        if task is None or (task.done() and not is_retry):
            self._check_open()
            if reward is not None:
                self._reward_of(self._parent(request), reward, "the request goes on from no turn")
            task = self._tasks[same] = asyncio.ensure_future(self._timed(self._complete(request, self._num_requests)))
            self._num_requests += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # the rollout is over
                raise self._ended() from None
            raise

    def reward(self, value: float) -> None:
        """Give the completion that was answered last a turn reward. Rewards of one turn add up."""
        self._reward_of(self.chains.last, value, "no turn was sampled yet")

    def _reward_of(self, completion: Completion | None, value: float, missing: str) -> None:
        if completion is None:
            raise ApiError(400, f"reward: {missing}. Expected a turn to which the reward belongs.", None, "reward")
        number = completion.answer.number
        self._rewards[number] = self._rewards.get(number, 0.0) + value

    def _parent(self, request: ModelRequest) -> Completion | None:
        return self.chains.longest(request, keys_of(request.messages, self.format.thinking))

    # -- the end --

    def stop(self, reason: StopReason) -> None:
        """Answer no further request."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.over.set()

    async def finish(self) -> None:
        """End what is in flight, and write the completions into the rollout."""
        self.closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for each in self.chains.completions:
            each.turn.reward = self._rewards.get(each.answer.number)
        self.chains.fill(self.rollout)

    def _check_open(self) -> None:
        if self.stop_reason is not None or self.closed:
            raise self._ended()

    def _ended(self) -> ApiError:
        reason = self.stop_reason or "the agent is over"
        return ApiError(429, f"The rollout is over: {reason}. Expected no further request.", "rollout_over")

    # -- one completion --

    async def _timed(self, completing: Coroutine) -> Answer:
        """The answer; the time until it is there is the policy's. What fails here is no fault of the agent."""
        with self.in_flight():
            try:
                return await completing
            except ApiError:
                raise
            except Exception as error:
                self.failure = error
                self.over.set()
                raise ApiError(500, f"The policy's server failed: {error_text(error)}", "server_error") from error

    async def _complete(self, request: ModelRequest, number: int) -> Answer:
        parent = self._parent(request)
        said = request.messages[len(parent.keys) :] if parent else request.messages
        try:
            fresh = self._suffix(parent, said) if parent else []
            prompt_ids = parent.ids + fresh if parent else self._prompt(request)
        except Exception as error:  # whatever a chat template raises
            text = f"The chat template refuses the messages: {error_text(error)}"
            raise ApiError(400, text, None, "messages") from error
        self._check_room(parent, prompt_ids)
        if parent is not None:
            parent.asked += 1
        turn = await self._sample(request, prompt_ids, len(fresh))
        answer = self._answer(request, turn, prompt_ids, number)
        self.chains.add(Completion(request, [], parent, said, prompt_ids, fresh, turn, answer))
        return answer

    async def _sample(self, request: ModelRequest, prompt_ids: list[int], num_fresh: int) -> Turn:
        """A turn in the room that is left. Requests at the same time share it: the last one may be cut."""
        env, tools = self.env, tools_by_name(request.tools)
        left = env.max_completion_length - self._spent() - num_fresh
        if left <= 0:
            self.stop(StopReason.MAX_TOKENS)
            raise self._ended()
        room = min(left, request.max_tokens or left)
        # What is not in the room counts as spent, so that `sample_turn` keeps to it.
        edited = Context(request.messages, prompt_ids, env.max_completion_length - room)
        asked = Rollout(
            [], [], self.rollout.index, row=self.rollout.row, environment=self.rollout.environment, tools=tools,
            edited=edited,
        )  # fmt: skip
        llm = StopsAt(self.llm, request.stops, self.format.text) if request.stops else self.llm
        turn = await env.sample_turn(asked, llm, self.params)
        left = env.max_completion_length - self._spent() - num_fresh
        if len(turn.token_ids) > left:
            if left <= 0:
                self.stop(StopReason.MAX_TOKENS)
                raise self._ended()
            turn.token_ids, turn.logprobs = turn.token_ids[:left], turn.logprobs and turn.logprobs[:left]
            turn.text, turn.calls, _, turn.open_thinking = self.format.parse(turn.token_ids, prompt_ids, tools)
            turn.finish_reason, turn.answer = "length", None
        return turn

    def _check_room(self, parent: Completion | None, prompt_ids: list[int]) -> None:
        """Count a call. Raises `ApiError` where there is none left, or where the context is full."""
        context = self.env.max_model_len or getattr(self.llm, "max_model_len", None) or float("inf")
        self.context_is_full = parent is not None and len(prompt_ids) >= context
        if len(prompt_ids) >= context:
            raise ApiError(
                400, f"The messages have {len(prompt_ids)} tokens. Expected fewer than the context of {context}.",
                "context_length_exceeded", "messages",
            )  # fmt: skip
        if self._num_calls >= self.env.max_model_calls:
            self.stop(StopReason.MAX_TURNS)
            raise self._ended()
        self._num_calls += 1

    def _spent(self) -> int:
        """What max_completion_length counts: sampled tokens, and what was newly read behind them."""
        return sum(len(each.fresh_ids) + len(each.turn.token_ids) for each in self.chains.completions)

    def _answer(self, request: ModelRequest, turn: Turn, prompt_ids: list[int], number: int) -> Answer:
        """What the agent gets of a turn: its calls, its thinking, and the text beside them."""
        start = self.format.length_of_thinking(turn.token_ids, prompt_ids)
        thinking, text = turn.text[:start], "" if start is None else turn.text[start:]
        calls = []
        if request.reads_calls:
            calls, text = self.format.good_calls(text, tools_by_name(request.tools))
        for stop in request.stops:
            text = text.partition(stop)[0]
        text = self.format.content(text)
        written = []
        for call in calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            written.append(tool_call(f"call_{self._num_written:08d}", call.name, arguments))
            self._num_written += 1
        reason = "tool_calls" if written and turn.finish_reason == "stop" else turn.finish_reason
        opening, closing = self.format.thinking
        thinking = thinking.strip().removeprefix(opening.strip()).removesuffix(closing.strip()).strip()
        return Answer(
            number, text.strip() if thinking or written else text, written, thinking, reason, len(prompt_ids),
            len(turn.token_ids), int(time.time()),
        )  # fmt: skip

    # -- what the model reads --

    def _suffix(self, parent: Completion, said: list[Message]) -> list[int]:
        """The ids behind an answer."""
        said = self.prompts.rendered([*parent.request.messages, parent.answer.message], said)
        return self.format.suffix_ids(parent.turn.calls, said, parent.turn.token_ids)

    def _prompt(self, request: ModelRequest) -> list[int]:
        """The ids of a conversation that begins a record. The rollouts of a group begin with the same one."""
        key, cache = json.dumps([request.messages, request.tools]), self.env.prompt_cache
        if key not in cache:
            if len(cache) >= 1024:
                cache.clear()
            messages = self.prompts.rendered(request.messages, request.messages)
            tools = tools_by_name(self.prompts.broken(request.tools))
            cache[key] = self.env.prompt_ids(messages, self.tokenizer, tools)
        return list(cache[key])
