"""Two checks that training reads the tokens of inference.

ids   each turn began with the ids that the backend reports to have read, and consists of those that it sampled
text  a record's text is what the chat template makes of the whole conversation

The first always holds. Texts may differ because of the template, which may leave out earlier thinking: a difference
that the same comparison finds in a correct conversation is attributed to the template, and not logged.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from accelerate.utils import gather_object

from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.rollout import Record, Rollout, ToolCall, ToolResult, Turn, id_hash, join, with_turns

logger = logging.getLogger(__name__)


# The check `text` of `token_checks`: where a record's text is not what the chat template makes of its messages.


WHITE_SPACE, THINKING, TEXT, UNREADABLE = "white space", "thinking", "text", "no rendering"
SAMPLED, READ = "in a turn", "between turns"


class Difference(NamedTuple):
    """A difference that a check found."""

    check: str  # ids, text
    kind: str
    place: str
    shown: str  # with what stands around it
    texts: tuple[str, str] = ("", "")  # without white space: of the record, and of the rendering

    @property
    def key(self) -> tuple:
        """Identifies a difference of the template: with its texts between turns, without them inside a turn."""
        return (self.kind, self.place, *(self.texts if self.place == READ else ()))


def check_text(rollout: Rollout, record: Record, env: Any) -> list[Difference]:
    """The differences between the text of a record and its messages, rendered as a whole."""
    start, further = rollout.prompt_messages, False
    if record.numbers and record.numbers[0] > 0 and record.turns[0].context is not None:
        start, further = record.turns[0].context.messages, True
    tokenizer, tools = env.tokenizer, env.tools if rollout.tools is None else rollout.tools
    written = env.format_of(tokenizer)
    parts = [(tokenizer.decode(record.prompt_ids), False)]
    for turn in record.turns:
        parts += [(text_of_turn(turn, written), True), (tokenizer.decode(turn.observation_ids), False)]
    # Behind a turn without such ids nothing was read in this record.
    turns = [turn if turn.observation_ids else dataclasses.replace(turn, messages=[]) for turn in record.turns]
    arguments = written.prompt(with_turns(start, turns, begun=further), tools)
    arguments["add_generation_prompt"] = bool(turns[-1].messages)
    try:
        rendered = tokenizer.apply_chat_template(**{**arguments, "tokenize": False})
    except Exception as error:  # whatever a template raises
        return [Difference("text", UNREADABLE, READ, f"the template raises: {error}")]
    ends = [tokenizer.decode([token]) for token in written.ends]
    return compare(parts, rendered, written.thinking, ends)


def text_of_turn(turn: Turn, written: Any) -> str:
    """A turn's text. Where it ended by another token than the template's, that one stands in its place."""
    ids = list(turn.token_ids)
    if ids and ids[-1] in written.ends and written._closing and ids[-1] not in written._closing:
        ids[-1] = min(written._closing)
    text = written.tokenizer.decode(ids)
    cut = turn.finish_reason == "length" and ids and text == turn.text + written.tokenizer.decode(ids[-1:])
    return turn.text if cut else text  # a control token at which the budget ended a turn is not in its message


def compare(
    parts: list[tuple[str, bool]], rendered: str, thinking: tuple[str, str], ends: Iterable[str] = ()
) -> list[Difference]:
    """How a text, in parts of which is known whether they were sampled, differs from another one.

    >>> parts = [("U: 1? A:", False), ("<think>so</think> 2.", True), (" U: 3? A:", False), (" 4", True)]
    >>> compare(parts, "U: 1? A:<think>so</think> 2. U: 3? A: 4", ("<think>", "</think>"))
    []
    >>> [found[1:3] for found in compare(parts, "U: 1? A: 2.\\nU: 3? A: 4", ("<think>", "</think>"))]
    [('thinking', 'in a turn'), ('white space', 'between turns')]
    """
    found: list[Difference] = []
    for name, kept in variants(parts, thinking):
        ours = "".join(text for text, _ in kept)
        theirs = without_end(ours, rendered, ends)
        if squeezed(ours) == squeezed(theirs):
            if name:
                found.append(Difference("text", THINKING, SAMPLED, "the template leaves out thinking"))
            return found + pieces(kept, ours, theirs)
    ours = "".join(text for text, _ in parts)
    return pieces(parts, ours, without_end(ours, rendered, ends))


def variants(parts: list[tuple[str, bool]], thinking: tuple[str, str]) -> Iterable[tuple[str, list]]:
    """The parts as they are, without the thinking of all turns but the last, and without any thinking."""
    block = re.compile(re.escape(thinking[0]) + ".*?" + re.escape(thinking[1]), re.S)
    turns = [k for k, (_, sampled) in enumerate(parts) if sampled]
    yield "", parts
    for gone in (turns[:-1], turns):
        # A generation prompt may open the thinking, which then ends in the turn.
        kept: list[tuple[str, bool]] = []
        for k, (part, sampled) in enumerate(parts):
            own = part
            if k in gone:
                own = block.sub("", own, count=1)
                if thinking[1] in own and kept and thinking[0] in kept[-1][0].rpartition(thinking[1])[2]:
                    head, _, _ = kept[-1][0].rpartition(thinking[0])
                    kept[-1] = (head, kept[-1][1])
                    own = own.partition(thinking[1])[2]
            kept.append((own, sampled))
        yield THINKING, kept


def without_end(ours: str, rendered: str, ends: Iterable[str]) -> str:
    """A rendering without what it has behind our text: an end of turn that was not sampled, and white space."""
    text = rendered.rstrip()
    for end in ends:
        if end and text.endswith(end) and not ours.rstrip().endswith(end):
            text = text.removesuffix(end)
    return text + ours[len(ours.rstrip()) :] if text.endswith(ours.rstrip()[-8:]) else text


def squeezed(text: str) -> str:
    """A text without its white space."""
    return "".join(text.split())


def pieces(parts: list[tuple[str, bool]], ours: str, theirs: str) -> list[Difference]:
    """Each place where two texts differ."""
    flags = join([[sampled] * len(text) for text, sampled in parts])
    a, b = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (ours, theirs))
    at, found = 0, []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        own, other = "".join(a[i1:i2]), "".join(b[j1:j2])
        if tag != "equal":
            kind = WHITE_SPACE if squeezed(own) == squeezed(other) else TEXT
            # Between a turn and what is read behind it, it is the reading's.
            inside = flags[at : at + len(own)] or [all(flags[max(at - 1, 0) : at + 1])]
            shown = f"{ours[max(0, at - 10) : at + len(own) + 10]!r}, rendered {other!r} in place of {own!r}"
            place = SAMPLED if all(inside) else READ
            found.append(Difference("text", kind, place, shown, (squeezed(own), squeezed(other))))
        at += len(own)
    return found


def listed(env: Any) -> set[tuple]:
    """Keys of what differs in conversations without any fault: what the template itself does."""
    written = env.format_of(env.tokenizer)
    if not hasattr(written, "listed"):
        written.listed = set()
        opening, closing = written.thinking
        calls = [ToolCall("add", {"a": 2})]
        asked = written._render([{"role": "user", "content": "A question."}])
        opened = opening in asked and closing not in asked.rpartition(opening)[2]  # by the generation prompt
        begun = "" if opened else opening
        for thought in ("", f"{begun}\nso\n{closing}\n\n", f"{begun}so{closing}"):
            for texts, called in (
                ((f"{thought}A turn.", f"{thought}Another."), []),
                ((f"{thought} A turn. \n", "\n\nB "), []),
                ((thought + call_text(written, calls), f"{thought}Another."), calls),
                ((thought + call_text(written, calls), "Another."), calls),
            ):
                rollout = faultless(env, texts, called)
                if rollout is not None:
                    written.listed |= {found.key for found in check_text(rollout, rollout.records[0], env)}
    return written.listed


def call_text(written: Any, calls: list[ToolCall]) -> str:
    """A turn's calls as the template writes them; none where it cannot."""
    asked = [{"role": "user", "content": "A question."}]
    try:
        before = written._render(asked)
        whole = written._render([*asked, written.turn_message(calls)], add_generation_prompt=False)
    except Exception:  # whatever a template raises
        return ""
    text = whole[len(os.path.commonprefix([before, whole])) :].rstrip()
    for end in written.ends:
        text = text.removesuffix(written.tokenizer.decode([end]))
    return text


