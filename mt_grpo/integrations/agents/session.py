"""One rollout as the model that an agent talks to: what it asks is sampled, in its budget, and becomes turns."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
import secrets
import time
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.json_types import json_text
from mt_grpo.base.pictures import MOST_PICTURES, is_picture
from mt_grpo.conversation.environments import is_number
from mt_grpo.conversation.pictures import reader_of, why_none
from mt_grpo.conversation.tools.results import error_text
from mt_grpo.integrations.agents.chains import Asked, Chains, Completion
from mt_grpo.integrations.agents.messages import (
    FROZEN,
    POLICY,
    Answer,
    ApiError,
    Contents,
    ModelRequest,
    refuse,
    tool_call,
)
from mt_grpo.integrations.agents.prompts import AgentPrompts, whole_characters
from mt_grpo.integrations.agents.response_items import Responses
from mt_grpo.integrations.prefixes import SharedPrefixes, keep_newest
from mt_grpo.integrations.session import RolloutSession, end_all, ids_of_prompt, tools_by_name
from mt_grpo.rollout import Message, Rollout, StopReason, Turn

ENDS = ("rollout_over", "context_length_exceeded")  # codes of errors that belong to a rollout's usual end


class AgentSession(RolloutSession):
    """The model of one rollout, which `finish` fills.

    Attributes:
        key: The secret that an agent's requests bring.
        name: Stands in ids, so that those of another rollout are told from its own. No secret.
        contents: What reads the contents of messages, and keeps their pictures.
        chains: What was sampled, and which request goes on from which.
        refused: What the API refused, as text: the last ones.
    """

    MOST_FIXED = 1000  # requests of a rollout that a fixed text answers: nothing else limits them

    def __init__(self, env: Any, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None):
        super().__init__(env, rollout, llm, sampling_params)
        self.key, self.name = f"mt-{secrets.token_urlsafe(24)}", secrets.token_hex(4)
        self.prompts = AgentPrompts(self.format, self.tokenizer)
        self.contents = Contents(self.prompts.joint, reader_of(self.tokenizer), why_none(self.tokenizer))
        self.chains = Chains(self.format.thinking, self.samples)
        # A model's that reads images tokenises what it reads with their marks.
        self.prefixes = SharedPrefixes(self.tokenizer) if self.contents.reader is None else None
        self.responses = Responses(self.name)
        self.refused: list[str] = []
        self._num_fixed = 0  # requests that a fixed text answered
        self._reading = asyncio.Lock()
        self._num_written = 0
        self._full_at: int | None = None  # how many requests there were when one did not fit into the context
        self._asked: list[Asked] = []  # all of them, but for those that were refused
        self._clock = itertools.count()
        self._last: Asked | None = None  # of those that are trained, the one that a client got last
        self._rewards: dict[int, list[float]] = {}  # by number of the answer
        self._refused_rewards: dict[int, float] = {}  # by the same, of a request that was refused and may come mended

    # -- what the server asks --

    async def in_order(self, read: Callable[[], ModelRequest]) -> ModelRequest:
        """What reads a request, in a thread where there may be images in it, for which no other rollout waits.

        Requests of this rollout stay in their order.
        """
        if self.contents.reader is None:
            return read()
        async with self._reading:
            return await asyncio.to_thread(read)

    def ask(
        self,
        request: ModelRequest,
        body: dict[str, Any],
        is_retry: bool = False,
        idempotency_key: str | None = None,
        reward: float | None = None,
        rewarded: str | None = None,
    ) -> Asked:
        """Begin to sample the answers to a request, or join what a retry asks for again.

        Equal requests are samples of their own: votes, branches of a search, sub-agents. Only a client that says so
        asks for the same sample again. `received` or `lost` has to follow.

        Args:
            request, body: The request as it is sampled, and as it came.
            is_retry: Whether the client says that it sends the request again.
            idempotency_key: What a client gives a request so that it is done once.
            reward: For the turn that the request goes on from; that of a retry was given already.
            rewarded: The id of the answer that the reward is for, where it is another one.

        Raises:
            ApiError: what the API refuses; 429 where the rollout is over.
        """
        same = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        asked = self._asked_before(same, is_retry, idempotency_key)
        if asked is None:
            sampled = request.fixed is None
            alike = sum((each.fixed is None) == sampled for _, each in self.chains.requests)
            if alike < self.env.max_model_calls + 64:  # an agent may ask on and on at its end
                self.chains.requests.append((self._num_requests, request))
            self._check_open()
            self._num_fixed += not sampled
            if self._num_fixed > self.MOST_FIXED:
                raise ApiError(
                    429, f"More than {self.MOST_FIXED} requests of a rollout were of other models.", "too_many"
                )
            paid = None if reward is None else self._pay(request, reward, rewarded)
            numbers = range(self._num_requests, self._num_requests + request.n)
            asked = Asked(same, idempotency_key, numbers, request.trained, sampled, paid, began=next(self._clock))
            answering = self._timed(self._complete(request, asked)) if sampled else self._fixed(request, asked)
            asked.task = asyncio.ensure_future(answering)
            self._num_requests += request.n
            self._asked.append(asked)
        asked.waiting += 1
        return asked

    def _asked_before(self, same: str, is_retry: bool, idempotency_key: str | None) -> Asked | None:
        """The request that a retry joins: one that a client has left, else one in flight, else the last received.

        Among equal ones, that with the fewest retries: a disconnect may be noticed after the retry.
        """
        if idempotency_key is not None:
            found = next((each for each in self._asked if each.idempotency_key == idempotency_key), None)
            if found is not None and found.same != same:
                raise refuse("Idempotency-Key", f"{idempotency_key!r:.100} was sent with another request.")
            return found
        equal = [each for each in self._asked if each.same == same] if is_retry else []
        left = [each for each in equal if not each.reached and not each.waiting]
        in_flight = [each for each in equal if not each.reached]
        found = next((min(each, key=lambda a: a.retries) for each in (left, in_flight) if each), None)
        found = found or next(reversed(equal), None)
        if found is not None:
            found.retries += 1
        return found

    def count_tokens(self, request: ModelRequest) -> int:
        """How many tokens the model would read, at least where they do not fit into its context.

        Nothing is sampled, and no budget is spent.

        Raises:
            ApiError: what the API refuses; 429 where the rollout is over.
        """
        self._check_open()
        count = len(self._read(request)[-1])
        if self.context is not None and count >= self.context:  # an agent that raises here, as where it is refused
            self._note_full(request)
        return count

    def _note_full(self, request: ModelRequest) -> None:
        """Keep that a request does not fit into the context, where the policy's answers may be why.

        They are not for a request that is not trained and holds none of them, such as a judge's or a title's: it is
        the agent's own text that is too long, and a policy that goes on is not at its end.
        """
        if self.policy_answered and (request.trained or self.chains.tells_of_trained(request)):
            self._full_at = self._num_requests

    def tell_effort(self, request: ModelRequest, body: dict[str, Any]) -> None:
        """Warn once that vLLM would show the model another prompt for a request's reasoning effort."""
        lacking = self.prompts.arguments_of_effort(request.effort, tuple(body.get("chat_template_kwargs") or ()))
        if lacking:
            tell_once(
                f"{self.env.agent.name}: a request sets the reasoning effort {request.effort!r:.100}, for which vLLM "
                "would show the model another prompt. Here only the recipe sets the template's arguments. To train "
                f"on the prompts that vLLM shows, set chat_template_kwargs: {json.dumps(lacking)}.",
                f"{self.env.agent.name} effort {request.effort:.100}",
            )

    async def answers(self, asked: Asked) -> list[Answer]:
        """The answers of a request. They are sampled even if the client goes away meanwhile: it may ask again.

        Raises:
            ApiError: what the API refuses; 429 where the rollout is over.
        """
        try:
            return await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if asked.task.cancelled():  # the rollout is over
                raise self._ended() from None
            raise

    # These two, and `reward`, may be called on the agent's thread: what it asks next comes behind them.

    def received(self, asked: Asked) -> None:
        """A client gets the answers: now, or at the next moment."""
        asked.waiting -= 1
        asked.reached += 1
        asked.ended = next(self._clock)
        if asked.trained:
            self._last = asked

    def lost(self, asked: Asked, received: bool = False) -> None:
        """A client has left without the answers, also where they were on their way (`received`)."""
        if received:
            asked.reached -= 1
        else:
            asked.waiting -= 1
            failed = asked.task.done() and not asked.task.cancelled() and asked.task.exception() is not None
            if failed and not asked.waiting and asked in self._asked:
                self._asked.remove(asked)  # it was refused: there may be many of these, and no retry joins one
                self._refused_rewards |= dict([asked.paid] if asked.paid else [])

    def reward(self, value: float, answer: str | None = None) -> None:
        """Give a turn a reward. Rewards of one turn add up.

        Args:
            value: The reward.
            answer: The id of the answer, `chatcmpl-3`, `resp_5f0c_3` or `msg_3`, with `:1` for choice 1 of several.
                None: the last one that a client got of the model that is trained.

        Raises:
            ApiError: there is no such answer, or several may be meant.
        """
        if answer is not None:
            number = self._number_of(answer)
        elif self._last is None:
            raise refuse("reward", "no turn was sampled yet. Expected a turn to which the reward belongs.")
        elif len(self._last.numbers) > 1 or any(
            self._last.overlaps(each) for each in list(self._asked) if each.trained and each is not self._last
        ):
            raise refuse(
                "reward",
                "several answers were open at the same time, and the reward may belong to each of them. "
                "Say which: client.reward(value, answer=response), or its id; of a request with n, choice=k, too.",
            )
        else:
            number = self._last.numbers[0]
        self._add_reward(number, value)

    def _add_reward(self, number: int, value: float) -> None:
        total = sum(self._rewards.get(number, [])) + value
        if not is_number(total):
            raise refuse("reward", f"got {value!r}, with which the turn's rewards add up to {total!r}.")
        self._rewards.setdefault(number, []).append(value)

    def _number_of(self, answer: str) -> int:
        """The number of the answer with an id. Raises `ApiError`."""
        found = re.fullmatch(rf"(?:chatcmpl-|resp_{self.name}_|msg_)(\d{{1,9}})(?::(\d{{1,9}}))?", answer)
        asked = found and next((each for each in self._asked if each.numbers[0] == int(found[1])), None)
        if not asked or not asked.reached:
            raise refuse("reward", f"no answer has the id {answer!r:.100}. Expected the id of one that was received.")
        if not asked.trained:
            raise refuse("reward", f"{answer!r} is an answer of another model or of {FROZEN}, which is not trained.")
        if found[2] is None and len(asked.numbers) > 1:
            raise refuse("reward", f"{answer!r} has {len(asked.numbers)} choices. Say which: choice=k, or {answer}:k.")
        choice = int(found[2] or 0)
        if choice >= len(asked.numbers):
            raise refuse("reward", f"{answer!r} has choices up to {len(asked.numbers) - 1}.")
        return asked.numbers[choice]

    def _pay(self, request: ModelRequest, value: float, answer: str | None) -> tuple[int, float]:
        """Give the turn of an answer, or the one that a request goes on from, a reward. Returns its number and that.

        In place of what a refused request has paid for the same turn: a client mends it and sends it again.

        Raises `ApiError`.
        """
        parent = self._parent(request)
        if answer is not None:
            number = self._number_of(answer)
        elif parent is None:
            raise refuse("reward", "the request goes on from no turn. Expected a turn to which the reward belongs.")
        elif not parent.request.trained:
            raise refuse("reward", f"the request goes on from an answer of {FROZEN}, which is not trained.")
        else:
            number = parent.number
        if number in self._refused_rewards:
            self._rewards[number].remove(self._refused_rewards.pop(number))
        self._add_reward(number, value)
        return number, value

    def _parent(self, request: ModelRequest) -> Completion | None:
        found = self.chains.longest(request, self.chains.keys_of(request.messages))
        behind = request.messages[len(found.keys) :] if found else []
        moved = any(message["role"] == "developer" for message in behind) and not self.prompts.knows_developers
        return None if moved else found  # the template reads a developer's message at the beginning

    def refuse(self, error: ApiError) -> None:
        """Keep the last eight reasons of rejected requests for the log, and warn once per kind of reason."""
        if error.status == 426:  # by which a client learns to use HTTP
            return
        text = str(error)
        self.refused = [*(each for each in self.refused if each != text), text][-8:]
        if error.code not in ENDS and error.status < 500:
            kind = re.split(r"[.\[]", error.param or "")[0]
            name = self.env.agent.name
            tell_once(
                f"{name}: a request was rejected with status {error.status}. {text} This kind is logged once; all "
                "rejected requests are in the log of rollouts, under `refused`.",
                f"{name} {error.status} {error.code} {kind}",
            )

    def with_known_model(self, body: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """A request's body in which another model is what `agent_other_models` makes of it, and a fixed answer.

        INVARIANT: no token of such a model's answer is trained on. Raises `ApiError`.
        """
        model, choice = body.get("model"), self.env.other_models
        if model in (POLICY, FROZEN) or not isinstance(model, str):
            return body, None
        if choice == "refused":
            raise ApiError(
                404,
                f"The model {model!r:.100} does not exist. Expected {POLICY!r}, or {FROZEN!r} for what is not to "
                "be trained on. Set agent_other_models to answer for other models, too.",
                "model_not_found",
                "model",
            )
        name = self.env.agent.name
        tell_once(
            f"{name}: a request names the model {model!r:.100}. With agent_other_models: {choice} its answers are "
            f"not trained on. The model in training is {POLICY!r}.",
            f"{name} model {model:.100}",
        )
        return {**body, "model": FROZEN}, self.env.other_text if choice == "text" else None

    @property
    def limit_met(self) -> StopReason | None:
        """The limit at which an agent raises: no request that it sent behind it was answered. None: there is none.

        Either a request did not fit into the context, which the policy's answers fill however the agent edits them,
        or an answer that a client got was cut. What a request's own limit of tokens cuts is the agent's affair.
        """
        if self._full_at is not None and not any(each.number >= self._full_at for each in self.samples):
            return StopReason.CONTEXT_LENGTH
        got = [each.asked for each in self.samples if each.asked.reached]
        for each in self.samples:
            size, own = len(each.turn.token_ids), each.request.max_tokens
            cut = each.turn.finish_reason == "length" and (own is None or size < own or self.left(0) <= 0)
            if cut and each.asked.trained and each.asked in got:
                if not any(other.began > each.asked.ended for other in got):
                    full = len(each.prompt_ids) + size >= self.context and self.left(0) > 0
                    return StopReason.CONTEXT_LENGTH if full else StopReason.MAX_TOKENS
        return None

    @property
    def policy_answered(self) -> bool:
        """Whether a client has received an answer that is trained."""
        return any(each.reached and each.trained for each in self._asked)

    @property
    def got_an_answer(self) -> bool:
        """Whether a client has received an answer of the policy."""
        return any(each.reached and each.sampled for each in self._asked)

    # -- the end --

    def stop(self, reason: StopReason) -> None:
        """Answer no further request. The agent is waited for only a while longer."""
        super().stop(reason)
        self.over.set()

    async def finish(self) -> None:
        """End what is in flight, and write the completions into the rollout."""
        self.closed = True
        await end_all(asked.task for asked in self._asked)
        for each in self.samples:
            rewards = self._rewards.get(each.number)
            each.turn.reward = float(sum(rewards)) if rewards else None
        self.chains.fill(self.rollout)
        if self.refused and self.rollout.turns:
            self.rollout.turns[-1].info["refused"] = "\n".join(self.refused)

    def _check_open(self) -> None:
        if self.stop_reason is not None or self.closed:
            raise self._ended()

    def _ended(self) -> ApiError:
        reason = self.stop_reason or "the agent is over"
        return ApiError(429, f"The rollout is over: {reason}. Expected no further request.", "rollout_over")

    # -- one completion --

    async def _fixed(self, request: ModelRequest, asked: Asked) -> list[Answer]:
        """Answers that nobody has sampled. They are no turns."""
        count = len(self.tokenizer(request.fixed, add_special_tokens=False)["input_ids"])
        return [
            Answer(number, request.fixed, [], "", "stop", 0, count, int(time.time()), None, self.name)
            for number in asked.numbers
        ]

    async def _timed(self, completing: Coroutine) -> list[Answer]:
        """The answers; the time until it is there is the policy's. What fails here is no fault of the agent."""
        with self.in_flight():
            try:
                return await completing
            except ApiError:
                raise
            except Exception as error:
                self.failure = error
                self.over.set()
                raise ApiError(500, f"The policy's server failed: {error_text(error)}", "server_error") from error

    async def _complete(self, request: ModelRequest, asked: Asked) -> list[Answer]:
        """All answers of a request read the same, and each is a turn of its own."""
        parent, said, fresh, prompt_ids = self._read(request)
        self._count_calls(prompt_ids, request)
        if parent is not None:
            parent.continued += 1

        async def one(number: int) -> Answer:
            turn = await self._sample(request, prompt_ids, len(fresh))
            answer = self._answer(request, turn, prompt_ids, number)
            self.chains.add(
                Completion(
                    number,
                    request.messages,
                    prompt_ids,
                    turn,
                    parent,
                    said,
                    fresh if parent else None,
                    len(fresh),
                    asked,
                    request,
                    [],
                    answer,
                )
            )
            return answer

        sampling = [asyncio.ensure_future(one(number)) for number in asked.numbers]
        try:
            return await asyncio.gather(*sampling)
        finally:  # where one of them fails, or this is cancelled
            await end_all(sampling)

    async def _sample(self, request: ModelRequest, prompt_ids: list[int], num_fresh: int) -> Turn:
        """A turn. Raises `ApiError` where the room is spent."""
        tools = tools_by_name(request.tools)
        turn = await self.sample(request.messages, prompt_ids, num_fresh, request.max_tokens, tools, request.stops)
        if turn is None:
            raise self._ended()
        if not request.reads_calls:
            turn.calls = []
            if turn.finish_reason == "stop" and not turn.open_thinking:
                start = self.format.length_of_thinking(turn.token_ids, prompt_ids)
                turn.answer = self.format.answer(turn.text[start:])
        return turn

    def _count_calls(self, prompt_ids: list[int], request: ModelRequest) -> None:
        """Count a request's calls. Raises `ApiError` where they are not left, or where the context is full."""
        lacking = self.count_calls(prompt_ids, request.n)
        if lacking == StopReason.CONTEXT_LENGTH:  # the agent may send less
            self._note_full(request)
            raise ApiError(
                400, f"This model's maximum context length is {self.context} tokens. The messages have at least "
                f"{len(prompt_ids)}. Expected fewer than the context of {self.context}, and at most {MOST_PICTURES} "
                "images.",
                "context_length_exceeded", "messages",
            )  # fmt: skip  # by the first words, which are vLLM's, programs know that they have to compact
        if lacking is not None:
            self.stop(lacking)
            raise self._ended()

    def _answer(self, request: ModelRequest, turn: Turn, prompt_ids: list[int], number: int) -> Answer:
        """What the agent gets of a turn: its calls, its thinking, and the text beside them."""
        start = self.format.length_of_thinking(turn.token_ids, prompt_ids)
        thinking, text = turn.text[:start], "" if start is None else turn.text[start:]
        calls = []
        if request.reads_calls:
            calls, text = self.format.good_calls(text, tools_by_name(request.tools))
        for each in request.stops:
            text = text.partition(each)[0]
        stop = next((stop for stop in request.stops if stop in turn.text), None)
        text = self.format.content(text)
        written = []
        for call in calls:
            # Half a character of JSON (\ud83d) would end the client that sends the history again.
            name, arguments = whole_characters(call.name), whole_characters(call.arguments)
            text_of_them = json_text(arguments, ensure_ascii=False)
            written.append(tool_call(f"call_{self._num_written:08d}", name, text_of_them))
            self._num_written += 1
        reason = "tool_calls" if written and turn.finish_reason == "stop" else turn.finish_reason
        opening, closing = self.format.thinking
        thinking = thinking.strip().removeprefix(opening.strip()).removesuffix(closing.strip()).strip()
        return Answer(
            number,
            text.strip() if thinking or written else text,
            written,
            thinking,
            reason,
            len(prompt_ids),
            len(turn.token_ids),
            int(time.time()),
            stop,
            self.name,
        )

    # -- what the model reads --

    def _read(self, request: ModelRequest) -> tuple[Completion | None, list[Message], list[int], list[int]]:
        """(the answer that a request goes on from, the messages behind it, their ids, all ids). Raises `ApiError`."""
        parent = self._parent(request)
        said = request.messages[len(parent.keys) :] if parent else request.messages
        try:
            fresh = self._suffix(parent, request, said) if parent else []
            return parent, said, fresh, parent.ids + fresh if parent else self._prompt(request)
        except ApiError:
            raise
        except Exception as error:  # whatever a chat template raises
            text = f"The chat template refuses the messages: {error_text(error)}"
            raise ApiError(400, text, None, "messages") from error

    def _suffix(self, parent: Completion, request: ModelRequest, said: list[Message]) -> list[int]:
        """The ids behind an answer."""
        # The program may have given the calls other ids, by which its results name them.
        said = self.prompts.rendered([parent.answer.message, *request.messages[: len(parent.keys)]], said)
        return self.format.suffix_ids(parent.turn.calls, said, parent.turn.token_ids, self.context)

    def _prompt(self, request: ModelRequest) -> list[int]:
        """The ids of a conversation that begins a record. The rollouts of a group begin with the same one."""
        written, cache = json.dumps([request.messages, request.tools]), self.env.prompt_cache
        key = hashlib.sha256(written.encode()).digest()
        if (known := cache.get(key)) is not None:
            if self.prefixes is not None and key in self.env.begun_alike:
                self.prefixes.kept.append(self.env.begun_alike[key])
            return known.tolist()
        messages = self.prompts.rendered([], request.messages)
        tools = self.prompts.tools(request.tools)
        ids = ids_of_prompt(self.env, messages, self.tokenizer, tools, self.context, self.prefixes)
        # What is refused may be megabytes, and a prompt that is kept keeps its pictures.
        if len(ids) < self.context and not any(map(is_picture, ids)):
            cache.keep(key, array("q", ids))
            if self.prefixes is not None and self.prefixes.kept:
                keep_newest(self.env.begun_alike, key, self.prefixes.kept[-1])
        return ids
