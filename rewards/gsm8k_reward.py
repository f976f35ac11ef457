"""Rewards for grade-school word problems (GSM8K) with a calculator tool.

Recipe: `reward_fn: rewards/gsm8k_reward.py`. Dataset column: `answer`, the gold number as a string, or GSM8K's worked
solution, whose gold number follows `####`.

Every function takes the rollouts as `completions` (the messages after the prompt) and returns one float per rollout,
or None where it does not apply. Tool calls and their results are read from `rollout_turns`, and from the messages
where it is None. Numbers are decimals, and a number of any length is compared exactly. This file imports nothing from
the trainer: copy it and edit the copy.
"""

import re
from decimal import Decimal
from itertools import zip_longest
from typing import Any

_TAG = re.compile(r"</?(?:reasoning|tool|answer|result)>")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)  # no exponent, nan or inf


def _block(text: str) -> tuple[str, str | None]:
    """Return the kind of a message ("tool" or "answer") and the text of its block, None if no block is complete.

    The block that closes first counts: there the environment ends the turn. An answer inside a tool call or inside a
    result (closed or not) is none; a `<result>` mentioned in the reasoning ends with it.
    """
    opened: dict[str, int] = {}  # tag name -> where its text begins
    for tag in _TAG.finditer(text):
        name = tag[0].strip("</>")
        if tag[0][1] != "/":
            if name != "answer" or not {"tool", "result"} & opened.keys():
                opened.setdefault(name, tag.end())
        elif name in ("tool", "answer") and name in opened:
            return name, text[opened[name] : tag.start()]
        elif name in ("result", "reasoning"):
            opened.pop("result", None)
    return "tool" if "tool" in opened else "answer", None


def _texts(messages: list[dict[str, Any]]) -> list[str]:
    """Return what the policy wrote: the text of each assistant message."""
    return [message.get("content") or "" for message in messages if message["role"] == "assistant"]


def _answer(messages: list[dict[str, Any]]) -> str | None:
    """Return the text of the answer block of the last assistant message, None without one."""
    kind, block = _block((_texts(messages) or [""])[-1])
    return block if kind == "answer" else None


def _results(messages: list[dict[str, Any]], turns: list[Any] | None) -> list[str | None]:
    """Return one entry per attempted tool call: the text of its result, None if the call failed or got no result."""
    if turns is not None:
        calls = [turn for turn in turns if turn.tool_call is not None or turn.error]
        results = [None if turn.error or turn.tool_call.error else turn.observation for turn in calls]
    else:
        results = []
        for message, reply in zip_longest(messages, messages[1:], fillvalue={}):
            if message["role"] == "assistant":
                kind, block = _block(message.get("content") or "")
                answered = reply.get("role") in ("user", "tool")
                if kind == "tool" and (block is not None or answered):
                    text = (reply.get("content") or "").strip() if answered else None
                    results.append(text and text.removeprefix("<result>").removesuffix("</result>"))
    stripped = [None if text is None else text.strip() for text in results]
    return [None if text is None or text.startswith("Error:") else text for text in stripped]


def _number(text: str) -> Decimal | None:
    """Return the number that the whole text spells in plain digits (`1,889.0`), None for anything else."""
    text = text.strip()
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _amount(text: str) -> Decimal | None:
    """Return the number of a text that may dress it as `$1,234.50`, `-$5`, `18%` or end in a period."""
    text = text.strip().removesuffix(".").rstrip().removesuffix("%")
    sign, text = ("-", text[1:]) if text.startswith("-") else ("", text)
    return _number(sign + text.strip().strip("$").strip())


# --- Turn rewards ----------------------------------------------------------------------------------------------------


def tool_execution_reward_func(
    completions: list[list[dict[str, Any]]], rollout_turns: list[list[Any] | None] | None = None, **kwargs: Any
) -> list[float | None]:
    r"""Reward tool calls that run: 0.2 times the share of the attempted calls that succeeded, 0 without any call.

    A malformed call, a call to an unknown tool, a tool that raised, timed out or answered `Error: ...` in its own
    words, and a call that got no result are attempted but not successful.

    Range: 0.0 to 0.2. Never None.

    >>> call = {"role": "assistant", "content": '<tool>{"name": "calculator", "args": {"expression": "48/2"}}</tool>'}
    >>> good = {"role": "user", "content": "<result>\n24\n</result>"}
    >>> bad = {"role": "user", "content": "<result>\nError: try again\n</result>"}
    >>> tool_execution_reward_func(completions=[[call, good], [call, bad, call, good], []])
    [0.2, 0.1, 0.0]
    """
    rewards = []
    for messages, turns in zip(completions, rollout_turns or [None] * len(completions), strict=True):
        results = _results(messages, turns)
        succeeded = sum(result is not None for result in results)
        rewards.append(0.2 * (succeeded / len(results)) if results else 0.0)
    return rewards


# --- Outcome rewards -------------------------------------------------------------------------------------------------


def exact_match_reward_func(
    completions: list[list[dict[str, Any]]], answer: list[Any], **kwargs: Any
) -> list[float | None]:
    """Reward the right answer: 1.0 if the answer block is the gold number.

    A dollar sign, thousands commas, a percent sign, a trailing `.0` and a final period make no difference; any other
    word does. Only the last assistant message can answer, and in it only the first complete answer block.

    Range: 0.0 or 1.0. None: the row has no gold number.

    >>> reply = [{"role": "assistant", "content": "<answer>$1,800.</answer>"}]
    >>> gold = ["1800", "She earns 18 * 100 = 1,800 dollars. #### 1,800", "18", "no number"]
    >>> exact_match_reward_func(completions=[reply] * 4, answer=gold)
    [1.0, 1.0, 0.0, None]
    """
    rewards = []
    for messages, gold in zip(completions, answer, strict=True):
        target = _amount(str(gold).rpartition("####")[2])
        rewards.append(None if target is None else float(_amount(_answer(messages) or "") == target))
    return rewards


def answer_format_reward_func(completions: list[list[dict[str, Any]]], **kwargs: Any) -> list[float | None]:
    """Reward an answer that is a number, right or wrong: 0.1 if the answer block reads as one.

    Range: 0.0 or 0.1. Never None.

    >>> number = [{"role": "assistant", "content": "<answer>$18</answer>"}]
    >>> words = [{"role": "assistant", "content": "<answer>18 dollars</answer>"}]
    >>> answer_format_reward_func(completions=[number, words, []])
    [0.1, 0.0, 0.0]
    """
    return [0.0 if _amount(_answer(messages) or "") is None else 0.1 for messages in completions]


TURN_REWARD_FUNCS = [tool_execution_reward_func]
OUTCOME_REWARD_FUNCS = [exact_match_reward_func, answer_format_reward_func]
