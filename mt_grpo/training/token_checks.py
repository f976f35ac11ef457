"""Two checks that training reads the tokens of inference.

ids   each turn began with the ids that the backend reports to have read, and consists of those that it sampled
text  what the last turn of a record read is what the chat template makes of the messages before it

The first always holds. The second holds unless the template rewrites earlier turns: such records are not compared.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from accelerate.utils import gather_object

from mt_grpo.conversation.formats.base import ASK, ChatFormat
from mt_grpo.rollout import Record, Rollout, Turn, id_hash, join, with_turns

logger = logging.getLogger(__name__)
CHECKS = ("ids", "text")
COMPARED = 8  # rollouts per batch and rank whose texts are compared: it takes milliseconds for each
reported: set[tuple] = set()


class Difference(NamedTuple):
    """A difference that a check found."""

    check: str  # ids, text
    kind: str
    place: str
    shown: str


def check_ids(record: Record) -> list[Difference]:
    """Turns whose ids differ from those that the backend read or sampled. Turns without its report are skipped.

    >>> from mt_grpo.rollout import Generation, Turn, hash_of_ids
    >>> sampled = Generation([5, 6, 7], None, "stop", hash_of_ids([1, 2]))
    >>> turn = Turn([5, 6], None, "", "stop", generations=[sampled])
    >>> check_ids(Record([1, 2], [turn])), [found.kind for found in check_ids(Record([1, 3], [turn]))]
    ([], ['read'])
    >>> turn.token_ids = [5, 8]
    >>> [found.kind for found in check_ids(Record([1, 2], [turn]))]
    ['sampled']
    """
    seen = id_hash(record.prompt_ids)
    for number, turn in zip(record.numbers or range(len(record.turns)), record.turns):
        before, ids = seen.copy(), []
        for generation in turn.generations:
            if generation.saw not in (None, before.digest()):
                return [Difference("ids", "read", f"before turn {number}", "other ids than the record has")]
            id_hash(generation.token_ids, before)
            ids += generation.token_ids
        if turn.generations and turn.token_ids != ids[: len(turn.token_ids)]:
            k = next((k for k, (a, b) in enumerate(zip(turn.token_ids, ids)) if a != b), len(ids))
            shown = f"{turn.token_ids[k : k + 5]} in the record, {ids[k : k + 5]} from the backend"
            return [Difference("ids", "sampled", f"turn {number}, token {k}", shown)]
        id_hash(turn.token_ids + turn.observation_ids, seen)
    return []


def check_text(rollout: Rollout, record: Record, env: Any, strict: bool) -> list[Difference] | None:
    """How what the last turn of a record read differs from the messages before it, rendered as a whole.

    None if that is not known, because the template rewrites an earlier turn.
    """
    tokenizer, context = env.tokenizer, record.turns[0].context if record.numbers[0] > 0 else None
    written, tools = env.format_of(tokenizer), env.tools if rollout.tools is None else rollout.tools
    messages = rollout.prompt_messages if context is None else context.messages
    turns = record.turns if record.turns[-1].observation_ids else record.turns[:-1]
    pieces = [("in the prompt", tokenizer.decode(record.prompt_ids))]
    for number, turn in zip(record.numbers, turns):
        pieces.append((f"in turn {number}", text_of_turn(turn, written)))
        pieces.append((f"after turn {number}", tokenizer.decode(turn.observation_ids)))
    goes_on = turns[-1].continuation is not None if turns else bool(context) and messages[-1]["role"] == "assistant"
    arguments = written.prompt(with_turns(messages, turns, begun=context is not None), tools)
    arguments |= {"tokenize": False, "add_generation_prompt": not goes_on}
    ours = "".join(text for _, text in pieces)
    try:
        theirs = tokenizer.apply_chat_template(**arguments)
    except Exception as error:  # whatever a template raises
        return [Difference("text", "no rendering", "in the conversation", f"the template raises: {error}")]
    if goes_on:  # the template ends the message that the next turn continues
        theirs = theirs[: len(ours)]
    for kind, form in [("text", squeezed), ("white space", str)][: 1 + strict]:
        if form(ours) == form(theirs):
            continue
        if any(rewrites(turn, written, tools, form) for turn in turns):
            logger.debug("The chat template rewrites earlier turns, whose records are not compared.")
            return None
        k = len(os.path.commonprefix([form(ours), form(theirs)]))
        shown = ", rendered ".join(repr(form(text)[max(k - 20, 0) : k + 20]) for text in (ours, theirs))
        ends = itertools.accumulate(len(form(text)) for _, text in pieces)
        place = next((name for end, (name, _) in zip(ends, pieces) if k < end), pieces[-1][0])
        return [Difference("text", kind, place, shown)]
    return []


def text_of_turn(turn: Turn, written: ChatFormat) -> str:
    """A turn's text. If another id than the template's ended it, the template's stands in its place."""
    ends = [id if id in written._closing else min(written._closing, default=id) for id in turn.token_ids[-1:]]
    ended = ends if turn.token_ids[-1:] and turn.token_ids[-1] in written.ends else []
    return written.text(turn.token_ids) + written.tokenizer.decode(ended)


