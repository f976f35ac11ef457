"""Rewards for word problems (GSM8K) that are solved with Python programs, of which each has its own reward.

Recipe: `reward_fn: rewards/program_reward.py`. Dataset column: `answer`, as gsm8k_reward.py reads it. The turn rewards
are lists, one entry per turn. Needs: gsm8k_reward.py, whose outcome rewards these are, and squad_reward.py beside it.
"""

from typing import Any

from gsm8k_reward import OUTCOME_REWARD_FUNCS, _gold, _number  # noqa: F401  the recipe's loader reads the list
from squad_reward import call_ran_reward_func


def answer_printed_reward_func(
    rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any
) -> list[list[float | None] | None]:
    """Reward the first turn with a program that prints the gold number as its last line: 0.3; 0.0 for other programs.

    None for a turn that ran no program, and for all turns if the row has no gold number.

    >>> from mt_grpo.rollout import ToolCall, ToolResult, Turn
    >>> texts = "eggs: 18", "eggs:\\n18.0", "18"
    >>> turns = [Turn([], None, "", "stop", [ToolCall("code_interpreter", {})], [ToolResult(text)]) for text in texts]
    >>> answer_printed_reward_func(rollout_turns=[turns, turns], answer=["9 + 9 = 18\\n#### 18", "unknown"])
    [[0.0, 0.3, 0.0], None]
    """
    rewards = []
    for turns, gold in zip(rollout_turns, map(_gold, answer), strict=True):
        printed = [
            [_number(r.text.rstrip().rpartition("\n")[2]) for r in turn.results if not r.error] for turn in turns
        ]
        first = next((k for k, numbers in enumerate(printed) if gold in numbers), None)
        row = [0.3 * (k == first) if turn.results else None for k, turn in enumerate(turns)]
        rewards.append(None if gold is None else row)
    return rewards


TURN_REWARD_FUNCS = [answer_printed_reward_func, call_ran_reward_func]
