"""Rewards for grade-school word problems (GSM8K) with a calculator tool.

Recipe: `reward_fn: rewards/gsm8k_reward.py`. Dataset column: `answer`, the gold number, which may follow `####`.

Every function takes the parsed turns of each rollout, and returns one float per rollout, or None where it does not
apply. Numbers are decimals, of any length, and compared exactly. Copy the file together with calculator_reward.py.
"""

import re
from decimal import Decimal
from typing import Any

from calculator_reward import _answer, tool_execution_reward_func

_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_LATEX = re.compile(r"\\(?:text|math)(?:bf|rm|it)?\b|\\(?=[$%])|\\!|[{}]")  # around 42\text{ apples}, 1{,}800
_SPACES = re.compile(r"\\(?:[,;: ]|quad)|~")
_MARKS = re.compile(r"\A(?:\*\*|\\[(\[]|\$\$|`)\s*|\s*(?:\*\*|\\[)\]]|\$\$|`)(?=\.?\Z)")  # **42**, \(42\), `42`
_SIGN = r"([-−]?\s*(?:[$€£]\s*)?|[$€£]\s*[-−])"
_AMOUNT = re.compile(_SIGN + r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)\s*[$€£%]*/?(.*)", re.DOTALL)
_NO_UNITS = {"and", "or", "plus", "minus", "k", "hundred", "thousand", "million", "billion", "trillion"}


def _number(text: str) -> Decimal | None:
    r"""Return the number that the text gives as the answer, None if it gives none or several.

    The text is only the number, or has it in `\boxed{}`. Marks of Markdown and LaTeX around it, a currency or percent
    sign, a unit of up to four words, thousands commas, a trailing `.0` and a final period are ignored. A word before
    the number, another number and an expression are not.

    >>> [str(_number(text)) for text in ["$1,800", "50%", "42 apples", r"That is 6*7 = \boxed{42}."]]
    ['1800', '50', '42', '42']
    >>> [str(_number(text)) for text in [r"\boxed{42\,\text{m}^2}", "**$42**.", r"\(1,\!800\)", r"\[42\]", "−4/h"]]
    ['42', '42', '1800', '42', '-4']
    >>> [_number(text) for text in ["not 42", "6*7", "41 or 42", "42 thousand", r"\boxed{41}, or \boxed{42}"]]
    [None, None, None, None, None]
    """
    numbers = [_plain(candidate) for candidate in _BOXED.findall(text) or [text]]
    return numbers[0] if numbers.count(numbers[0]) == len(numbers) else None


def _plain(text: str) -> Decimal | None:
    """Return the number of a text that contains nothing else but a sign and a unit."""
    match = _AMOUNT.fullmatch(_SPACES.sub(" ", _LATEX.sub("", _MARKS.sub("", text.strip()))).strip())
    if match is None:
        return None
    sign, digits, unit = match.groups()
    words = unit.casefold().strip().removesuffix(".").split()
    letters = all(re.sub(r"\^[23]$|[²³]$", "", part).isalpha() for word in words for part in word.split("/"))
    fits = letters and len(words) <= 4 and _NO_UNITS.isdisjoint(words)  # km/h, m^2
    return Decimal("-" * bool(re.search("[-−]", sign)) + digits.replace(",", "")) if fits else None


def _gold(answer: Any) -> Decimal | None:
    """Return the gold number of a row; a worked solution, like GSM8K's, has it after `####`."""
    return _number(str(answer).rpartition("####")[2])


def exact_match_reward_func(rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward the right answer: 1.0 if the last turn's answer is the gold number, written as `_number` takes it.

    Range: 0.0 or 1.0. None: the row has no gold number.

    >>> from mt_grpo.rollout import Turn
    >>> turn = Turn([], None, "", "stop", answer="$1,800.")
    >>> gold = ["1800", "She earns 18 * 100 = 1,800 dollars. #### 1,800", "18", "no number"]
    >>> exact_match_reward_func(rollout_turns=[[turn]] * 4, answer=gold)
    [1.0, 1.0, 0.0, None]
    """
    given = [_number(_answer(turns) or "") for turns in rollout_turns]
    return [
        None if gold is None else float(number == gold) for number, gold in zip(given, map(_gold, answer), strict=True)
    ]


def answer_format_reward_func(rollout_turns: list[list[Any]], **kwargs: Any) -> list[float]:
    """Reward an answer that is a number, right or wrong: 0.1 if `_number` reads it.

    Range: 0.0 or 0.1. Never None.
    """
    return [0.0 if _number(_answer(turns) or "") is None else 0.1 for turns in rollout_turns]


TURN_REWARD_FUNCS = [tool_execution_reward_func]
OUTCOME_REWARD_FUNCS = [exact_match_reward_func, answer_format_reward_func]
