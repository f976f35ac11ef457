"""Two checks that training reads the tokens of inference.

ids   each turn began with the ids that the backend reports to have read, and consists of those that it sampled
text  what the last turn of a record read is what the chat template makes of the messages before it
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
    """Turns whose ids differ from those that the backend read or sampled. Turns without its report are skipped."""
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
    """How what a record's last turn read differs from the messages, rendered. None: the template rewrites a turn."""
    tokenizer, context = env.tokenizer, record.turns[0].context if record.numbers[0] > 0 else None
    written, tools = env.format_of(tokenizer), env.tools if rollout.tools is None else rollout.tools
    messages = rollout.prompt_messages if context is None else context.messages
    turns = record.turns if record.turns[-1].observation_ids else record.turns[:-1]
    pieces = [("in the prompt", tokenizer.decode(record.prompt_ids))]
    for number, turn in zip(record.numbers, turns):
        # If another id than the template's ended the turn, the template's stands in its place.
        end = [i if i in written._closing else min(written._closing, default=i) for i in turn.token_ids[-1:]]
        ended = not written.ends.isdisjoint(turn.token_ids[-1:])
        pieces.append((f"in turn {number}", written.text(turn.token_ids) + tokenizer.decode(end * ended)))
        pieces.append((f"after turn {number}", tokenizer.decode(turn.observation_ids)))
    goes_on = turns[-1].continuation is not None if turns else bool(context) and messages[-1]["role"] == "assistant"
    arguments = written.prompt(with_turns(messages, turns, begun=context is not None), tools)
    arguments |= {"tokenize": False, "add_generation_prompt": not goes_on}
    try:
        theirs = tokenizer.apply_chat_template(**arguments)
    except Exception as error:  # whatever a template raises
        return [Difference("text", "no rendering", "in the conversation", f"the template raises: {error}")]
    ours = "".join(text for _, text in pieces)
    for kind, form in [("text", squeezed), ("white space", str)][: 1 + strict]:
        own, other = form(ours.rstrip() if goes_on else ours), form(theirs)
        # The template ends a message that the next turn continues.
        if own == (other[: len(own)] if goes_on else other):
            continue
        k = len(os.path.commonprefix([own, other]))
        ends = [*itertools.accumulate(len(form(text)) for _, text in pieces)]
        lead = len(form(written.lead))  # what the generation prompt writes of a turn may be rewritten with it
        begun = sum(end - lead <= k for end in ends[0:-1:2])  # turns before the difference, or with it
        if any(rewrites(turn, written, form) for turn in turns[:begun]):
            logger.debug("The chat template rewrites earlier turns. What comes after them is not compared.")
            return None
        place = next((name for end, (name, _) in zip(ends, pieces) if k < end), pieces[-1][0])
        shown = f"{own[max(k - 20, 0) : k + 20]!r}, rendered {other[max(k - 20, 0) : k + 20]!r}"
        return [Difference("text", kind, place, shown)]
    return []


def rewrites(turn: Turn, written: ChatFormat, form: Callable[[str], str]) -> bool:
    """Whether the template changes an earlier turn, such as its thinking, which small conversations show."""
    read = turn.messages or [ASK]
    own = turn.text if turn.finish_reason == "length" else written.text(turn.token_ids)  # cut at a control token
    text = written.text(turn.token_ids) + (turn.continuation or "")
    for messages in [read] if any(message["role"] == "user" for message in read) else [read, [*read, ASK]]:
        conversation = with_turns([ASK], [dataclasses.replace(turn, messages=messages, text=own)])
        try:
            arguments = {**written.prompt(conversation, {}), "tokenize": False}
            expected = written._render([ASK]) + text + written.suffix(turn.calls, messages)
            if form(written.tokenizer.apply_chat_template(**arguments)) != form(expected):
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
    return {f"tokens/{check}_differ": n / compared for check, (n, compared) in zip(CHECKS, sums) if compared}


def check_batch(rollouts: list[Rollout], env: Any, mode: str) -> tuple[list[list[Difference]], list[list[Difference]]]:
    """The differences in each of the rollouts that were compared, by `ids` and by `text`."""
    # Turns that no backend has given an account of are somebody's own, as of a fork that makes rollouts up.
    trained = [r for r in rollouts if not r.failed and r.turns and all(turn.generations for turn in r.turns)]
    # A format of a fork's own may lack what renders conversations to compare with.
    compares = getattr(env, "renders_all", True) and isinstance(env.format_of(env.tokenizer), ChatFormat)
    texts = [[check_text(r, one, env, mode == "strict") for one in r.records] for r in trained[: COMPARED * compares]]
    of_texts = [join(found or [] for found in each) for each in texts if any(found is not None for found in each)]
    return [join(map(check_ids, rollout.records)) for rollout in trained], of_texts