def faultless(env: Any, texts: tuple[str, ...], calls: list[ToolCall]) -> Rollout | None:
    """A correct conversation whose turns have these texts, None if the template cannot render it."""
    tokenizer, written = env.tokenizer, env.format_of(env.tokenizer)
    try:
        messages = env.with_system_prompt([{"role": "user", "content": "A question."}], env.tools)
        rollout = Rollout(messages, env.prompt_ids(messages, tokenizer), tools=env.tools)
        for number, text in enumerate(texts):
            read = written.results(calls, [ToolResult("4") for _ in calls]) if calls else []
            read = read or [{"role": "user", "content": "And?"}]
            suffix = written.text_ids(written.suffix(calls, read))
            ids = [*written.text_ids(text), *(written._end_of_turn(suffix)[-1:] or [tokenizer.eos_token_id])]
            rollout.turns.append(Turn(ids, None, written.text(ids), "stop"))
            if number < len(texts) - 1:
                rollout.turns[-1].messages = read
                rollout.turns[-1].observation_ids = written.suffix_ids(calls, read, ids)
    except Exception as error:  # whatever a template raises: nothing is listed
        logger.debug(f"The chat template cannot render a conversation to compare with: {error}")
        return None
    return rollout


CHECKS = ("ids", "text")
COMPARED = 8  # rollouts per batch and rank whose texts are compared: it takes milliseconds for each
reported: set[tuple] = set()


