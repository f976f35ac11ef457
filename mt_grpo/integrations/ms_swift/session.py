"""One rollout as the engine of an ms-swift scheduler: what it asks is sampled behind what was sampled before.

A scheduler sends messages, and these are text. A request goes on from the response whose message it repeats, and its
ids are those that were sampled. Only what stands behind them is tokenised.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from mt_grpo.base.errors import error_line, tell_once
from mt_grpo.base.pictures import Picture
from mt_grpo.conversation.formats.hermes import call_id
from mt_grpo.conversation.tools.results import cut_far_beyond
from mt_grpo.integrations.ms_swift.loop import RolloutOver, SchedulerFailure
from mt_grpo.integrations.ms_swift.messages import read_messages, rendered, said_before
from mt_grpo.integrations.ms_swift.pictures import RequestImages, with_tags
from mt_grpo.integrations.ms_swift.protocol import RequestConfig, RolloutOutput, listed_tools
from mt_grpo.integrations.ms_swift.samples import GoesOn, Sample, goes_on, keep, messages_of, revise, without_turns
from mt_grpo.integrations.session import RolloutSession, end_all, ids_of_prompt, tools_by_name
from mt_grpo.rollout import Message, Rollout, StopReason, Turn, join

# What the model reads for a scheduler's request: the ids of the response that it goes on from, and what is new.


class Reading(NamedTuple):
    """A request, tokenised to ids."""

    messages: list[Message]
    tools: str  # as JSON
    tools_by_name: dict[str, Any]
    going: GoesOn | None  # None: it begins a record, and all of it is rendered
    prompt_ids: list[int]  # all that the model reads
    behind: list[int]  # of them, what the scheduler put behind the response that it goes on from
    num_new: int  # of them, those behind that response
    in_record: bool  # whether its record goes on: what was read and sampled stands there as it was

    @property
    def fresh(self) -> list[int] | None:
        """The ids behind the response, None for the beginning of a record."""
        return self.prompt_ids[len(self.prompt_ids) - self.num_new :] if self.in_record else None


def read_request(
    request: Any,
    samples: list[Sample],
    env: Any,
    written: Any,
    tokenizer: PreTrainedTokenizerBase,
    plain: Callable[[list[int]], str],
    prompt: list[Message],
    context: float,
    shown: list[Picture] | None,
) -> Reading:
    """The messages that the model reads for a request.

    An end of turn that was sampled is read where messages follow. Where the message goes on instead, it is not: a
    record begins.

    Args:
        request: A `RolloutInferRequest`.
        samples: The responses so far.
        env: The conversations.
        written: Their tool format.
        tokenizer: Of the policy.
        plain: What ids say, where they are the content of a message.
        prompt: Of the data set's row.
        context: Of the model, in tokens. A text that is surely longer is read to a place behind it.
        shown: Its pictures; None: the model reads text alone.

    Raises:
        SchedulerFailure: for what a request may not have.
    """
    messages = read_messages(request, plain, env.keeps_thinking, shown)
    kwargs = getattr(request, "chat_template_kwargs", None)
    if kwargs and kwargs != env.chat_template_kwargs:
        raise SchedulerFailure(
            f"A request has chat_template_kwargs={kwargs}, the recipe {env.chat_template_kwargs}. Set the recipe's "
            "key: all conversations have the same."
        )
    try:
        given = listed_tools(getattr(request, "tools", None)) or []
    except ValueError as error:
        raise SchedulerFailure(f"A request's {error}") from error
    tools, by_name = json.dumps(given, sort_keys=True), tools_by_name(given)
    going = goes_on(samples, messages, tools, written.text)

    def text_ids(text: str) -> list[int]:
        return written.text_ids(cut_far_beyond(without_turns(text, tokenizer), context, tokenizer)) if text else []

    if going is None:
        begun = said_before(messages)
        whole = rendered(messages[:-1] if begun else messages, [], tokenizer, prompt)
        ids = ids_of_prompt(env, whole, tokenizer, by_name, context) + text_ids(begun)
        return Reading(messages, tools, by_name, None, ids, [], 0, False)
    parent, calls = going.parent, going.parent.turn.calls
    sampled = parent.turn.token_ids[: going.kept]
    behind = (parent.tail if going.with_tail else []) + text_ids(going.behind)
    drops_end = sampled[-1:] != [] and sampled[-1] in written.ends and bool(behind or not going.said)
    suffix = []
    if going.said:
        said = rendered(going.said, calls, tokenizer, prompt)
        suffix = written.suffix_ids(calls, said, [] if behind else sampled, context)
    ids = parent.prompt_ids + (sampled[:-1] if drops_end else sampled) + behind + suffix
    in_record = going.is_whole and not parent.is_read and not drops_end
    return Reading(messages, tools, by_name, going, ids, behind, len(behind + suffix), in_record)


def stops_of(config: Any) -> tuple[str, ...]:
    """The texts that end a response. Raises `SchedulerFailure` for what are none."""
    stops = getattr(config, "stop", None) or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise SchedulerFailure(f"A request's config has stop={stops!r:.100}, expected a list of texts.")
    return tuple(stops)


def most_of(config: Any) -> int | None:
    """How many tokens a response may have; None: no limit of its own. Raises `SchedulerFailure` for no such number."""
    most = getattr(config, "max_tokens", None)
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise SchedulerFailure(f"A request's config has max_tokens={most!r:.100}, expected a number from 1 on.")
    return most


def check_sampling(config: Any) -> None:
    """Tell of what a request's config asks for and does not get: the policy is sampled as the recipe says.

    Raises `SchedulerFailure` for more answers than one.
    """
    asked = getattr(config, "n", None)
    if asked not in (None, 1):
        raise SchedulerFailure(
            f"A request's config has n={asked!r:.100}, expected 1: a response has one choice. Ask again for more."
        )
    for name in NOT_TAKEN:
        value = getattr(config, name, None)
        if value is not None and value != getattr(RequestConfig, name, None):
            tell_once(
                f"A scheduler's RequestConfig has {name}={value!r:.100}. It is ignored: the recipe sets the "
                "sampling parameters. Only stop and max_tokens of a config are used.",
                f"RequestConfig {name}",
            )


NOT_TAKEN = ("temperature", "top_k", "top_p", "repetition_penalty", "num_beams", "seed", "best_of", "presence_penalty",
             "frequency_penalty", "length_penalty", "top_logprobs")  # fmt: skip
MAX_EMPTY = 16  # responses behind the end of a rollout; after them a request is an error


class SchedulerSession(RolloutSession):
    """The engine's side of one rollout.

    Args:
        env, rollout, llm, sampling_params: As in `RolloutSession`.
        protocol: The module of ms-swift's types.

    Attributes:
        drives: By the last response of a conversation by `drive`, all of it.
        given: By the same, what its output got.
        prompt: Of the data set's row.
        images: What reads the images of requests, and keeps their pictures.
        num_empty: Responses behind the end.
    """

    def __init__(self, env: Any, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None, protocol: Any):
        super().__init__(env, rollout, llm, sampling_params)
        self.protocol, self.loop = protocol, asyncio.get_running_loop()
        self.prompt: list[Message] = rollout.row.get("prompt") or rollout.row.get("messages") or []
        self.images = RequestImages(self.tokenizer)
        self.drives: dict[str, list[Sample]] = {}
        self.given: dict[str, dict[str, list]] = {}
        self._key = secrets.token_hex(8)
        self._tasks: set[asyncio.Task] = set()
        self.num_empty = 0
        self._parents: dict[str, Sample | None] = {}  # of empty responses, by their keys

    # -- what the scheduler asks --

    async def infer(self, request: Any, config: Any) -> Any:
        """A response. Where there is no room for one, an empty one that is cut off.

        Raises:
            SchedulerFailure: the request cannot be answered.
        """
        if self.closed:
            raise RolloutOver("The conversation is over. Expected no further request.")
        self._tasks.add(asyncio.current_task())
        try:
            return await self._infer(request, config)
        finally:
            self._tasks.discard(asyncio.current_task())

    async def finish(self) -> None:
        """Cancel the requests in flight."""
        self.closed = True
        await end_all(self._tasks)

    def plain(self, ids: list[int]) -> str:
        """Decode ids, without tokens that end a turn."""
        return self.format.text([token for token in ids if token not in self.format.ends])

    async def _infer(self, request: Any, config: Any) -> Any:
        check_sampling(config)
        try:
            shown = await self.images.of(request)
            reading = read_request(
                request,
                self.samples,
                self.env,
                self.format,
                self.tokenizer,
                self.plain,
                self.prompt,
                self.context,
                shown,
            )
        except SchedulerFailure:
            raise
        except Exception as error:  # whatever the scheduler or a chat template made of it
            text = error_line(error)
            raise SchedulerFailure(f"A request cannot be read: {text}") from error
        try:
            return await self._respond(request, stops_of(config), most_of(config), reading)
        except SchedulerFailure:
            raise
        except Exception as error:
            self.failure = error
            raise

    async def drove(
        self, choice: Any, text: Any, same_message: bool, segment: tuple | None, masked: bool, weight: bool | None
    ) -> None:
        """Take over what a turn of `drive` made of a response.

        Args:
            choice: Of the response.
            text: What its message says now; None where the history before it was edited.
            same_message: Whether the next request goes on in it.
            segment: As `keep` takes it: ids, a mask and logprobs; None: the text says it.
            masked: Whether the scheduler gave that mask.
            weight: Whether the message says itself that it is trained.
        """
        sample = self.sample_of(choice)
        if isinstance(text, list):  # ids, as in 4.6
            text = self.plain(text)
            text = text if text.startswith(sample.start) else sample.start + text
        sample.masked, sample.weight = masked, weight
        if segment is not None:
            text = sample.text if text is None else text
            keep(sample, text, *segment, self.format, self.context)
        elif text is not None:
            revise(sample, text, same_message, self.format, self.context)

    async def ended(self, choices: list[Any]) -> dict[str, list]:
        """Note the responses of a conversation by `drive`. Returns what `RolloutOutput` takes of its last messages."""
        drive = [self.sample_of(choice) for choice in choices]
        if not drive:
            return {}
        self.drives[drive[-1].key] = drive
        self.given[drive[-1].key] = given = self._given(drive)
        return given

    def _given(self, drive: list[Sample]) -> dict[str, list]:
        groups = messages_of(drive[-1])
        ids = [join(each.ids for each in group) for group in groups]
        masks = [join(each.turn.per_token(1, 0) + [0] * len(each.tail) for each in group) for group in groups]
        logprobs = [
            [x for each in group for x, one in zip(each.turn.logprobs or [], each.turn.per_token(1, 0)) if one]
            for group in groups
        ]
        is_masked = any(each.masked for group in groups for each in group)
        return {
            "response_token_ids": ids,
            "response_loss_mask": masks if is_masked else [],
            "rollout_logprobs": logprobs,
        }

    def so_far(self) -> list[Any]:
        """All that was sampled, as an output: for a scheduler that did not end when its room was spent."""
        if not self.samples:
            return []
        last = self.samples[-1]
        self.drives[last.key] = list(self.samples)
        messages = last.messages[:-1] if last.start else last.messages
        messages = [{**message, "content": with_tags(message["content"])} for message in messages]
        response = self._response(None, last.prompt_ids, last.turn, last.key)
        said = [*messages, {"role": "assistant", "content": last.bare}]
        return [RolloutOutput(response=response, messages=said, rollout_infos={"num_turns": len(self.samples)})]

    def is_empty(self, choice: Any) -> bool:
        """Whether a choice comes from an empty response."""
        return getattr(choice, "sample_key", None) in self._parents

    def sample_of(self, choice: Any) -> Sample | None:
        """The response of a choice; of an empty one the response that it would have gone on from.

        Raises `SchedulerFailure` for a choice that was not given here.
        """
        key, ids = getattr(choice, "sample_key", None), getattr(choice, "token_ids", None)
        if key in self._parents:
            return self._parents[key]
        found = [sample for sample in self.samples if sample.key == key]
        if not found and key is None and ids:  # a copy of it
            found = [sample for sample in self.samples if sample.turn.token_ids == list(ids)]
        if not found:
            raise SchedulerFailure(
                "A response is none that infer_async gave in this conversation. Return one of those."
            )
        return found[-1]

    # -- one response --

    async def _respond(self, request: Any, stops: tuple[str, ...], most: int | None, reading: Reading) -> Any:
        number, key = self._num_requests, f"{self._key}-{self._num_requests}"
        self._num_requests += 1
        going, prompt_ids, num_new = reading.going, reading.prompt_ids, reading.num_new
        parent = self._parents[key] = going and going.parent
        lacking = self.stop_reason or self.count_calls(prompt_ids)
        if lacking is None and self.left(num_new) <= 0:
            lacking = StopReason.MAX_TOKENS
        if lacking is not None:
            self.stop(lacking)
            return self._response(request, prompt_ids, None, key)
        if reading.in_record:
            parent.is_read, parent.tail, parent.text = True, reading.behind, parent.text + going.behind
        with self.in_flight():  # a request that is refused does not set the clock back
            turn = await self.sample(reading.messages, prompt_ids, num_new, most, reading.tools_by_name, stops)
        if turn is None:
            return self._response(request, prompt_ids, None, key)
        del self._parents[key]
        start, said = said_before(reading.messages), going.said if going else []
        is_cut = going is not None and going.kept < len(going.parent.turn.token_ids)
        text = start + turn.text
        sample = Sample(
            number,
            reading.messages,
            prompt_ids,
            turn,
            parent,
            said,
            reading.fresh,
            num_new,
            key,
            reading.tools,
            start,
            is_cut,
            reading.behind,
            text,
            text,
        )
        bisect.insort(self.samples, sample, key=lambda each: each.number)
        return self._response(request, prompt_ids, turn, key)

    def left(self, num_new: int) -> int:
        """As in `RolloutSession`, and in each response again where the length is counted per round."""
        return super().left(num_new) if self.env.length_scope == "total" else self.env.max_completion_length

    def _response(self, request: Any, prompt_ids: list[int], turn: Turn | None, key: str) -> Any:
        """The response to a request. Its lists are the scheduler's own: some plug-ins change them in place.

        Raises `RolloutOver` after too many empty ones.
        """
        if turn is None:
            self.num_empty += 1
            if self.num_empty > MAX_EMPTY:
                self.over.set()
                raise RolloutOver(f"The rollout is over: {self.stop_reason}. Expected no further request.")
        protocol, ids = self.protocol, list(turn.token_ids) if turn else []
        calls = [
            protocol.ChatCompletionMessageToolCall(
                protocol.Function(call.name, json.dumps(call.arguments, ensure_ascii=False)), id=call_id(k)
            )
            for k, call in enumerate(turn.calls if turn else [])
            if not call.error
        ]
        logprobs = turn.logprobs if turn else []
        content = None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]}
        message = protocol.ChatMessage("assistant", turn.text if turn else "", tool_calls=calls or None)
        choice = protocol.ChatCompletionResponseChoice(
            index=0,
            message=message,
            finish_reason=turn.finish_reason if turn else "length",
            logprobs=content,
            token_ids=ids,
        )
        choice.sample_key, choice.is_over = key, turn is None
        usage = protocol.UsageInfo(len(prompt_ids), len(ids), len(prompt_ids) + len(ids))
        return protocol.ChatCompletionResponse(
            model="policy", choices=[choice], usage=usage, id=getattr(request, "uuid", None) or key
        )
