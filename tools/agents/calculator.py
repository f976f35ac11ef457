"""An agent for the calculator task, written with only the `openai` package.

    environment: openai_agent
    agent: tools/agents/calculator.py:solve

The client is an `AsyncOpenAI`, whose model `policy` is the one in training. The return value of the function is the
outcome reward, and `client.reward` sets the turn reward of the last turn.
"""

import ast
import json
import operator
from typing import Any

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "Numbers, brackets and + - * /, such as 3 * (4 + 5)."}
            },
            "required": ["expression"],
        },
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, brackets and + - * /, such as 3 * (4 + 5).
    """
    value = compute(ast.parse(expression, mode="eval").body)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def compute(node: ast.AST) -> float:
    """Compute the value of a syntax tree. Raises `ValueError` for anything but numbers and arithmetic operators."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -compute(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](compute(node.left), compute(node.right))
    raise ValueError("expected numbers, brackets and + - * /")


def run_call(call: Any) -> str:
    """Run a tool call. Returns the text that the policy reads: a number, or an error message."""
    try:
        if call.function.name != "calculator":
            raise ValueError(f"there is no tool {call.function.name!r}")
        return calculator(**json.loads(call.function.arguments))
    except (TypeError, ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"Error: {error}"


async def solve(row: dict[str, Any], client: Any) -> float:
    """Let the policy call the calculator until it answers. Returns 1 for the right answer, else 0."""
    messages = [{"role": "system", "content": "Use the calculator, then answer."}]
    messages.append({"role": "user", "content": row["question"]})
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        message = answer.choices[0].message
        if not message.tool_calls:
            return float(message.content.strip() == row["answer"])
        messages.append(message.model_dump(exclude_none=True))
        results = [run_call(call) for call in message.tool_calls]
        for call, result in zip(message.tool_calls, results):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        client.reward(-0.2 if any(result.startswith("Error") for result in results) else 0.2)
