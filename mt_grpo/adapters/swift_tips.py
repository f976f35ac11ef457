"""The schedulers of ms-swift that give a tip after a wrong answer: in the same message, or as the user."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mt_grpo.adapters.swift_protocol import RolloutOutput
from mt_grpo.adapters.swift_rewards import MathAccuracy
from mt_grpo.adapters.swift_schedulers import MultiTurnScheduler

NEW_TURN_TIP = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."


class MathTipsScheduler(MultiTurnScheduler):
    """`math_tip_trick`: a wrong answer is taken back once, and the same message goes on behind a tip."""

    tips_prompt = "But wait... It seems I made a mistake,"

    def __init__(self, *args: Any, acc_function: Callable | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.acc_func = acc_function or MathAccuracy()

    def is_right(self, text: str, infer_request: Any) -> bool:
        """Whether a text has the row's `solution`."""
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
        if self.tips_prompt in infer_request.messages[-2]["content"]:
            return True
        if self.is_right(response_choice.message.content, infer_request):
            return True
        return MultiTurnScheduler.check_finished(self, infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """The user's tip."""
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
            outputs.append(RolloutOutput(
                response=response, messages=copy.deepcopy(request.messages), rollout_infos={"num_turns": turn},
                response_token_ids=list(choice.token_ids),
            ))  # fmt: skip
            if self.check_finished(request, choice, turn):
                return outputs
            request.messages[-1]["content"] = without_thinking(choice.message.content)
            request = self.step(request, choice, turn)["infer_request"]


def without_thinking(text: str) -> str:
    """What stands behind the thinking.

    >>> without_thinking("<think>a</think> b"), without_thinking("b")
    ('b', 'b')
    """
    return text.rpartition("</think>")[2].strip()