# -- ids --


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


# -- a batch --


def check_rollouts(rollouts: list[Rollout], env: Any, args: Any) -> dict[str, float]:
    """The share of all ranks' rollouts in which each check found a difference, logged once per kind. Collective."""
    if args.tokenization_sanity_check_mode in ("off", "disable"):
        return {}
    counts, compared, found = check_batch(rollouts, env, args.tokenization_sanity_check_mode)
    for each in found:
        kind = each[:3] if each.check == "text" else each[:2]
        if kind not in reported:
            reported.add(kind)
            logger.warning(
                f"Training and inference differ (tokenization_sanity_check_mode, check {each.check}): {each.kind}, "
                f"{each.place}: {each.shown}. It is logged once per kind; the metrics tokens/* count it."
            )
    counts, compared = (map(sum, zip(*each)) for each in zip(*gather_object([(counts, compared)])))
    return {f"tokens/{check}_differ": n / max(1, most) for check, n, most in zip(CHECKS, counts, compared)}


def check_batch(rollouts: list[Rollout], env: Any, mode: str) -> tuple[list[int], list[int], list[Difference]]:
    """(numbers of rollouts with a difference, numbers of compared rollouts, both per check; differences)."""
    # Turns that no backend has given an account of are somebody's own, as of a fork that makes rollouts up.
    trained = [r for r in rollouts if not r.failed and r.turns and all(turn.generations for turn in r.turns)]
    # A format of a fork's own may lack what renders conversations to compare with.
    compares = getattr(env, "renders_all", True) and isinstance(env.format_of(env.tokenizer), ChatFormat)
    rendered = trained[:COMPARED] if compares else []
    of_ids = [join(map(check_ids, rollout.records)) for rollout in trained]
    of_texts = [join(check_text(rollout, record, env) for record in rollout.records) for rollout in rendered]
    passed = listed(env) if any(of_texts) else set()
    of_texts = [
        [each for each in found if each.key not in passed and (mode == "strict" or each.kind != WHITE_SPACE)]
        for found in of_texts
    ]
    return [sum(map(bool, each)) for each in (of_ids, of_texts)], [len(of_ids), len(of_texts)], join(of_ids + of_texts)
