"""One rollout as the engine of an ms-swift scheduler: each request is sampled after what it repeats.

A scheduler sends messages, and these are text. A request goes on from the response whose message it repeats, and its
ids are those that were sampled. Only what follows them is tokenised.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import secrets
from typing import Any, NamedTuple

from mt_grpo.base.errors import tell_once
from mt_grpo.conversation.formats.choose import call_id
from mt_grpo.images.pictures import Picture
from mt_grpo.integrations.ms_swift.loop import RolloutOver, SchedulerFailure, failing
from mt_grpo.integrations.ms_swift.messages import RequestImages, prefill_of, read_messages, rendered
from mt_grpo.integrations.ms_swift.protocol import RolloutOutput, listed_tools
from mt_grpo.integrations.ms_swift.samples import Sample, edit, goes_on, messages_of, own_ids
from mt_grpo.integrations.session import RolloutSession, end_all, ids_of_prompt, tools_by_name
from mt_grpo.rollout import Message, Rollout, StopReason, Turn, join

IGNORED = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")  # of a config: the recipe sets them
MAX_EMPTY = 16  # responses after the end of a rollout; after them a request is an error


class Reading(NamedTuple):
    """A request, tokenised to ids."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    stops: tuple[str, ...]  # texts that end the response
    most: int | None  # tokens of the response
    prompt_ids: list[int]  # all that the model reads
    parent: Sample | None = None  # the response that it goes on from
    said: tuple[Message, ...] | list[Message] = ()  # the messages after the parent's
    added: tuple[int, ...] | list[int] = ()  # ids that the scheduler put after the parent, in its message
    num_new: int = 0  # of prompt_ids, those after the parent's
    in_record: bool = False  # whether the parent's record goes on: what was read and sampled stands there as it was


