"""One rollout as the model that an agent talks to: its requests are sampled within its budget, and become turns."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.rows import json_text
from mt_grpo.conversation.environments import is_number
from mt_grpo.conversation.tools.running import error_text
from mt_grpo.images.pictures import MOST_PICTURES, reader_of, why_none
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
from mt_grpo.integrations.agents.prompts import AgentPrompts
from mt_grpo.integrations.agents.response_items import Responses
from mt_grpo.integrations.session import RolloutSession, end_all, ids_of_prompt, tools_by_name
from mt_grpo.rollout import Message, Rollout, StopReason, Turn

ENDS = ("rollout_over", "context_length_exceeded")  # codes of errors that belong to a rollout's usual end
MOST_UNANSWERED = 64  # requests beyond `max_model_calls` that are kept: an agent may ask on and on at its end


class AgentSession(RolloutSession):
    """The model of one rollout, which `finish` fills.

    Attributes:
        key: The secret that an agent's requests bring.
        name: Stands in ids, so that those of another rollout are told from its own. No secret.
        contents: Reads the contents of messages, and keeps their images.
        chains: The samples, and which request continues which answer.
        refused: The last errors that the agent got, as text.
    """

    def __init__(self, env: Any, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None):
        super().__init__(env, rollout, llm, sampling_params)
        self.key, self.name = f"mt-{secrets.token_urlsafe(24)}", secrets.token_hex(4)
        self.prompts = AgentPrompts(self.format, self.tokenizer)
        self.contents = Contents(self.prompts.joint, reader_of(self.tokenizer), why_none(self.tokenizer))
        self.chains = Chains(self.format.thinking, self.samples)
        self.responses = Responses(self.name)
        self.refused: list[str] = []
        self._reading = asyncio.Lock()
        self._num_written = 0
        self._full_at: int | None = None  # how many requests there were when one did not fit into the context
        self._asked: list[Asked] = []  # all of them, except those that were refused
        self._clock = itertools.count()
        self._last: Asked | None = None  # of those that are trained, the one that a client got last
        self._rewards: dict[int, list[float]] = {}  # by number of the answer
        self._unheard_rewards: dict[int, float] = {}  # of requests that got no answer and may come again, likewise

    # -- requests --

    async def in_order(self, read: Callable[[], ModelRequest]) -> ModelRequest:
        """Read a request, in a thread if there may be images in it, for which no other rollout waits.

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
        reward: float | None = None,
        rewarded: str | None = None,
    ) -> Asked:
        """Begin to sample the answers to a request, or join the request that a retry sends again.

        Equal requests are samples of their own: votes, branches of a search, sub-agents. Only a client that says so
        asks for the same sample again. `received` or `lost` has to follow. Raises `ApiError`.

        Args:
            request, body: The request as it is sampled, and as it came.
            is_retry: Whether the client says that it sends the request again.
            reward: For the turn that the request continues; that of a retry was given already.
            rewarded: The id of the answer that the reward is for, if it is another one.
        """
        same = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        asked = self._asked_before(same) if is_retry else None
        if asked is None:
            if len(self.chains.requests) < self.env.max_model_calls + MOST_UNANSWERED:
                self.chains.requests.append((self._num_requests, request))
            self._check_open()
            paid = None if reward is None else self._pay(request, reward, rewarded)
            numbers = range(self._num_requests, self._num_requests + request.n)
            asked = Asked(same, numbers, request.trained, paid, began=next(self._clock))
            asked.task = asyncio.ensure_future(self._timed(self._complete(request, asked)))
            self._num_requests += request.n
            self._asked.append(asked)
        elif asked.paid:
            self._unheard_rewards.pop(asked.paid[0], None)
        asked.waiting += 1
        return asked

    def _asked_before(self, same: str) -> Asked | None:
        """The request that a retry joins: one that a client has left, else one in flight, else the last received.

        Among equal ones, that with the fewest retries: a disconnect may be noticed after the retry.
        """
        equal = [each for each in self._asked if each.same == same]
        left = [each for each in equal if not each.reached and not each.waiting]
        in_flight = [each for each in equal if not each.reached]
        found = next((min(each, key=lambda a: a.retries) for each in (left, in_flight) if each), None)
        found = found or next(reversed(equal), None)
        if found is not None:
            found.retries += 1
        return found

    def count_tokens(self, request: ModelRequest) -> int:
        """How many tokens the model would read, at least. No budget is spent. Raises `ApiError`."""
        self._check_open()
        count = len(self._read(request)[-1])
        if count >= self.context:  # an agent may raise here, as if it were refused
            self._note_full(request)
        return count

    def _note_full(self, request: ModelRequest) -> None:
        """Note that a request does not fit into the context, if the policy's answers may be the reason.

        They are not for a request that is not trained and holds none of them, such as a judge's: the agent's own text
        is too long.
        """
        if self.policy_answered and (request.trained or self.chains.tells_of_trained(request)):
            self._full_at = self._num_requests

    async def answers(self, asked: Asked) -> list[Answer]:
        """The answers of a request, sampled even if the client leaves: it may ask again. Raises `ApiError`."""
        try:
            return await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if asked.task.cancelled():  # the rollout is over
                raise self._ended() from None
            raise

    def received(self, asked: Asked) -> None:
        """Note that a client gets the answers, now or at the next moment."""
        asked.waiting -= 1
        asked.reached += 1
        asked.ended = next(self._clock)
        if asked.trained:
            self._last = asked

    def lost(self, asked: Asked, received: bool = False) -> None:
        """Note that a client has left without the answers, even if they were on their way (`received`).

        A request that no client waits for is sampled all the same, and is not trained. What it paid is taken back
        when the client asks again without saying that it does.
        """
        if received:
            asked.reached -= 1
            return
        asked.waiting -= 1
        failed = asked.task.done() and not asked.task.cancelled() and asked.task.exception() is not None
        if failed and not asked.waiting and asked in self._asked:
            self._asked.remove(asked)  # it was refused: there may be many of these, and no retry joins one
        if not asked.waiting and not asked.reached and asked.paid:  # who asks again pays again
            self._unheard_rewards |= dict([asked.paid])

    # -- rewards. The agent calls `reward` on its own thread --

    def reward(self, value: float, answer: str | None = None) -> None:
        """Give a turn a reward. Rewards of one turn add up.

        Args:
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
            raise refuse("reward", "several answers were open at the same time. Say which: answer=response, choice=k.")
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
        if not asked or not asked.reached or not asked.trained:
            raise refuse("reward", f"no trained answer that was received has the id {answer!r:.100}.")
        if found[2] is None and len(asked.numbers) > 1:
            raise refuse("reward", f"{answer!r} has {len(asked.numbers)} choices. Say which: choice=k, or {answer}:k.")
        if (choice := int(found[2] or 0)) >= len(asked.numbers):
            raise refuse("reward", f"{answer!r} has choices up to {len(asked.numbers) - 1}.")
        return asked.numbers[choice]

    def _pay(self, request: ModelRequest, value: float, answer: str | None) -> tuple[int, float]:
        """Give the turn of an answer, or the one that a request continues, a reward. Returns its number and that.

        It replaces the reward of a request for the same turn that got no answer: a client sends it again, or mends it.

        Raises `ApiError`.
        """
        parent = self._parent(request)
        if answer is None and (parent is None or not parent.request.trained):
            raise refuse("reward", "the request continues no trained turn. Expected a turn that the reward is for.")
        number = parent.number if answer is None else self._number_of(answer)
        if number in self._unheard_rewards:
            self._rewards[number].remove(self._unheard_rewards.pop(number))
        self._add_reward(number, value)
        return number, value

    # -- errors, and why a rollout ends --

    def refuse(self, error: ApiError) -> None:
        """Keep the last eight errors for the log, and warn once per kind."""
        if error.status == 426:  # by which a client learns to use HTTP
            return
        text = str(error)
        self.refused = [*(each for each in self.refused if each != text), text][-8:]
        if error.code not in ENDS and error.status < 500:
            kind, name = re.split(r"[.\[]", error.param or "")[0], self.env.agent.name
            tell_once(
                f"{name}: a request was rejected with status {error.status}. {text} This kind is logged once; all "
                "rejected requests are in the log of rollouts, under `refused`.",
                f"{name} {error.status} {error.code} {kind}",
            )

    def trains(self, model: Any) -> bool:
        """Whether answers of a model are trained on: those of `policy` alone. Raises `ApiError` for an unknown one."""
        if model not in (POLICY, FROZEN):
            expected = f"Expected {POLICY!r}, or {FROZEN!r}, which is not trained on."
            raise ApiError(404, f"The model {model!r:.100} does not exist. {expected}", "model_not_found", "model")
        return model == POLICY

    @property
    def limit_met(self) -> StopReason | None:
        """The limit at which an agent raises: no request that it sent after it was answered. None: there is none.

        Either a request did not fit into the context, which the policy's answers fill however the agent edits them,
        or an answer that a client got was truncated, unless by the request's own limit of tokens.
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
        """Whether a client has received an answer of the policy, trained or not."""
        return any(each.reached for each in self._asked)

    def stop(self, reason: StopReason) -> None:
        """Answer no further request. The agent is waited for only a while longer."""
        super().stop(reason)
        self.over.set()

    async def finish(self) -> None:
        """End the requests in flight, and write the completions into the rollout."""
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

    async def _timed(self, completing: Coroutine) -> list[Answer]:
        """The answers; the time until then is the policy's. Other errors than `ApiError` end the run."""
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
            size = len(fresh) if number == asked.numbers[0] else 0  # all of them read it, and it counts once
            turn = await self._sample(request, prompt_ids, size)
            answer = self._answer(request, turn, prompt_ids, number)
            read = (number, request.messages, prompt_ids, turn, parent, said, fresh if parent else None, size)
            self.chains.add(Completion(*read, asked, request, [], answer))
            return answer

        sampling = [asyncio.ensure_future(one(number)) for number in asked.numbers]
        try:
            return await asyncio.gather(*sampling)
        finally:  # if one of them fails, or this is cancelled
            await end_all(sampling)

    async def _sample(self, request: ModelRequest, prompt_ids: list[int], num_fresh: int) -> Turn:
        """A turn. Raises `ApiError` if the budget is spent."""
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
        """Count a request's calls. Raises `ApiError` if none are left, or if the context is full."""
        lacking = self.count_calls(prompt_ids, request.n)
        if lacking == StopReason.CONTEXT_LENGTH:  # the agent may send less
            self._note_full(request)
            # By the first words, which are vLLM's, programs know that they have to compact their history.
            message = (
                f"This model's maximum context length is {self.context} tokens. The messages have at least "
                f"{len(prompt_ids)}. Expected fewer than the context of {self.context}, and at most {MOST_PICTURES} "
                "images."
            )
            raise ApiError(400, message, "context_length_exceeded", "messages")
        if lacking is not None:
            self.stop(lacking)
            raise self._ended()

    def _answer(self, request: ModelRequest, turn: Turn, prompt_ids: list[int], number: int) -> Answer:
        """A turn as an answer: its calls, its thinking, and the text next to them."""
        start = self.format.length_of_thinking(turn.token_ids, prompt_ids)
        thinking, text = turn.text[:start], "" if start is None else turn.text[start:]
        calls = []
        if request.reads_calls:
            # A broken call is text for a program, and so are several where the template writes one.
            syntax, tools = self.format.syntax, tools_by_name(request.tools)
            if self.format.several or len(syntax.split(text, tools)[0]) < 2:
                calls, text = syntax.split(text, tools, broken=False)
        for each in request.stops:
            thinking, text = thinking.partition(each)[0], text.partition(each)[0]
        stop = next((stop for stop in request.stops if stop in turn.text), None)
        text = self.format.content(text)
        written = []
        for call in calls:
            # Half a character of JSON (\ud83d) would end the client that sends the history again.
            texts = call.name, json_text(call.arguments, ensure_ascii=False)
            name, arguments = (text.encode("utf-8", "replace").decode() for text in texts)
            written.append(tool_call(f"call_{self._num_written:08d}", name, arguments))
            self._num_written += 1
        reason = "tool_calls" if written and turn.finish_reason == "stop" else turn.finish_reason
        opening, closing = self.format.thinking
        thinking = thinking.strip().removeprefix(opening.strip()).removesuffix(closing.strip()).strip()
        text = text.strip() if thinking or written else text
        sizes = (len(prompt_ids), len(turn.token_ids))
        return Answer(number, text, written, thinking, reason, *sizes, int(time.time()), stop, self.name)

    # -- what the model reads --

    def _parent(self, request: ModelRequest) -> Completion | None:
        """The answer that a request continues, None if it begins a record."""
        found = self.chains.longest(request, self.chains.keys_of(request.messages))
        after = request.messages[len(found.keys) :] if found else []
        moved = any(message["role"] == "developer" for message in after) and not self.prompts.knows_developers
        return None if moved else found  # the template reads a developer's message at the beginning

    def _read(self, request: ModelRequest) -> tuple[Completion | None, list[Message], list[int], list[int]]:
        """(the answer that a request continues, the messages after it, their ids, all ids). Raises `ApiError`."""
        parent, said = self._parent(request), request.messages
        try:
            if parent is None:
                messages, tools = self.prompts.rendered([], said), self.prompts.tools(request.tools)
                return None, said, [], ids_of_prompt(self.env, messages, self.tokenizer, tools, self.context)
            before, said = said[: len(parent.keys)], said[len(parent.keys) :]
            # The program may have given the calls other ids, by which its results name them.
            shown = self.prompts.rendered([parent.answer.message, *before], said)
            fresh = self.format.suffix_ids(parent.turn.calls, shown, parent.turn.token_ids, self.context)
            return parent, said, fresh, parent.ids + fresh
        except ApiError:
            raise
        except Exception as error:  # whatever a chat template raises
            text = f"The chat template refuses the messages: {error_text(error)}"
            raise ApiError(400, text, None, "messages") from error
