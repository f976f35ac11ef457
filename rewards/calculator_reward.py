"""Rewards for arithmetic with a calculator tool: the smallest task that shows credit per turn.

Recipe: `reward_fn: rewards/calculator_reward.py`. Dataset column: `answer`, like "1889", or text with it after `####`.

Every function takes the parsed turns of each rollout, and returns one float per rollout, or None where it does not
apply. Numbers are decimals: 1,889 = 1889 = 1889.0, and a number of any length is compared exactly. This file imports
nothing from the trainer: copy it and edit the copy.
"""

import re
from decimal import Decimal
from itertools import zip_longest
from typing import Any

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)  # no exponent, nan or inf


def _answer(turns: list[Any]) -> str | None:
    """Return the answer of the last turn, None without an answer."""
    return turns[-1].answer if turns else None


def _results(turns: list[Any]) -> list[str | None]:
    """Return one entry per attempted tool call: the text of its result, None if the call failed or got no result."""
    texts = []
    for call, result in (pair for turn in turns for pair in zip_longest(turn.calls, turn.results)):
        failed = not (call and result) or call.error or result.error or result.text.lstrip().startswith("Error:")
        texts.append(None if failed else result.text)
    return texts


def _number(text: str) -> Decimal | None:
    """Return the number that the whole text spells in plain digits (`1,889.0`), None for anything else."""
    text = text.strip()
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _gold(answer: Any) -> Decimal | None:
    """Return the gold number of a row; a worked solution, like GSM8K's, has it after `####`."""
    return _number(str(answer).rpartition("####")[2])


# --- Turn rewards ----------------------------------------------------------------------------------------------------


def tool_execution_reward_func(rollout_turns: list[list[Any]], **kwargs: Any) -> list[float]:
    """Reward tool calls that run: 0.2 times the share of the attempted calls that succeeded, 0 without any call.

    A malformed call, a call to an unknown tool, a tool that raised, timed out or answered `Error: ...` in its own
    words, and a call that got no result are attempted but not successful.

    Range: 0.0 to 0.2. Never None.

    >>> from mt_grpo.rollout import ToolCall, ToolResult, Turn
    >>> calls, results = [ToolCall("calculator", {})] * 2, [ToolResult("24"), ToolResult("Error: busy")]
    >>> half = Turn([], None, "", "stop", calls, results)
    >>> tool_execution_reward_func(rollout_turns=[[half], []])
    [0.1, 0.0]
    """
    ran = [[result is not None for result in _results(turns)] for turns in rollout_turns]
    return [0.2 * (sum(calls) / len(calls)) if calls else 0.0 for calls in ran]


def result_found_reward_func(rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward the call that computes the answer: 0.5 if a successful result is exactly the gold number.

    Range: 0.0 or 0.5. None: the row's answer is not a number.

    >>> from mt_grpo.rollout import ToolCall, ToolResult, Turn
    >>> turn = Turn([], None, "", "stop", [ToolCall("calculator", {})], [ToolResult("1887")])
    >>> result_found_reward_func(rollout_turns=[[turn]] * 3, answer=["1887", "88", "Paris"])
    [0.5, 0.0, None]
    """
    rewards = []
    for turns, gold in zip(rollout_turns, map(_gold, answer), strict=True):
        numbers = [_number(result) for result in _results(turns) if result is not None]
        rewards.append(None if gold is None else 0.5 * (gold in numbers))
    return rewards


# --- Outcome rewards -------------------------------------------------------------------------------------------------


def exact_match_reward_func(rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward the right answer: 1.0 if the last turn's answer is the gold number.

    Thousands commas, surrounding white space and a trailing `.0` are ignored; a unit, word, exponent or sum is not.

    Range: 0.0 or 1.0. None: the row's answer is not a number.

    >>> from mt_grpo.rollout import Turn
    >>> turn = Turn([], None, "", "stop", answer="1,887.0")
    >>> exact_match_reward_func(rollout_turns=[[turn]] * 3, answer=["1887", "88", "Paris"])
    [1.0, 0.0, None]
    """
    given = [_number(_answer(turns) or "") for turns in rollout_turns]
    return [
        None if gold is None else float(number == gold) for number, gold in zip(given, map(_gold, answer), strict=True)
    ]


def answer_given_reward_func(rollout_turns: list[list[Any]], **kwargs: Any) -> list[float]:
    """Reward answering at all: 0.1 if the last turn answers, whatever it says.

    Range: 0.0 or 0.1. Never None.
    """
    return [0.0 if _answer(turns) is None else 0.1 for turns in rollout_turns]


TURN_REWARD_FUNCS = [tool_execution_reward_func, result_found_reward_func]
OUTCOME_REWARD_FUNCS = [exact_match_reward_func, answer_given_reward_func]