class SchedulerSession(RolloutSession):
    """The engine's side of one rollout."""

    def __init__(self, env: Any, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None, protocol: Any):
        super().__init__(env, rollout, llm, sampling_params)
        self.protocol, self.loop = protocol, asyncio.get_running_loop()
        prompt = rollout.row.get("prompt") or rollout.row.get("messages")
        self.prompt: list[Message] = prompt if isinstance(prompt, list) else []  # of the row, unless it is a text
        self.images = RequestImages(self.tokenizer)
        self._key = secrets.token_hex(8)  # no choice of another conversation is taken for one of this
        self._by_key: dict[str, Sample | None] = {}  # of an empty response: the one that it would have gone on from
        self._tasks: set[asyncio.Task] = set()
        self._num_empty = 0

    def left(self, num_new: int) -> int:
        """As in `RolloutSession`, and in each response again if the length is counted per round."""
        return super().left(num_new) if self.env.length_scope == "total" else self.env.max_completion_length

    # -- a request --

    async def infer(self, request: Any, config: Any) -> Any:
        """A response. If there is no room for one, an empty one that is truncated. Raises `SchedulerFailure`."""
        if self.closed:
            raise RolloutOver("The conversation is over. Expected no further request.")
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            with failing("A request cannot be read"):  # whatever the scheduler or a chat template made of it
                reading = self._read(request, config, await self.images.of(request))
            return await self._respond(request, reading)
        finally:
            self._tasks.discard(task)

    async def finish(self) -> None:
        """Cancel the requests in flight."""
        self.closed = True
        await end_all(self._tasks)

    def _read(self, request: Any, config: Any, shown: list[Picture] | None) -> Reading:
        """Convert a scheduler's request to what the model reads for it.

        An end of turn that was sampled is read if messages follow. If the message goes on instead, it is not: a record
        begins. So it does if the assistant's last message is not as it was sampled; its text is read as it is.
        """
        env, written, context = self.env, self.format, self.context
        messages = read_messages(request, env.keeps_thinking, shown)
        kwargs = getattr(request, "chat_template_kwargs", None)
        if kwargs and kwargs != env.chat_template_kwargs:
            raise SchedulerFailure(
                f"A request has chat_template_kwargs={kwargs}, and the recipe {env.chat_template_kwargs}. Set the key "
                "of the recipe: all conversations have the same."
            )
        tools = listed_tools(getattr(request, "tools", None))
        stops, most = read_config(config)
        base, prefill = messages, []
        going = goes_on(self.samples, messages, json.dumps(tools, sort_keys=True))
        if going is None and prefill_of(messages):
            base, prefill = messages[:-1], own_ids(messages[-1]["content"], written, context)
            going = goes_on(self.samples, base, json.dumps(tools, sort_keys=True))
        if going is None or (prefill and not going.said):
            whole = rendered(base, [], self.tokenizer, self.prompt)
            ids = ids_of_prompt(env, whole, self.tokenizer, tools_by_name(tools), context) + prefill
            return Reading(messages, tools, stops, most, ids)
        parent, calls, sampled = going.parent, going.parent.turn.calls, going.parent.turn.token_ids
        added = parent.tail + own_ids(going.added, written, context)
        drops_end = bool(sampled) and sampled[-1] in written.ends and bool(added or not going.said)
        new = list(added)
        if going.said:
            texts = rendered(going.said, calls, self.tokenizer, self.prompt)
            new += written.suffix_ids(calls, texts, added or sampled, context) + prefill
        ids = parent.prompt_ids + (sampled[:-1] if drops_end else sampled) + new
        said = going.said + messages[len(base) :]
        in_record = not (parent.is_read or drops_end)
        return Reading(messages, tools, stops, most, ids, parent, said, added, len(new), in_record)

    async def _respond(self, request: Any, reading: Reading) -> Any:
        number, parent, prompt_ids = self._num_requests, reading.parent, reading.prompt_ids
        self._num_requests += 1
        lacking = self.stop_reason or self.count_calls(prompt_ids)
        if lacking is None and self.left(reading.num_new) <= 0:
            lacking = StopReason.MAX_TOKENS
        turn, sample = None, parent
        if lacking is not None:
            self.stop(lacking)
        else:
            if reading.in_record:
                parent.is_read = True
            by_name = tools_by_name(reading.tools)
            try:
                with self.in_flight():  # a request that is refused does not set the clock back
                    turn = await self.sample(
                        reading.messages, prompt_ids, reading.num_new, reading.most, by_name, reading.stops
                    )
            except Exception as error:
                self.failure = error
                raise
        if turn is not None:
            start, tools = prefill_of(reading.messages), json.dumps(reading.tools, sort_keys=True)
            fresh = prompt_ids[len(prompt_ids) - reading.num_new :] if reading.in_record else None
            read = (number, reading.messages, prompt_ids, turn, parent, list(reading.said), fresh, reading.num_new)
            sample = Sample(*read, tools, start, start + turn.text, start + turn.text, list(reading.added))
            bisect.insort(self.samples, sample, key=lambda each: each.number)
        self._by_key[f"{self._key}-{number}"] = sample
        return self._response(request, prompt_ids, turn, f"{self._key}-{number}")

    def _response(self, request: Any, prompt_ids: list[int], turn: Turn | None, key: str) -> Any:
        """The response to a request. Its lists are the scheduler's own: some plug-ins change them in place."""
        if turn is None:
            self._num_empty += 1
            if self._num_empty > MAX_EMPTY:
                self.over.set()
                raise RolloutOver(f"The rollout is over: {self.stop_reason}. Expected no further request.")
            turn = Turn([], [], "", "length")
        protocol, ids = self.protocol, list(turn.token_ids)
        calls = [
            protocol.ChatCompletionMessageToolCall(
                protocol.Function(call.name, json.dumps(call.arguments, ensure_ascii=False)), id=call_id(k)
            )
            for k, call in enumerate(turn.calls)
            if not call.error
        ]
        choice = protocol.ChatCompletionResponseChoice(
            index=0,
            message=protocol.ChatMessage("assistant", turn.text, tool_calls=calls or None),
            finish_reason=turn.finish_reason,
            logprobs=None if turn.logprobs is None else {"content": [{"logprob": value} for value in turn.logprobs]},
            token_ids=ids,
        )
        choice.sample_key, choice.is_over = key, not ids
        usage = protocol.UsageInfo(len(prompt_ids), len(ids), len(prompt_ids) + len(ids))
        uuid = getattr(request, "uuid", None) or key
        return protocol.ChatCompletionResponse(model="policy", choices=[choice], usage=usage, id=uuid)

    def sample_of(self, choice: Any) -> Sample | None:
        """The response of a choice; of an empty one the response that it would have gone on from."""
        if getattr(choice, "sample_key", None) not in self._by_key:
            raise SchedulerFailure("A response is none that infer_async gave in this conversation.")
        return self._by_key[choice.sample_key]

    # -- a conversation by `drive` --

    async def end_turn(self, choice: Any, text: str | None, same_message: bool, ids: Any, mask: Any) -> None:
        """Take over what a turn made of a response, as `edit` takes it."""
        sample = self.sample_of(choice)
        edit(sample, text, same_message, ids, mask, self.format, self.context)
        sample.masked = bool(mask)

    async def end_drive(self, choices: list[Any]) -> dict[str, list]:
        """Note the responses of a conversation. Returns the ids and masks of its last record's messages."""
        if not choices:
            return {}
        drive = [self.sample_of(choice) for choice in choices]
        groups = messages_of(drive[-1])
        ids = [join(each.turn.token_ids + each.tail for each in group) for group in groups]
        masks = [join(each.turn.per_token(1, 0) + [0] * len(each.tail) for each in group) for group in groups]
        is_masked = any(each.masked for each in join(groups))
        drive[-1].drive, drive[-1].given = drive, (ids, masks if is_masked else [])
        return {"response_token_ids": ids, "response_loss_mask": masks if is_masked else []}

    def so_far(self) -> list[Any]:
        """All that was sampled, as an output: for a scheduler that did not end when its room was spent."""
        if not self.samples:
            return []
        last = self.samples[-1]
        last.drive = list(self.samples)
        response = self._response(None, last.prompt_ids, last.turn, f"{self._key}-{last.number}")
        return [RolloutOutput(response=response, rollout_infos={"num_turns": len(self.samples)})]


def read_config(config: Any) -> tuple[tuple[str, ...], int | None]:
    """(the texts that end a response, its limit in tokens or None) of a `RequestConfig`."""
    if getattr(config, "n", None) not in (None, 1):
        raise SchedulerFailure(f"A request's config has n={config.n!r:.100}, expected 1: a response has one choice.")
    for name in IGNORED:
        if (value := getattr(config, name, None)) is not None:
            tell_once(
                f"A scheduler's RequestConfig has {name}={value!r:.100}. It is ignored: the recipe sets the "
                "sampling parameters. Only stop and max_tokens of a config are used.",
                f"RequestConfig {name}",
            )
    stops, most = getattr(config, "stop", None) or (), getattr(config, "max_tokens", None)
    stops = (stops,) if isinstance(stops, str) else tuple(map(str, stops))
    return stops, None if most is None else max(1, int(most))
