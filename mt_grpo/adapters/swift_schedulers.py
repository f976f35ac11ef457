"""ms-swift's base classes of schedulers: a conversation is their `run`, or their `step` and `check_finished`."""

from __future__ import annotations

from typing import Any

from mt_grpo.adapters.swift_loop import add_response, drive, drive_all
from mt_grpo.adapters.swift_protocol import RolloutOutput, logprobs_of


class RolloutScheduler:
    """Runs conversations of one turn.

    Both constructors are taken: `(infer_engine, max_turns)` of 3.8 and later, and `(max_turns)` of before, which
    ms-swift's documentation still shows.
    """

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any):
        if isinstance(infer_engine, int):
            infer_engine, max_turns = None, infer_engine
        self.infer_engine, self.max_turns = infer_engine, max_turns
        self._tokenizer, self._template = kwargs.get("tokenizer"), kwargs.get("template")

    @property
    def engine(self) -> Any:
        """The same as `infer_engine`."""
        return self.infer_engine

    @property
    def tokenizer(self) -> Any:
        """The policy's."""
        return self._tokenizer or getattr(self.infer_engine, "tokenizer", None)

    async def on_trajectory_start(self, requests: list) -> None:
        """Before the first turn. It may change the requests."""

    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """After each response: a dict that may have `done` and `rollout_infos`."""
        return {}

    async def async_infer(self, infer_requests: list, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        """The outputs of several conversations, which run at the same time."""
        kwargs.pop("use_tqdm", None)
        return await drive_all(self, infer_requests, request_config, **kwargs)

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        """One conversation: an output, or a list of them."""
        response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
        infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
        ids = [list(response.choices[0].token_ids)]
        return RolloutOutput(response=response, messages=infer_request.messages, response_token_ids=ids,
                             rollout_infos={"num_turns": 1})  # fmt: skip

    # Helpers of 4.6, for a `run` of one's own.

    def append_assistant_completion(self, infer_request: Any, completion: str) -> bool:
        """Put a response behind the messages; whether it goes on the assistant's last one."""
        same = bool(infer_request.messages) and infer_request.messages[-1]["role"] == "assistant"
        self.snapshot_and_materialize_assistant_messages(infer_request)
        add_response(infer_request.messages, completion)
        return same

    def prepare_response_continuation(self, response_choice: Any) -> tuple[list[int], list[int], list[float]]:
        """(ids, mask, logprobs) of a response, for a scheduler that puts its own behind."""
        ids = list(response_choice.token_ids or [])
        return ids, [1] * len(ids), logprobs_of(response_choice)

    def get_response_token_data(
        self, infer_request: Any, response_choice: Any, is_continuation: bool = False,
        response_token_ids: list[int] | None = None, response_loss_mask: list[int] | None = None,
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """(ids, mask) of a response, or of what the scheduler has for it."""
        ids = list(response_choice.token_ids or []) if response_token_ids is None else list(response_token_ids)
        return ids, [1] * len(ids) if response_loss_mask is None else list(response_loss_mask)

    def set_assistant_message_token_ids(self, infer_request: Any, token_ids: list[int]) -> None:
        """Have the assistant's last message be ids."""
        message = next((each for each in reversed(infer_request.messages) if each["role"] == "assistant"), {})
        message["content"] = list(token_ids)

    def snapshot_and_materialize_assistant_messages(self, infer_request: Any) -> list[tuple[dict, list[int]]]:
        """Have contents that are ids be text; returns the messages with their ids."""
        found = [(each, each["content"]) for each in infer_request.messages if isinstance(each["content"], list)]
        for message, ids in found:
            message["content"] = self.tokenizer.decode(ids, skip_special_tokens=False)
        return found

    @staticmethod
    def restore_assistant_message_snapshots(snapshots: list[tuple[dict, list[int]]]) -> None:
        """Have them be ids again."""
        for message, ids in snapshots:
            message["content"] = ids


class MultiTurnScheduler(RolloutScheduler):
    """Turns by `step`, until `check_finished`. Or a `run` of its own, with `self.infer_engine.infer_async`."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        """One conversation: an output, or a list of them."""
        return await drive(self, infer_request, request_config, **kwargs)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """The next request: a dict with `infer_request`, and perhaps ids, their mask, logprobs, infos."""
        raise NotImplementedError(f"{type(self).__name__} has neither step nor run.")

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        """Whether this turn is the last: it was cut off, or `max_turns` is reached."""
        return response_choice.finish_reason == "length" or bool(self.max_turns and current_turn >= self.max_turns)

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: Any) -> list[float]:
        return logprobs_of(response_choice)
