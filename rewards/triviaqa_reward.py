"""Rewards for question answering with a search tool, with the values of the MT-GRPO paper (arXiv 2505.11821).

Recipe: `reward_fn: rewards/triviaqa_reward.py`. Dataset column: `answer`, the accepted answers of a row (a list of
strings, TriviaQA's dict with `value` and `aliases`, or one string).

Every function takes the rollouts as `completions` (the messages after the prompt) and returns one float per rollout,
or None where it does not apply. Tool calls and their results are read from `rollout_turns`, and from the messages
where it is None. This file imports nothing from the trainer: copy it and edit the copy.
"""

import re
from itertools import zip_longest
from typing import Any

_TAG = re.compile(r"</?(?:reasoning|tool|answer|result)>")


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


def _fold(text: str) -> str:
    """Return the text without outer white space and without case, in any alphabet."""
    return text.strip().casefold()


def _aliases(gold: Any) -> list[str]:
    """Return the accepted answers of a row, folded; empty ones are left out, since any text contains them."""
    if isinstance(gold, dict):
        gold = [gold.get("value"), *(gold.get("aliases") or [])]
    elif gold is None or isinstance(gold, str):
        gold = [gold]
    return [folded for alias in gold if alias is not None and (folded := _fold(str(alias)))]


# --- Turn rewards ----------------------------------------------------------------------------------------------------


def tool_execution_reward_func(
    completions: list[list[dict[str, Any]]], rollout_turns: list[list[Any] | None] | None = None, **kwargs: Any
) -> list[float | None]:
    r"""Reward tool calls that run: 0.2 times the share of the attempted calls that succeeded, 0 without any call.

    A malformed call, a call to an unknown tool, a tool that raised, timed out or answered `Error: ...` in its own
    words, and a call that got no result are attempted but not successful.

    Range: 0.0 to 0.2. Never None.

    >>> call = {"role": "assistant", "content": '<tool>{"name": "wiki_search", "args": {"query": "Rollo"}}</tool>'}
    >>> good = {"role": "user", "content": "<result>\nRollo was a Viking.\n</result>"}
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


def exist_answer_in_search_results(
    completions: list[list[dict[str, Any]]],
    answer: list[Any],
    rollout_turns: list[list[Any] | None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""Reward a search that finds the answer: 0.5 if a successful result contains an accepted answer.

    Contains is meant literally, as in the paper: a substring, case-folded, word boundaries or not. What the policy
    writes is no search result, whatever tags it puts around it.

    Range: 0.0 or 0.5. None: the row has no accepted answer.

    >>> call = {"role": "assistant", "content": '<tool>{"name": "wiki_search", "args": {"query": "Rollo"}}</tool>'}
    >>> reply = {"role": "user", "content": "<result>\nRollo was a Viking.\n</result>"}
    >>> exist_answer_in_search_results(completions=[[call, reply]] * 3, answer=[["viking"], ["Norman"], []])
    [0.5, 0.0, None]
    """
    rewards = []
    all_turns = rollout_turns or [None] * len(completions)
    for messages, gold, turns in zip(completions, answer, all_turns, strict=True):
        aliases = _aliases(gold)
        found = [_fold(result) for result in _results(messages, turns) if result is not None]
        rewards.append(0.5 * any(alias in text for text in found for alias in aliases) if aliases else None)
    return rewards


# --- Outcome rewards -------------------------------------------------------------------------------------------------


def exact_match_reward_func(
    completions: list[list[dict[str, Any]]], answer: list[Any], **kwargs: Any
) -> list[float | None]:
    """Reward the right answer: 1.0 if the answer block is, but for case and outer white space, an accepted answer.

    Only the last assistant message can answer, and in it only the first complete answer block.

    Range: 0.0 or 1.0. None: the row has no accepted answer.

    >>> reply = [{"role": "assistant", "content": "<reasoning>I know.</reasoning>\\n<answer> FRANCE </answer>"}]
    >>> exact_match_reward_func(completions=[reply] * 3, answer=[["France"], ["Spain"], []])
    [1.0, 0.0, None]
    """
    rewards = []
    for messages, gold in zip(completions, answer, strict=True):
        aliases = _aliases(gold)
        rewards.append(float(_fold(_answer(messages) or "") in aliases) if aliases else None)
    return rewards


