"""One rollout as the engine of an ms-swift scheduler: what it asks is sampled behind what was sampled before.

A scheduler sends messages, and these are text. A request goes on from the response whose message it repeats, and its
ids are those that were sampled. Only what stands behind them is tokenised.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from mt_grpo.adapters.agent_prompts import tools_by_name
from mt_grpo.adapters.agent_session import StopsAt
from mt_grpo.adapters.policy_time import PolicyTime
from mt_grpo.adapters.swift_loop import SchedulerFailure
from mt_grpo.adapters.swift_messages import keys_of, read_messages, rendered, said_before
from mt_grpo.adapters.swift_samples import Sample, messages_of
from mt_grpo.control_tokens import neutralise
from mt_grpo.hermes import call_id
from mt_grpo.rollout import Context, Message, Rollout, StopReason, Turn, join
from mt_grpo.tool_results import error_text


class SchedulerSession(PolicyTime):
    """The engine's side of one rollout.

    Args:
        env: The conversations, with their limits and their tool format.
        rollout: What is filled in the end.
        llm: The backend.
        sampling_params: The policy's.
        protocol: The module of ms-swift's types.

    Attributes:
        samples: All responses.
        stop_reason: Set where no further response is given.
        failure: What the trainer must hear of, such as a server that is lost.
    """

    def __init__(self, env: Any, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None, protocol: Any):
        super().__init__()
        self.env, self.rollout, self.llm, self.params = env, rollout, llm, sampling_params or {}
        self.protocol, self.loop = protocol, asyncio.get_running_loop()
        self.tokenizer = env._tokenizer(llm)
        self.format = env.format_of(self.tokenizer)
        self.samples: list[Sample] = []
        self.stop_reason: StopReason | None = None
        self.failure: Exception | None = None
        self._num_requests = 0

    # -- what the scheduler asks --

    async def infer(self, request: Any, config: Any) -> Any:
        """A response. An empty one that is cut off where there is no room; after that none.

        Raises:
            SchedulerFailure: the request cannot be answered.
        """
        with self.in_flight():
            try:
                return await self._infer(request, config)
            except SchedulerFailure:
                raise
            except Exception as error:
                self.failure = error
                raise

    async def drove(self, choice: Any, text: str, segment: tuple[list, list, list | None] | None) -> None:
        """Note that a response is a turn of `drive`; `segment` as `keep` takes it."""
        sample = self.sample_of(choice)
        if sample is not None:
            sample.driven, sample.masked = True, segment is not None
            if segment is not None:
                self.keep(sample, text, *segment)

    async def segments(self, choice: Any) -> dict[str, list]:
        """What `RolloutOutput` takes of the messages up to a response: ids, masks if there are any, logprobs."""
        sample = self.sample_of(choice)
        groups = messages_of(sample) if sample else []
        ids = [join(each.ids for each in group) for group in groups]
        masks = [join(each.turn.per_token(1, 0) + [0] * len(each.tail) for each in group) for group in groups]
        logprobs = [
            [
                value
                for each in group
                for value, one in zip(each.turn.logprobs or [], each.turn.per_token(1, 0)) if one
            ]
            for group in groups
        ]  # fmt: skip
        is_masked = any(each.masked for group in groups for each in group)
        return {"response_token_ids": ids, "response_loss_mask": masks if is_masked else [],
                "rollout_logprobs": logprobs}  # fmt: skip

    def keep(self, sample: Sample, text: str, ids: list[int], mask: list[int], logprobs: list[float] | None) -> None:
        """Have a response's message end with these ids, and say this text. Raises `SchedulerFailure`."""
        ids, mask = self._without_prompt(sample, ids, mask)
        sampled, known = sample.turn.token_ids, sample.turn.logprobs
        same = next((k for k, pair in enumerate(zip(ids, sampled)) if pair[0] != pair[1]), min(len(ids), len(sampled)))
        if any(mask[same:]):
            raise SchedulerFailure(
                f"response_loss_mask is 1 for id {ids[same + mask[same:].index(1)]} at {same + mask[same:].index(1)}, "
                f"which the policy did not sample: the response has {len(sampled)} ids, and {same} of them were kept. "
                "Expected 0 for all that the scheduler adds."
            )
        known = known and known[:same]
        if logprobs is not None and known is not None:
            given = iter(logprobs)
            known = [next(given) if one else logprob for one, logprob in zip(mask, known)]
        kept = mask[:same] if 0 in mask[:same] else None
        said = sample.turn.text if same == len(sampled) else self.format.text(sampled[:same])
        sample.turn = dataclasses.replace(sample.turn, token_ids=sampled[:same], logprobs=known, mask=kept, text=said)
        sample.tail, sample.text = ids[same:], text

    def _without_prompt(self, sample: Sample, ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
        """Ids without those in front that the generation prompt has already, such as an opened thinking's."""
        sampled, read = sample.turn.token_ids, sample.prompt_ids
        if ids[: len(sampled)] == sampled[: len(ids)]:
            return ids, mask
        most = next((k for k, one in enumerate(mask) if one), len(mask))
        same = next((size for size in range(most, 0, -1) if read[-size:] == ids[:size]), 0)
        return ids[same:], mask[same:]

    def sample_of(self, choice: Any) -> Sample | None:
        """The response of a choice; None for one that was not given here, or that was empty."""
        number = getattr(choice, "sample_number", None)
        return next((sample for sample in self.samples if sample.number == number), None)

    # -- one response --

    async def _infer(self, request: Any, config: Any) -> Any:
        number, messages = self._num_requests, read_messages(request, self.format.text, self.env.keeps_thinking)
        self._num_requests += 1
        tools = tools_by_name(getattr(request, "tools", None) or [])
        parent, said = self._parent(messages)
        try:
            fresh = self._fresh(parent, messages, said) if parent else None
            context = parent.prompt_ids + parent.turn.token_ids if parent else []
            if parent and fresh is None:  # an end of turn was sampled where the message goes on: it is not read
                prompt_ids = context[:-1] + parent.tail + self._suffix(parent, said)
            else:
                prompt_ids = context + fresh if parent else self._prompt(messages, tools)
        except Exception as error:  # whatever a chat template raises
            raise SchedulerFailure(f"The chat template refuses the messages: {error_text(error)}") from error
        if parent and parent.is_read:  # only one goes on in its record
            fresh = None
        room = self._room(prompt_ids, len(fresh or []), getattr(config, "max_tokens", None))
        if room <= 0:
            return self._response(request, prompt_ids, None, number)
        if parent:
            parent.is_read = True
        turn = await self._sample(messages, prompt_ids, room, tools, getattr(config, "stop", None) or [])
        start = said_before(messages)
        sample = Sample(number, messages, start, prompt_ids, turn, parent, fresh, said, start + turn.text)
        self.samples.append(sample)
        self.samples.sort(key=lambda each: each.number)
        return self._response(request, prompt_ids, turn, number)

    def _parent(self, messages: list[Message]) -> tuple[Sample | None, list[Message]]:
        """(the response whose message a request repeats, or None; the messages behind it)."""
        keys = keys_of(messages)
        place = max((k for k, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if place is None:
            return None, []
        said, text = messages[place + 1 :], messages[place]["content"]
        found = [sample for sample in self.samples if sample.before == keys[:place]]
        same = [sample for sample in found if sample.text.strip() == text.strip()] or [
            sample for sample in found if text.startswith(sample.text)
        ]
        if same:
            parent = max(same, key=lambda sample: (len(sample.text), not sample.is_read, sample.number))
            if not said or parent.text.strip() != text.strip():
                self._put_behind(parent, text)
            return (parent, said) if parent.text.strip() == text.strip() else (None, [])
        if not said and found and self._cut(found[-1], text):
            return found[-1], said
        return None, []

    def _put_behind(self, sample: Sample, text: str) -> None:
        """What a scheduler wrote behind a response's text becomes part of the message."""
        behind = text[len(sample.text) :] if text.startswith(sample.text) else ""
        if behind and not sample.is_read:
            sample.tail = sample.tail + self.format.text_ids(neutralise(behind, self.tokenizer))
            sample.text = text

    def _cut(self, sample: Sample, text: str) -> bool:
        """Cut a response where the scheduler cut its text; whether anything of it is left.

        What a token holds beyond the cut is tokenised again, as text of the scheduler.
        """
        ids = sample.turn.token_ids
        if sample.is_read or not text.startswith(sample.start):
            return False
        wanted, low, high = text[len(sample.start) :], 0, len(ids)
        while low < high:  # the longest beginning of the ids whose text is there
            middle = (low + high + 1) // 2
            low, high = (middle, high) if wanted.startswith(self.format.text(ids[:middle])) else (low, middle - 1)
        if low == 0:
            return False
        kept = self.format.text(ids[:low])
        logprobs, mask = sample.turn.logprobs, sample.turn.mask
        sample.turn = dataclasses.replace(
            sample.turn, token_ids=ids[:low], logprobs=logprobs and logprobs[:low], mask=mask and mask[:low],
            text=kept, calls=[], answer=None,
        )  # fmt: skip
        sample.text, sample.tail = sample.start + kept, []
        self._put_behind(sample, text)
        return True

    # -- ids --

    def _fresh(self, parent: Sample, messages: list[Message], said: list[Message]) -> list[int] | None:
        """The ids behind a response; None where its message goes on behind an end of turn that was sampled."""
        ids = parent.turn.token_ids
        ended = bool(ids) and ids[-1] in self.format.ends
        if ended and (parent.tail or not said):
            return None
        return parent.tail + self._suffix(parent, said)

    def _suffix(self, parent: Sample, said: list[Message]) -> list[int]:
        if not said:
            return []
        ids = [] if parent.tail else parent.turn.token_ids  # a tail stands behind an end of turn that is not read
        return self.format.suffix_ids(parent.turn.calls, rendered(said, parent.turn.calls, self.tokenizer), ids)

    def _prompt(self, messages: list[Message], tools: dict[str, Any]) -> list[int]:
        """The ids of messages that begin a record."""
        begun = said_before(messages)
        whole = rendered(messages[:-1] if begun else messages, [], self.tokenizer)
        return self.env.prompt_ids(whole, self.tokenizer, tools) + (self.format.text_ids(begun) if begun else [])

    def _room(self, prompt_ids: list[int], num_fresh: int, most: int | None) -> int:
        """How many tokens may be sampled. Sets `stop_reason` where there are none; raises the second time."""
        env = self.env
        context = env.max_model_len or getattr(self.llm, "max_model_len", None) or float("inf")
        left = env.max_completion_length
        if env.length_scope == "total":
            left -= num_fresh + sum(len(each.fresh or []) + len(each.turn.token_ids) for each in self.samples)
        reason = StopReason.MAX_TOKENS if left <= 0 else None
        if len(prompt_ids) >= context:
            reason = StopReason.CONTEXT_LENGTH
        elif len(self.samples) >= env.max_model_calls:
            reason = StopReason.MAX_TURNS
        if reason is None:
            return min(left, most or left)
        if self.stop_reason is not None:
            raise SchedulerFailure(f"The rollout is over: {self.stop_reason}. Expected no further request.")
        self.stop_reason = reason
        return 0

    async def _sample(
        self, messages: list[Message], prompt_ids: list[int], room: int, tools: dict[str, Any], stops: list[str]
    ) -> Turn:
        # What is not in the room counts as spent, so that `sample_turn` keeps to it.
        edited = Context(messages, prompt_ids, self.env.max_completion_length - room)
        rollout = self.rollout
        asked = Rollout([], [], rollout.index, row=rollout.row, environment=rollout.environment, tools=tools,
                        edited=edited)  # fmt: skip
        llm = StopsAt(self.llm, tuple(stops), self.format.text) if stops else self.llm
        return await self.env.sample_turn(asked, llm, self.params)

    def _response(self, request: Any, prompt_ids: list[int], turn: Turn | None, number: int) -> Any:
        """The response to a request. Its lists are the scheduler's own: some plug-ins change them in place."""
        protocol, ids = self.protocol, list(turn.token_ids) if turn else []
        calls = [
            {"id": call_id(k), "type": "function",
             "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
            for k, call in enumerate(turn.calls if turn else []) if not call.error
        ]  # fmt: skip
        logprobs = turn.logprobs if turn else []
        content = None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]}
        message = protocol.ChatMessage("assistant", turn.text if turn else "", tool_calls=calls or None)
        choice = protocol.ChatCompletionResponseChoice(
            index=0, message=message,
            finish_reason=turn.finish_reason if turn else "length", logprobs=content, token_ids=ids,
        )  # fmt: skip
        choice.sample_number = number
        usage = protocol.UsageInfo(len(prompt_ids), len(ids), len(prompt_ids) + len(ids))
        return protocol.ChatCompletionResponse(
            model="policy", choices=[choice], usage=usage, id=getattr(request, "uuid", None) or f"request-{number}"
        )
