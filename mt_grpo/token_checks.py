"""Whether training reads the tokens of inference. Three checks, each with a name.

ids   each turn began with the ids that the backend says it read, and is what it says it sampled
mask  what is trained of a record is what was sampled for it, and nothing else
text  a record's text is what the chat template makes of the whole conversation

The first two hold always. Texts may differ where the template says so, as by leaving out earlier thinking: what the
same comparison finds in a conversation without any fault is listed for the template, and not told.
"""

from __future__ import annotations

import logging
from typing import Any

from accelerate.utils import gather_object

from mt_grpo.chat_format import ChatFormat
from mt_grpo.id_hashes import IdHash
from mt_grpo.ranks import RunError
from mt_grpo.rollout import Record, Rollout, join
from mt_grpo.text_check import WHITE_SPACE, Difference, check_text, listed

logger = logging.getLogger(__name__)
CHECKS = ("ids", "mask", "text")
COMPARED = 8  # rollouts per batch and rank whose texts are compared: it takes milliseconds for each
told: set[tuple] = set()


# -- ids and mask --


def check_ids(record: Record) -> list[Difference]:
    """Turns that the backend did not read or sample as the record has them. A turn without its account is not checked.

    >>> from mt_grpo.rollout import Generation, Turn
    >>> sampled = Generation([5, 6, 7], None, "stop", IdHash([1, 2]).digest())
    >>> turn = Turn([5, 6], None, "", "stop", generations=[sampled])
    >>> check_ids(Record([1, 2], [turn])), [found.kind for found in check_ids(Record([1, 3], [turn]))]
    ([], ['read'])
    >>> turn.token_ids = [5, 8]
    >>> [found.kind for found in check_ids(Record([1, 2], [turn]))]
    ['sampled']
    """
    seen = IdHash(record.prompt_ids)
    for number, turn in zip(record.numbers or range(len(record.turns)), record.turns):
        before, ids = seen.copy(), []
        for generation in turn.generations:
            if generation.saw not in (None, before.digest()):
                return [Difference("ids", "read", f"before turn {number}", "other ids than the record has")]
            before.add(generation.token_ids)
            ids += generation.token_ids
        if turn.generations and turn.token_ids != ids[: len(turn.token_ids)]:
            k = next((k for k, (a, b) in enumerate(zip(turn.token_ids, ids)) if a != b), len(ids))
            shown = f"{turn.token_ids[k : k + 5]} in the record, {ids[k : k + 5]} from the backend"
            return [Difference("ids", "sampled", f"turn {number}, token {k}", shown)]
        seen.add(turn.token_ids + turn.observation_ids)
    return []


def check_mask(record: Record, mask: list[int]) -> list[Difference]:
    """Tokens of a record that are trained and were not sampled for it, or the other way round.

    >>> from mt_grpo.rollout import Turn
    >>> record = Record([1], [Turn([5, 6], None, "", "stop", observation_ids=[9]), Turn([7], None, "", "stop")])
    >>> check_mask(record, [1, 1, 0, 1]), check_mask(record, [0, 1, 1, 1])[0].place
    ([], 'token 0')
    """
    expected: list[int] = []
    for turn in record.turns:
        own = [1] * len(turn.token_ids) if turn.mask is None else list(turn.mask)
        expected += own if turn.trained else [0] * len(own)
        expected += [0] * len(turn.observation_ids)
    if mask == expected:
        return []
    k = next((k for k, (a, b) in enumerate(zip(mask, expected)) if a != b), min(len(mask), len(expected)))
    return [Difference("mask", "mask", f"token {k}", f"{mask[k : k + 8]}, expected {expected[k : k + 8]}")]


# -- a batch --


def check_rollouts(rollouts: list[Rollout], env: Any, args: Any) -> dict[str, float]:
    """Share of the rollouts, over all ranks, in which each check found a difference. Collective.

    A kind of difference is told once. Raises `RunError` on all ranks where `tokenization_check_raises` is set.
    """
    if args.tokenization_sanity_check_mode in ("off", "disable"):
        return {}
    counts, compared, found = check_batch(rollouts, env, args.tokenization_sanity_check_mode)
    reports = gather_object([(counts, compared, [text_of(each) for each in found[:1]])])
    errors = join([texts for _, _, texts in reports])
    if errors and args.tokenization_check_raises:
        raise RunError(errors[0])
    for each in found:
        kind = each[:3] if each.check == "text" else each[:2]
        if kind not in told:
            told.add(kind)
            logger.warning(f"{text_of(each)} Differences of this kind are not told again; tokens/* counts them.")
    return {
        f"tokens/{check}_differ": sum(own[check] for own, _, _ in reports)
        / max(1, sum(own[check] for _, own, _ in reports))
        for check in CHECKS
    }


def check_batch(rollouts: list[Rollout], env: Any, mode: str) -> tuple[dict, dict, list[Difference]]:
    """(rollouts with a difference by check, rollouts that were compared by check, what was found)."""
    counts, told_of = dict.fromkeys(CHECKS, 0), []
    # Turns that no backend has given an account of are somebody's own, as of a fork that makes rollouts up.
    trained = [r for r in rollouts if not r.failed and r.turns and all(turn.generations for turn in r.turns)]
    # A format of a fork's own may lack what renders conversations to compare with.
    compares = getattr(env, "renders_all", True) and isinstance(env.format_of(env.tokenizer), ChatFormat)
    rendered = min(len(trained), COMPARED) if compares else 0
    for number, rollout in enumerate(trained):
        found = join([check_ids(record) + check_mask(record, record.loss_mask) for record in rollout.records])
        if number < rendered:
            texts = join([check_text(rollout, record, env) for record in rollout.records])
            passed = listed(env) if texts else set()
            found += [
                each for each in texts
                if each.key not in passed
                and not (mode == "ignore_strippable" and each.kind == WHITE_SPACE)
            ]  # fmt: skip
        for check in {each.check for each in found}:
            counts[check] += 1
        told_of += found
    return counts, {"ids": len(trained), "mask": len(trained), "text": rendered}, told_of


def text_of(found: Difference) -> str:
    """A difference as a sentence."""
    return (
        f"Training and inference differ (tokenization_sanity_check_mode, check {found.check}): {found.kind}, "
        f"{found.place}: {found.shown}."
    )