def rewrites(turn: Turn, written: ChatFormat, tools: dict, form: Callable[[str], str]) -> bool:
    """Whether the template changes an earlier turn, such as its thinking, which small conversations show."""
    read = turn.messages or [ASK]
    text = written.text(turn.token_ids) + (turn.continuation or "")
    for messages in [read] if any(message["role"] == "user" for message in read) else [read, [*read, ASK]]:
        conversation = with_turns([ASK], [dataclasses.replace(turn, messages=messages)])
        try:
            arguments = written.prompt(conversation, tools) | {"tokenize": False}
            asked = written.prompt([ASK], tools) | {"tokenize": False}
            rendered, before = (written.tokenizer.apply_chat_template(**each) for each in (arguments, asked))
            if form(rendered) != form(before + text + written.suffix(turn.calls, messages)):
                return True
        except Exception:  # whatever a template raises
            return True
    return False


def squeezed(text: str) -> str:
    """A text without its white space."""
    return "".join(text.split())


def check_rollouts(rollouts: list[Rollout], env: Any, args: Any) -> dict[str, float]:
    """The share of all ranks' rollouts in which each check found a difference, logged once per kind. Collective."""
    if args.tokenization_sanity_check_mode in ("off", "disable"):
        return {}
    found = check_batch(rollouts, env, args.tokenization_sanity_check_mode)
    for each in join(join(found)):
        if each[:2] not in reported:
            reported.add(each[:2])
            logger.warning(
                f"Training and inference differ (tokenization_sanity_check_mode, check {each.check}): {each.kind}, "
                f"{each.place}: {each.shown}. It is logged once per kind; the metrics tokens/* count it."
            )
    counts = gather_object([[(sum(map(bool, each)), len(each)) for each in found]])  # (ranks, checks)
    sums = [[*map(sum, zip(*of_ranks))] for of_ranks in zip(*counts)]
    return {f"tokens/{check}_differ": n / max(1, compared) for check, (n, compared) in zip(CHECKS, sums)}


def check_batch(rollouts: list[Rollout], env: Any, mode: str) -> tuple[list[list[Difference]], list[list[Difference]]]:
    """The differences in each of the rollouts that were compared, by `ids` and by `text`."""
    # Turns that no backend has given an account of are somebody's own, as of a fork that makes rollouts up.
    trained = [r for r in rollouts if not r.failed and r.turns and all(turn.generations for turn in r.turns)]
    # A format of a fork's own may lack what renders conversations to compare with.
    compares = getattr(env, "renders_all", True) and isinstance(env.format_of(env.tokenizer), ChatFormat)
    texts = [
        [check_text(rollout, record, env, mode == "strict") for record in rollout.records]
        for rollout in (trained[:COMPARED] if compares else [])
    ]
    compared = [[found for found in of_rollout if found is not None] for of_rollout in texts]
    return [join(map(check_ids, r.records)) for r in trained], [join(each) for each in compared if each]
