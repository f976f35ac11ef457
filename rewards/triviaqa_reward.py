"""Rewards for question answering with a search tool, with the values of the MT-GRPO paper (arXiv 2505.11821).

Recipe: `reward_fn: rewards/triviaqa_reward.py`. Dataset column: `answer`, the accepted answers of a row (a list of
strings, TriviaQA's dict with `value` and `aliases`, or one string; for a worked solution, the text after `####`).

Every function takes the parsed turns of each rollout, and returns one float per rollout, or None where it does not
apply (squad_reward.py has one per search). It imports nothing of the trainer's: copy it with calculator_reward.py.
"""

import re
from typing import Any

from calculator_reward import _answer, _results, tool_execution_reward_func


def _fold(text: str) -> str:
    """Return the text without outer white space and without case, in any alphabet."""
    return text.strip().casefold()


def _aliases(gold: Any) -> list[str]:
    """Return the accepted answers of a row, folded; empty ones are left out, since any text contains them."""
    if isinstance(gold, dict):
        aliases = gold.get("aliases") or []
        gold = [gold.get("value"), *([aliases] if isinstance(aliases, str) else aliases)]
    elif not isinstance(gold, (list, tuple)):
        gold = [gold and str(gold).rpartition("####")[2]]  # a worked solution, like GSM8K's, ends with the answer
    return [folded for alias in gold if alias is not None and (folded := _fold(str(alias)))]


def _mentions(text: str, aliases: list[str]) -> bool:
    """Return whether the text contains an accepted answer as a substring.

    As in the paper, case is ignored, and so are word boundaries.
    """
    folded = _fold(text)
    return any(alias in folded for alias in aliases)


# --- Turn rewards ----------------------------------------------------------------------------------------------------


def exist_answer_in_search_results(
    rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any
) -> list[float | None]:
    """Reward a search that finds the answer: 0.5 if a successful result contains an accepted answer.

    Range: 0.0 or 0.5. None: the row has no accepted answer.

    >>> from mt_grpo.rollout import ToolCall, ToolResult, Turn
    >>> turn = Turn([], None, "", "stop", [ToolCall("wiki_search", {})], [ToolResult("Rollo was a Viking.")])
    >>> exist_answer_in_search_results(rollout_turns=[[turn]] * 3, answer=[["viking"], ["Norman"], []])
    [0.5, 0.0, None]
    """
    rewards = []
    for turns, aliases in zip(rollout_turns, map(_aliases, answer), strict=True):
        found = any(_mentions(result, aliases) for result in _results(turns) if result is not None)
        rewards.append(0.5 * found if aliases else None)
    return rewards


# --- Outcome rewards -------------------------------------------------------------------------------------------------


def exact_match_reward_func(rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward the right answer: 1.0 if the last turn's answer is an accepted one, up to case and outer white space.

    Range: 0.0 or 1.0. None: the row has no accepted answer.

    >>> from mt_grpo.rollout import Turn
    >>> turn = Turn([], None, "", "stop", answer="FRANCE")
    >>> exact_match_reward_func(rollout_turns=[[turn]] * 3, answer=[["France"], ["Spain"], []])
    [1.0, 0.0, None]
    """
    given = zip(map(_answer, rollout_turns), map(_aliases, answer), strict=True)
    return [float(_fold(text or "") in aliases) if aliases else None for text, aliases in given]


def exist_answer_reward_func(rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward an answer that mentions the right one: 0.5 if the last turn's answer contains an accepted answer.

    An exact match contains the answer, too, and earns both rewards.

    Range: 0.0 or 0.5. None: the row has no accepted answer.
    """
    given = zip(map(_answer, rollout_turns), map(_aliases, answer), strict=True)
    return [0.5 * _mentions(text or "", aliases) if aliases else None for text, aliases in given]


# The format of the paper: `<reasoning>`, followed by the turn's block.


def _block(turn: Any) -> str:
    """Return the tag of a turn's block: `tool` if the turn calls a tool, else `answer`."""
    return "tool" if turn.calls else "answer"


def format_reward_func(rollout_turns: list[list[Any]], **kwargs: Any) -> list[float]:
    r"""Reward the expected format: 0.2 times the mean over the turns of a score from 0 to 1.

    A turn's score is 0.4 times the share of its two fields that are opened and then closed; plus 0.2 if only white
    space separates `</reasoning>` and the opening of the block; plus 0.2 if it starts with `<reasoning>`; plus 0.2 if
    it ends with the closing tag of the block. Outer white space is ignored. These are five checks of equal weight, and
    they are counted as such, so that a perfect rollout earns exactly 0.2.

    Range: 0.0 to 0.2; 0.0 without a turn. Never None.

    >>> from mt_grpo.rollout import Turn
    >>> good = Turn([], None, "<reasoning>I know.</reasoning>\n<answer>France</answer>", "stop")
    >>> bare = Turn([], None, "<answer>France</answer>", "stop")  # one field of two, and the end
    >>> [round(reward, 3) for reward in format_reward_func(rollout_turns=[[good], [bare], []])]
    [0.2, 0.08, 0.0]
    """
    rewards = []
    for turns in rollout_turns:
        passed = 0
        for turn in turns:
            text, block = turn.text.strip(), _block(turn)
            passed += sum(f"</{field}>" in text.partition(f"<{field}>")[2] for field in ("reasoning", block))
            passed += re.search(rf"</reasoning>\s*<{block}>", text) is not None
            passed += text.startswith("<reasoning>")
            passed += text.endswith(f"</{block}>")
        rewards.append(0.2 * (passed / (5 * len(turns))) if turns else 0.0)
    return rewards


def xml_tag_reward_func(rollout_turns: list[list[Any]], **kwargs: Any) -> list[float]:
    r"""Reward clean tags: 0.2 times the mean over the turns of the share of tags that occur exactly once.

    The four tags of a turn are `<reasoning>`, `</reasoning>` and those of its block. A repeated one earns nothing.

    Range: 0.0 to 0.2; 0.0 without a turn. Never None.

    >>> from mt_grpo.rollout import Turn
    >>> good = Turn([], None, "<reasoning>I know.</reasoning>\n<answer>France</answer>", "stop")
    >>> open_end = Turn([], None, "<reasoning>I know.</reasoning>\n<answer>France", "stop")
    >>> [round(reward, 3) for reward in xml_tag_reward_func(rollout_turns=[[good], [open_end], []])]
    [0.2, 0.15, 0.0]
    """
    rewards = []
    for turns in rollout_turns:
        once = 0
        for turn in turns:
            fields = "reasoning", _block(turn)
            once += sum(turn.text.count(f"<{slash}{field}>") == 1 for field in fields for slash in ("", "/"))
        rewards.append(0.2 * (once / (4 * len(turns))) if turns else 0.0)
    return rewards


TURN_REWARD_FUNCS = [tool_execution_reward_func, exist_answer_in_search_results]
OUTCOME_REWARD_FUNCS = [exact_match_reward_func, exist_answer_reward_func, format_reward_func, xml_tag_reward_func]
