"""ms-swift's base classes of schedulers: a conversation is their `run`, or their `step` and `check_finished`."""

from __future__ import annotations

from typing import Any

from mt_grpo.adapters.swift_loop import drive, drive_all
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
