"""ms-swift's base classes of schedulers: a conversation is their `run`, or their `step` and `check_finished`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mt_grpo.integrations.acting import behind_thinking
from mt_grpo.integrations.ms_swift.loop import drive
from mt_grpo.integrations.ms_swift.protocol import RolloutOutput
from mt_grpo.integrations.ms_swift.rewards import MathAccuracy


class RolloutScheduler:
    """Runs conversations of one turn. Its constructor is also called by `(max_turns)`, as ms-swift's page shows it."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any):
        if isinstance(infer_engine, int):
            infer_engine, max_turns = None, infer_engine
        self.infer_engine, self.max_turns, self._tokenizer = infer_engine, max_turns, kwargs.get("tokenizer")

    @property
    def engine(self) -> Any:
        """The engine that samples responses, the same as `infer_engine`."""
        return self.infer_engine

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the policy."""
        return self._tokenizer or getattr(self.infer_engine, "tokenizer", None)

    async def on_trajectory_start(self, requests: list) -> None:
        """Before the first turn. It may change the requests."""

    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """After each response: a dict that may have `done` and `rollout_infos`."""
        return {}

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        """One conversation: an output, or a list of them."""
        response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
        infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
        ids = [list(response.choices[0].token_ids)]
        return RolloutOutput(
            response=response, messages=infer_request.messages, response_token_ids=ids, rollout_infos={"num_turns": 1}
        )


class MultiTurnScheduler(RolloutScheduler):
    """Turns by `step`, until `check_finished`. Or a `run` of its own, with `self.infer_engine.infer_async`."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        """One conversation: an output, or a list of them."""
        return await drive(self, infer_request, request_config, **kwargs)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """The next request: a dict with `infer_request`, and perhaps ids, their mask, logprobs, infos."""
        raise NotImplementedError(f"{type(self).__name__} has neither step nor run.")

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        """Whether this turn is the last: it was truncated, or `max_turns` is reached."""
        return response_choice.finish_reason == "length" or bool(self.max_turns and current_turn >= self.max_turns)

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: Any) -> list[float]:
        return [each["logprob"] for each in (response_choice.logprobs or {}).get("content") or []]


# The schedulers of ms-swift that give a tip after a wrong answer: in the same message, or as the user.


NEW_TURN_TIP = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."


class MathTipsScheduler(MultiTurnScheduler):
    """`math_tip_trick`: a wrong answer is taken back once, and the same message goes on after a tip."""

    tips_prompt = "But wait... It seems I made a mistake,"

    def __init__(self, *args: Any, acc_function: Callable | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.acc_func = acc_function or MathAccuracy()

    def is_right(self, text: str, infer_request: Any) -> bool:
        """Whether a text contains the row's `solution`."""
        return self.acc_func([text], [infer_request.data_dict["solution"]])[0] == 1

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        """After the tip, and where the answer is right."""
        said = infer_request.messages[-1]["content"]
        if self.tips_prompt in said or self.is_right(said, infer_request):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """The tip in place of the answer: everything from the first `<answer>` or `</think>` goes."""
        text = response_choice.message.content
        kept = text[: min(text.find(tag) if tag in text else len(text) for tag in ("<answer>", "</think>"))]
        said = infer_request.messages[-1]["content"]
        infer_request.messages[-1]["content"] = said[: len(said) - len(text)] + kept + self.tips_prompt
        return {"infer_request": infer_request}


class MathTipsMultiTurnScheduler(MathTipsScheduler):
    """`math_tip_trick_multi_turn`: after a wrong answer the user asks once to look again."""

    tips_prompt = NEW_TURN_TIP

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        """After the tip, and where the answer is right."""
        is_tipped = self.tips_prompt in infer_request.messages[-2]["content"]
        if is_tipped or self.is_right(response_choice.message.content, infer_request):
            return True
        return MultiTurnScheduler.check_finished(self, infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """Append the user's tip to the messages."""
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}


class ThinkingModelTipsScheduler(MathTipsMultiTurnScheduler):
    """`thinking_tips_scheduler`: the model reads earlier turns without their thinking; one output per turn."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        """An output for each turn, whose messages hold the thinking of that turn alone."""
        request, turn, outputs = infer_request, 0, []
        while True:
            turn += 1
            response = await self.infer_engine.infer_async(request, request_config, **kwargs)
            choice = response.choices[0]
            request.messages.append({"role": "assistant", "content": choice.message.content})
            outputs.append(
                RolloutOutput(
                    response=response,
                    messages=copy.deepcopy(request.messages),
                    rollout_infos={"num_turns": turn},
                    response_token_ids=list(choice.token_ids),
                )
            )
            if self.check_finished(request, choice, turn):
                return outputs
            request.messages[-1]["content"] = behind_thinking(choice.message.content).strip()
            request = self.step(request, choice, turn)["infer_request"]
