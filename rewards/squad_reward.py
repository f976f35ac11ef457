"""Rewards for questions with a search tool: one reward per search, and SQuAD's own metrics for the answer.

Recipe: `reward_fn: rewards/squad_reward.py`. Dataset column: `answer`, TriviaQA's dict with `value` and `aliases`, a
list of accepted answers, or a single one. Answers are compared as in SQuAD's own evaluation (Rajpurkar et al. 2016):
without case, punctuation and the words a, an and the; F1 is computed over words.

The turn rewards are lists, one entry per turn. Needs: nothing beyond Python's standard library.
"""

import re
import string
from collections import Counter
from typing import Any

ANYWHERE = {"yes", "no", "one", "two", "it", "if", "them", "us", "who"}  # words that are no finding


def _words(text: str) -> list[str]:
    """Return the words of a text as SQuAD compares them."""
    text = "".join(c for c in text.casefold() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _golds(answer: Any) -> list[list[str]]:
    """Return the words of each accepted answer; an answer without words is left out."""
    if isinstance(answer, dict):
        aliases = answer.get("aliases") or []
        answer = [answer.get("value"), *([aliases] if isinstance(aliases, str) else aliases)]
    answers = answer if isinstance(answer, list) else [answer]
    texts = [str(each).rpartition("####")[2] for each in answers if each is not None]  # GSM8K's has its steps
    return [words for text in texts if (words := _words(text))]


def _holds(text: str, golds: list[list[str]]) -> bool:
    """Return whether the text contains the words of an accepted answer, one after another: Edgar in Edgar's too."""
    apart = re.sub(r"['’]s\b|[-–—]", " ", text)
    spaced = f" {' '.join(_words(text))} | {' '.join(_words(apart))} "
    return any(f" {' '.join(gold)} " in spaced for gold in golds)


def _answer(turns: list[Any]) -> str:
    """Return the answer of the last turn, an empty text without an answer."""
    return (turns[-1].answer if turns else None) or ""


def f1(words: list[str], gold: list[str]) -> float:
    """Return SQuAD's F1: the harmonic mean of precision and recall of the words.

    >>> f1(["in", "northern", "france"], ["northern", "france"]), f1(["spain"], ["northern", "france"]), f1([], ["x"])
    (0.8, 0.0, 0.0)
    """
    whole = gold in (["yes"], ["no"])  # HotpotQA's evaluation takes these alone
    common = sum((Counter(words) & Counter(gold)).values()) if words == gold or not whole else 0
    return 2 * common / (len(words) + len(gold)) if common else 0.0


# --- Turn rewards ----------------------------------------------------------------------------------------------------


def call_ran_reward_func(rollout_turns: list[list[Any]], **kwargs: Any) -> list[list[float | None]]:
    """Reward a turn whose calls run: 0.1; 0.0 if one fails. None for a turn that got no result.

    >>> from mt_grpo.rollout import ToolCall, ToolResult, Turn
    >>> found, failed = (ToolResult("Rollo was a Viking."), ToolResult("Error: no query", error="call"))
    >>> turns = [Turn([], None, "", "stop", [ToolCall("wiki_search", {})], [result]) for result in (found, failed)]
    >>> call_ran_reward_func(rollout_turns=[[*turns, Turn([], None, "", "stop", answer="Rollo")]])
    [[0.1, 0.0, None]]
    """
    return [[0.1 * (turn.error is None) if turn.results else None for turn in turns] for turns in rollout_turns]


def answer_in_search_results_reward_func(
    rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any
) -> list[list[float | None] | None]:
    """Reward the first search whose result contains the answer: 0.5. None for a turn without a result.

    Later searches earn 0.0, and of several in one turn only the last one counts: a turn is one guess. None for all
    turns if the row has no answer, or only answers such as yes or it, which any text has.

    >>> from mt_grpo.rollout import ToolCall, ToolResult, Turn
    >>> texts = ("The Danube.", "Rollo, a Viking, led.", "Rollo was a Viking!")
    >>> turns = [Turn([], None, "", "stop", [ToolCall("wiki_search", {})], [ToolResult(text)]) for text in texts]
    >>> answer_in_search_results_reward_func(rollout_turns=[turns], answer=[{"value": "a Viking", "aliases": []}])
    [[0.0, 0.5, 0.0]]
    """
    rewards = []
    for turns, golds in zip(rollout_turns, map(_golds, answer), strict=True):
        found, row, golds = False, [], [gold for gold in golds if not ANYWHERE.issuperset(gold)]
        for turn in turns:
            here = any(result.error is None and _holds(result.text, golds) for result in turn.results[-1:])
            row.append(0.5 * (here and not found) if turn.results else None)
            found = found or here
        rewards.append(row if golds else None)
    return rewards


# --- Outcome rewards -------------------------------------------------------------------------------------------------


def exact_match_reward_func(rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward the right answer: 1.0 if the last turn's answer has the words of an accepted one. None: the row has none.

    >>> from mt_grpo.rollout import Turn
    >>> turn = Turn([], None, "", "stop", answer="the FRANCE.")
    >>> exact_match_reward_func(rollout_turns=[[turn]] * 3, answer=[["France"], ["Spain"], []])
    [1.0, 0.0, None]
    """
    given = zip(map(_answer, rollout_turns), map(_golds, answer), strict=True)
    return [float(_words(text) in golds) if golds else None for text, golds in given]


def f1_reward_func(rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward an answer that has words of an accepted one: 0.5 times the best F1. None: the row has no accepted answer.

    A long answer that contains the right one earns a small but certain reward. If the model rarely finds the exact
    answer, it learns to copy the passage (docs/real_model.md).

    >>> from mt_grpo.rollout import Turn
    >>> turn = Turn([], None, "", "stop", answer="in northern France")
    >>> f1_reward_func(rollout_turns=[[turn]] * 2, answer=[["northern France"], ["Spain"]])
    [0.4, 0.0]
    """
    given = zip(map(_answer, rollout_turns), map(_golds, answer), strict=True)
    return [0.5 * max(f1(_words(text), gold) for gold in golds) if golds else None for text, golds in given]


def close_answer_reward_func(rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward an answer close to an accepted one: `f1_reward_func` if the F1 is at least 0.5, else 0.0.

    A copied sentence has a lower F1, and earns nothing.

    >>> from mt_grpo.rollout import Turn
    >>> turns = [[Turn([], None, "", "stop", answer=text)] for text in ("in northern France", "Rollo led in France")]
    >>> close_answer_reward_func(rollout_turns=turns, answer=[["northern France"]] * 2)
    [0.4, 0.0]
    """
    found = f1_reward_func(rollout_turns, answer)
    return [reward if reward is None or reward >= 0.25 else 0.0 for reward in found]


TURN_REWARD_FUNCS = [call_ran_reward_func, answer_in_search_results_reward_func]
OUTCOME_REWARD_FUNCS = [exact_match_reward_func, f1_reward_func, close_answer_reward_func]
