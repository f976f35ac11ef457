"""`tool_call_scheduler`: calls as ReAct writes them, whose results go on in the same message."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from mt_grpo.adapters.swift_schedulers import MultiTurnScheduler

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