def exist_answer_reward_func(
    completions: list[list[dict[str, Any]]], answer: list[Any], **kwargs: Any
) -> list[float | None]:
    """Reward an answer that mentions the right one: 0.5 if the answer block contains an accepted answer.

    Contains is meant as in `exist_answer_in_search_results`; an exact match contains the answer too and earns both.

    Range: 0.0 or 0.5. None: the row has no accepted answer.

    >>> reply = [{"role": "assistant", "content": "<reasoning>I know.</reasoning>\\n<answer>In France.</answer>"}]
    >>> exist_answer_reward_func(completions=[reply] * 3, answer=[["France"], ["Spain"], []])
    [0.5, 0.0, None]
    """
    rewards = []
    for messages, gold in zip(completions, answer, strict=True):
        aliases = _aliases(gold)
        text = _fold(_answer(messages) or "")
        rewards.append(0.5 * any(alias in text for alias in aliases) if aliases else None)
    return rewards


def format_reward_func(completions: list[list[dict[str, Any]]], **kwargs: Any) -> list[float | None]:
    r"""Reward the expected format: 0.2 times the mean over the assistant messages of a score from 0 to 1.

    A message is expected to hold `<reasoning>` and then its block: `<tool>` if it calls a tool, else `<answer>`.
    Its score is 0.4 times the share of the two fields that are complete, opened and then closed; plus 0.2 for the
    spacing, nothing but white space between `</reasoning>` and the opening of the block; plus 0.2 if it starts with
    `<reasoning>`; plus 0.2 if it ends with the closing tag of the block; outer white space aside. These are five
    checks of equal weight, which is how they are counted, so that a perfect rollout earns exactly 0.2.

    Range: 0.0 to 0.2; 0.0 without an assistant message. Never None.

    >>> good = {"role": "assistant", "content": "<reasoning>I know.</reasoning>\n<answer>France</answer>"}
    >>> bare = {"role": "assistant", "content": "<answer>France</answer>"}  # one field of two, and the end
    >>> [round(reward, 3) for reward in format_reward_func(completions=[[good], [bare], []])]
    [0.2, 0.08, 0.0]
    """
    rewards = []
    for messages in completions:
        texts = _texts(messages)
        passed = 0
        for text in map(str.strip, texts):
            kind, block = _block(text)
            passed += "</reasoning>" in text.partition("<reasoning>")[2]
            passed += block is not None
            passed += re.search(rf"</reasoning>\s*<{kind}>", text) is not None
            passed += text.startswith("<reasoning>")
            passed += text.endswith(f"</{kind}>")
        rewards.append(0.2 * (passed / (5 * len(texts))) if texts else 0.0)
    return rewards


def xml_tag_reward_func(completions: list[list[dict[str, Any]]], **kwargs: Any) -> list[float | None]:
    r"""Reward clean tags: 0.2 times the mean over the assistant messages of the share of tags that occur once.

    The four tags of a message are `<reasoning>`, `</reasoning>` and the opening and closing tag of its block: `tool`
    if it calls a tool, else `answer`. A tag that is missing or repeated earns nothing.

    Range: 0.0 to 0.2; 0.0 without an assistant message. Never None.

    >>> good = {"role": "assistant", "content": "<reasoning>I know.</reasoning>\n<answer>France</answer>"}
    >>> open_end = {"role": "assistant", "content": "<reasoning>I know.</reasoning>\n<answer>France"}
    >>> [round(reward, 3) for reward in xml_tag_reward_func(completions=[[good], [open_end], []])]
    [0.2, 0.15, 0.0]
    """
    rewards = []
    for messages in completions:
        texts = _texts(messages)
        once = 0
        for text in texts:
            kind, _ = _block(text)
            once += sum(text.count(tag) == 1 for tag in ("<reasoning>", "</reasoning>", f"<{kind}>", f"</{kind}>"))
        rewards.append(0.2 * (once / (4 * len(texts))) if texts else 0.0)
    return rewards


TURN_REWARD_FUNCS = [tool_execution_reward_func, exist_answer_in_search_results]
OUTCOME_REWARD_FUNCS = [
    exact_match_reward_func,
    exist_answer_reward_func,
    format_reward_func,
    xml_tag_reward_func,
]
