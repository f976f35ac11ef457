"""Information gain as turn reward: how much more likely a turn's results make the right answer.

Recipe: `reward_fn: rewards/information_gain.py`. Dataset column: `answer`, TriviaQA's dict with `value` and `aliases`,
a list of accepted answers, or one. The turn reward is computed with the policy itself (parameter `policy`), so the
task needs no turn rewards of its own (IGPO, arXiv 2510.14967; TRACE, arXiv 2607.13988). Edit a copy's constants.

A turn's results are compared with empty results in the same context. Compared with the context before the turn, most
searches of a weak policy would get a negative reward, since a useless passage distracts it, which would reward not
searching. A gain may be negative, so `scale_rewards: mean` is not supported.

Needs: nothing beyond Python's standard library.
"""

import dataclasses
import math
import re
import string
from typing import Any

# The text before the answer. Only the answer itself is scored: if the tag were scored, too, any first turn would be
# rewarded for making an answer more likely at all. A model that thinks first needs `</think>` in it.
OPENING = "<answer>"
# `logprob`: difference of mean logprobs per token. `probability`: of geometric mean probabilities, as in IGPO.
MEASURE = "logprob"
# False: leave the turn's own text out of both contexts, so that only the result counts.
OWN_TEXT = True
SCALE = 0.1  # factor of the reward: good searches gain a few nats per token


def _words(text: str) -> str:
    """Return the words of a text without case and punctuation, with outer spaces; a number keeps its minus."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.casefold())  # 1,007
    text = re.sub(r"(?<![\w.])-(?=\d)", "minus ", text)
    text = "".join(" " if c in string.punctuation else c for c in text)
    return f" {' '.join(word for word in text.split() if word not in ('a', 'an', 'the'))} "


def _golds(answer: Any) -> list[str]:
    """Return the accepted answers of a row, each once."""
    if isinstance(answer, dict):
        aliases = answer.get("aliases") or []
        answer = [answer.get("value"), *([aliases] if isinstance(aliases, str) else aliases)]
    answers = answer if isinstance(answer, list) else [answer]
    texts = [str(each).rpartition("####")[2].strip() for each in answers if each is not None]  # GSM8K's has its steps
    return list(dict.fromkeys(filter(None, texts)))


def _begs(turn: Any, golds: list[str]) -> bool:
    """Return whether a call of the turn contains an accepted answer, which its result may merely repeat."""
    asked = _words(" ".join(str(value) for call in turn.calls for value in (call.arguments or {}).values()))
    return any(_words(gold) in asked for gold in golds if _words(gold).strip())


def _mean(logprobs: list[float]) -> float:
    mean = sum(logprobs) / len(logprobs)
    return mean if MEASURE == "logprob" else math.exp(mean)


def information_gain_reward_func(
    rollout_turns: list[list[Any]], turn_contexts: list[list[list[int]]], policy: Any, answer: list[Any], **kwargs: Any
) -> list[list[float | None]]:
    """Reward turns whose results make the answer more likely: `SCALE` times the gain over empty results.

    With several accepted answers, the most likely one counts, in both contexts. None: the turn has no result, its call
    contains the answer, the row has no answer, no answer fits into the context, or the environment replaced the
    history after the turn or continued its text. An error earns 0.0, repeated results 0.0, or their first reward if it
    was negative.

    The cost is logged as `information_gain/tokens`: the ids that the policy had to read, over ranks and calls.
    """
    log_metric = kwargs.get("log_metric") or (lambda name, value: None)
    opening = policy.encode(OPENING)
    rewards = [[None] * len(turns) for turns in rollout_turns]
    contexts, continuations, asked = [], [], []  # asked: (rollout, turn, number of golds), two contexts of each gold
    again = []  # (rollout, turn, the turn that had the same results first)
    for i, (turns, read, golds) in enumerate(zip(rollout_turns, turn_contexts, map(_golds, answer), strict=True)):
        seen: dict[str, int] = {}  # results -> the turn that had them first
        for k, (turn, context) in enumerate(zip(turns, read, strict=True)):
            if not turn.results or not turn.observation_ids or turn.continuation is not None:
                continue
            texts = " ".join(result.text for result in turn.results)
            if texts in seen:
                again.append((i, k, seen[texts]))
                continue
            seen[texts] = k
            read = turn.observation_ids
            if not OWN_TEXT:
                context, turn = context[: len(context) - len(turn.token_ids)], dataclasses.replace(turn, token_ids=[])
                read = policy.observation_ids(turn, [result.text for result in turn.results])  # with the end of a turn
            found = context + read + opening
            ids = [encoded for gold in golds if policy.fits(found, encoded := policy.encode(gold))]
            if ids and turn.error:  # whose text may repeat a guess that stands in the call
                rewards[i][k] = 0.0
            if not ids or turn.error or _begs(turn, golds):
                continue
            nothing = context + policy.observation_ids(turn, [""] * len(turn.results)) + opening
            asked.append((i, k, len(ids)))
            for encoded in ids:
                contexts += [found, nothing]
                continuations += [encoded, encoded]
    read = {(*context, None, *continuation) for context, continuation in zip(contexts, continuations)}  # each once
    log_metric("information_gain/tokens", float(sum(len(each) - 1 for each in read)))
    means = [_mean(each) for each in policy.logprobs(contexts, continuations)]
    for i, k, count in asked:
        own, means = means[: 2 * count], means[2 * count :]
        rewards[i][k] = SCALE * (max(own[0::2]) - max(own[1::2]))
    for i, k, first in again:
        rewards[i][k] = None if rewards[i][first] is None else min(0.0, rewards[i][first])
    return rewards


def exact_match_reward_func(rollout_turns: list[list[Any]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward the right answer: 1.0 if the last turn's answer has the words of an accepted one. None: the row has none.

    >>> from mt_grpo.rollout import Turn
    >>> turns = [[Turn([], None, "", "stop", answer=answer)] for answer in ("the FRANCE.", "Spain", "1007", "1")]
    >>> exact_match_reward_func(rollout_turns=turns, answer=[["France"], ["France"], ["#### 1,007"], []])
    [1.0, 0.0, 1.0, None]
    """
    rewards = []
    for turns, golds in zip(rollout_turns, map(_golds, answer), strict=True):
        text = (turns[-1].answer if turns else None) or ""
        # An answer without words, such as "A" or "+", is compared as it is written.
        same = any(_words(text) == _words(g) if _words(g).strip() else text.strip() == g for g in golds)
        rewards.append(float(same) if golds else None)
    return rewards


TURN_REWARD_FUNCS = [information_gain_reward_func]
OUTCOME_REWARD_FUNCS = [exact_match_reward_func]
