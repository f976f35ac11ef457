"""Three checks that training reads the tokens of inference.

ids   each turn began with the ids that the backend reports to have read, and consists of those that it sampled
mask  the trained tokens of a record are those that were sampled for it, and no others
text  what a record reads before and between its turns is what the chat template writes there

The turns themselves are compared by `ids`: a template may leave out their thinking, or write their calls anew.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

from accelerate.utils import gather_object

from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.rollout import IdHash, Record, Rollout, Turn, join, with_turns

logger = logging.getLogger(__name__)

WHITE_SPACE, TEXT, UNREADABLE = "white space", "text", "no rendering"
READ = "between turns"


class Difference(NamedTuple):
    """A difference that a check found."""

    check: str  # ids, mask, text
    kind: str
    place: str
    shown: str  # with what stands around it


# -- text --


def check_text(rollout: Rollout, record: Record, env: Any) -> list[Difference]:
    """The differences between what a record reads as text and its messages, rendered as a whole."""
    start, further = rollout.prompt_messages, False
    if record.numbers and record.numbers[0] > 0 and record.turns[0].context is not None:
        start, further = record.turns[0].context.messages, True
    tokenizer, tools = env.tokenizer, env.tools if rollout.tools is None else rollout.tools
    written = env.format_of(tokenizer)
    read = [("", tokenizer.decode(record.prompt_ids))]
    read += [(end_of(turn, written), tokenizer.decode(turn.observation_ids)) for turn in record.turns]
    # Behind a turn without such ids nothing was read in this record.
    turns = [turn if turn.observation_ids else dataclasses.replace(turn, messages=[]) for turn in record.turns]
    arguments = written.prompt(with_turns(start, turns, begun=further), tools)
    arguments["add_generation_prompt"] = bool(turns[-1].messages)
    try:
        rendered = tokenizer.apply_chat_template(**{**arguments, "tokenize": False})
    except Exception as error:  # whatever a template raises
        return [Difference("text", UNREADABLE, READ, f"the template raises: {error}")]
    return compare(read, rendered, written.thinking)


def end_of(turn: Turn, written: Any) -> str:
    """The text of the token that ends a turn, as the template writes it; empty if the turn ends without one."""
    last = turn.token_ids[-1] if turn.token_ids else None
    if last not in written.ends or turn.finish_reason == "length":
        return ""
    foreign = written._closing and last not in written._closing
    return written.tokenizer.decode([min(written._closing) if foreign else last])


def compare(read: list[tuple[str, str]], rendered: str, thinking: tuple[str, str]) -> list[Difference]:
    """How texts that were read differ from a rendering, in which turns stand between them.

    Args:
        read: The texts, each with the end of the turn before it.
        rendered: The rendering. What it has behind the last text is not compared.
        thinking: The tags of thinking. That of an earlier turn may be left out, with what opens it before the turn.

    >>> read = [("", "U: 1? A: <think>"), (".", " U: 3? A: ")]
    >>> compare(read, "U: 1? A: 2. U: 3? A: 4", ("<think>", "</think>"))
    []
    >>> [found[1:3] for found in compare(read, "U: 1? A: 2.\\nU: 3? A: 4", ("<think>", "</think>"))]
    [('white space', 'between turns')]
    >>> [found[1:3] for found in compare(read, "U: 1? A: 2. U: 5? A: 4", ("<think>", "</think>"))]
    [('text', 'between turns')]
    """
    found, at = [], 0
    places = [k for k, letter in enumerate(rendered) if not letter.isspace()]
    letters = squeezed(rendered)
    for end, text in read:
        if not text.strip():
            continue
        for form in forms_of(text, thinking):
            wanted = squeezed(form)
            k = letters.find(wanted, at)
            while k >= 0 and at and not letters[at:k].endswith(squeezed(end)):
                k = letters.find(wanted, k + 1)
            if k == 0 or (k > 0 and at):  # the prompt stands at the beginning
                break
        else:
            shown = rendered[places[at] :][: len(text) + 40] if at < len(places) else ""
            return [*found, Difference("text", TEXT, READ, f"{text!r:.200}, rendered {shown!r:.200}")]
        # Behind a turn's end the text begins with its white space; else that may be the turn's.
        first = places[k - 1] + 1 if k and end else places[k]
        theirs, at = rendered[first : places[k + len(wanted) - 1] + 1], k + len(wanted)
        ours = form.rstrip() if end else form.strip()
        behind, prompt = text[len(text.rstrip()) :], read[0][1]  # the first text is the template's own
        is_other_prompt = text.rstrip().endswith(prompt.rstrip()[-8:]) and behind != prompt[len(prompt.rstrip()) :]
        if ours != theirs or is_other_prompt:
            found.append(Difference("text", WHITE_SPACE, READ, f"{ours!r:.200}, rendered {theirs!r:.200}"))
    return found


def forms_of(text: str, thinking: tuple[str, str]) -> list[str]:
    """A text that is read before a turn, also without the thinking that it begins for the turn, or leaves empty."""
    opening, closing = thinking
    before, opened, after = text.rpartition(opening)
    return [text, before] if opened and not squeezed(after).removeprefix(squeezed(closing)) else [text]


def squeezed(text: str) -> str:
    """A text without its white space."""
    return "".join(text.split())


CHECKS = ("ids", "mask", "text")
COMPARED = 8  # rollouts per batch and rank whose texts are compared: it takes milliseconds for each
reported: set[tuple] = set()


# -- ids and mask --


def check_ids(record: Record) -> list[Difference]:
    """Turns whose ids differ from those that the backend read or sampled. Turns without its report are skipped.

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
    """Tokens of a record that are trained but were not sampled for it, or the other way round.

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
    """The share of rollouts, over all ranks, in which each check found a difference. Collective.

    A kind of difference is logged once.
    """
    if args.tokenization_sanity_check_mode in ("off", "disable"):
        return {}
    counts, compared, found = check_batch(rollouts, env, args.tokenization_sanity_check_mode)
    reports = gather_object([(counts, compared)])
    for each in found:
        kind = each[:3] if each.check == "text" else each[:2]
        if kind not in reported:
            reported.add(kind)
            logger.warning(f"{text_of(each)} This kind of difference is logged once; the metrics tokens/* count it.")
    return {
        f"tokens/{check}_differ": sum(own[check] for own, _ in reports) / max(1, sum(own[check] for _, own in reports))
        for check in CHECKS
    }


def check_batch(rollouts: list[Rollout], env: Any, mode: str) -> tuple[dict, dict, list[Difference]]:
    """(number of rollouts with a difference per check, number of compared rollouts per check, differences)."""
    counts, found_here = dict.fromkeys(CHECKS, 0), []
    # Turns that no backend has given an account of are somebody's own, as of a fork that makes rollouts up.
    trained = [r for r in rollouts if not r.failed and r.turns and all(turn.generations for turn in r.turns)]
    # A format of a fork's own may lack what renders conversations to compare with.
    compares = getattr(env, "renders_all", True) and isinstance(env.format_of(env.tokenizer), ChatFormat)
    rendered = min(len(trained), COMPARED) if compares else 0
    for number, rollout in enumerate(trained):
        found = join([check_ids(record) + check_mask(record, record.loss_mask) for record in rollout.records])
        if number < rendered:
            texts = join([check_text(rollout, record, env) for record in rollout.records])
            found += [each for each in texts if not (mode == "ignore_strippable" and each.kind == WHITE_SPACE)]
        for check in {each.check for each in found}:
            counts[check] += 1
        found_here += found
    return counts, {"ids": len(trained), "mask": len(trained), "text": rendered}, found_here


def text_of(found: Difference) -> str:
    """Format a difference as a log message."""
    return (
        f"Training and inference differ (tokenization_sanity_check_mode, check {found.check}): {found.kind}, "
        f"{found.place}: {found.shown}."
    )
