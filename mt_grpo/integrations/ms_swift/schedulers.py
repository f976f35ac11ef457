"""ms-swift's base classes of schedulers: a conversation is their `run`, or their `step` and `check_finished`."""

from __future__ import annotations

import ast
import copy
import operator
import re
from collections.abc import Callable
from typing import Any

from mt_grpo.conversation.formats.base import behind_thinking
from mt_grpo.integrations.ms_swift.loop import add_response, drive, drive_all
from mt_grpo.integrations.ms_swift.protocol import RolloutOutput, logprobs_of
from mt_grpo.integrations.ms_swift.rewards import MathAccuracy


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

    async def async_infer(self, infer_requests: list, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        """The outputs of several conversations, which run at the same time."""
        kwargs.pop("use_tqdm", None)
        return await drive_all(self, infer_requests, request_config, **kwargs)

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        """One conversation: an output, or a list of them."""
        response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
        infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
        ids = [list(response.choices[0].token_ids)]
        return RolloutOutput(
            response=response, messages=infer_request.messages, response_token_ids=ids, rollout_infos={"num_turns": 1}
        )

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
        self,
        infer_request: Any,
        response_choice: Any,
        is_continuation: bool = False,
        response_token_ids: list[int] | None = None,
        response_loss_mask: list[int] | None = None,
    ) -> tuple[list[int], list[int]]:
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
        """Restore message contents to the ids that they were before."""
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
        """Whether this turn is the last: it was truncated, or `max_turns` is reached."""
        return response_choice.finish_reason == "length" or bool(self.max_turns and current_turn >= self.max_turns)

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: Any) -> list[float]:
        return logprobs_of(response_choice)


# The schedulers of ms-swift that give a tip after a wrong answer: in the same message, or as the user.


NEW_TURN_TIP = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."


class MathTipsScheduler(MultiTurnScheduler):
    """`math_tip_trick`: a wrong answer is taken back once, and the same message goes on behind a tip."""

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
        if self.tips_prompt in infer_request.messages[-2]["content"]:
            return True
        if self.is_right(response_choice.message.content, infer_request):
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


# `tool_call_scheduler`: calls as ReAct writes them, whose results go on in the same message.


OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
CALL = re.compile(r"Action:\s*(.*?)\s*\nAction Input:\s*(.*?)(?:\n|$)", re.DOTALL)


class ToolCallScheduler(MultiTurnScheduler):
    """Runs the first call of a response; a response without one is the last.

    Use it with `stop_words: ["Observation:"]`. A subclass may have other `tools`: functions of one text, by name.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tools: dict[str, Callable[[str], Any]] = {"calculator": arithmetic}

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        """After a response without a call, too."""
        if CALL.search(response_choice.message.content) is None:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """The result behind the response; its ids have mask 0."""
        name, text = CALL.search(response_choice.message.content).groups()
        try:
            result = (
                f"Result: {self.tools[name](text)}" if name in self.tools else f"Error: there is no tool {name!r}."
            )
        except Exception as error:  # any failure of a tool is for the policy to read
            result = f"Error: {error}"
        infer_request.messages[-1]["content"] += result
        return {"infer_request": infer_request, "rollout_infos": {"tool_results": result}}


def arithmetic(text: str) -> int | float:
    """The value of numbers, brackets and + - * /. Raises `ValueError`.

    >>> arithmetic("2 * (3 + 4)")
    14
    """

    def value(node: ast.AST) -> int | float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("expected numbers, brackets and + - * /")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("expected numbers, brackets and + - * /") from None
