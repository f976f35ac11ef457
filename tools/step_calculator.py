"""A calculator that takes one operation per call: n operations need n calls, each with the last result.

Needs: nothing beyond Python's standard library.

Protects against: code (it matches a pattern and evaluates nothing) and large numbers (more than 9 digits).

>>> calculator("17 * 3"), calculator("4 - 9")
('51', '-5')
"""

import operator
import re
from collections.abc import Hashable
from typing import Any

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ONE_OPERATION = re.compile(r"\s*(-?[0-9]{1,9})\s*([-+*])\s*(-?[0-9]{1,9})\s*")


def calculator(expression: str) -> str:
    """Compute one operation on two integers.

    Args:
        expression: Two integers with + - or * between them, for example 17 * 3

    Returns:
        The value of the expression.
    """
    match = ONE_OPERATION.fullmatch(expression)
    if match is None:
        raise ValueError("expected one operation on two integers, such as 17 * 3")
    return str(OPERATORS[match[2]](int(match[1]), int(match[3])))


def state_key(turns: list[Any]) -> Hashable:
    """The state of a chain: the number of turns and the last result. It never repeats within a rollout."""
    results = [turn.observation for turn in turns if turn.observation is not None and turn.error is None]
    return len(turns), results[-1] if results else None


TOOL_FUNCTIONS = [calculator]
STATE_KEY = state_key
