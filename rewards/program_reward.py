"""Rewards for word problems (GSM8K) that are solved with Python programs, of which each has its own reward.

Recipe: `reward_fn: rewards/program_reward.py`. Dataset column: `answer`, as gsm8k_reward.py reads it. Needs beside it:
gsm8k_reward.py, whose outcome rewards these are, calculator_reward.py and squad_reward.py.
"""

import re
from decimal import Context, Decimal
from typing import Any

from gsm8k_reward import OUTCOME_REWARD_FUNCS, _gold  # noqa: F401  the recipe's loader reads the list
from squad_reward import call_ran_reward_func

_NUMBERS = re.compile(r"(?<![\w.])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?")  # in any text


def answer_printed_reward_func(
    rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any
) -> list[list[float | None] | None]:
    """Reward the first turn whose last program prints the gold number: 0.3; 0.0 for other turns with programs.

    The last number of the last line counts, and of several programs in one turn only the last one: so a turn is one
    guess. None for a turn that ran no program, and for all turns if the row has no gold number.

    >>> from mt_grpo.rollout import ToolCall, ToolResult, Turn
    >>> texts = "17 or 18 or 19", "eggs left:\\nThe answer is 18.000000000000004.", "18"
    >>> turns = [Turn([], None, "", "stop", [ToolCall("code_interpreter", {})], [ToolResult(text)]) for text in texts]
    >>> answer_printed_reward_func(rollout_turns=[turns, turns], answer=["9 + 9 = 18\\n#### 18", "unknown"])
    [[0.0, 0.3, 0.0], None]
    """
    rewards = []
    for turns, gold in zip(rollout_turns, map(_gold, answer), strict=True):
        printed = [_printed(turn.results[-1]) if turn.results else None for turn in turns]
        first = printed.index(gold) if gold in printed else None
        row = [0.3 * (k == first) if turn.results else None for k, turn in enumerate(turns)]
        rewards.append(None if gold is None else row)
    return rewards


def _printed(result: Any) -> Decimal | None:
    """Return the last number of a result's last line, None if there is none, it was cut or the program failed."""
    text = "" if result.error or result.text.endswith("... [cut]") else result.text.rstrip()
    numbers = _NUMBERS.findall(text.rpartition("\n")[2])
    number = Decimal(numbers[-1].replace(",", "")) if numbers else None
    # Of a float 12 digits count: 100 * 1.1 prints 110.00000000000001.
    return Context(12).plus(number) if numbers and "." in numbers[-1] else number


TURN_REWARD_FUNCS = [answer_printed_reward_func, call_ran_reward_func]
