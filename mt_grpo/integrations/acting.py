"""Turns that are actions of a game: the tags of an action, and the text of a turn."""

from __future__ import annotations

from mt_grpo.conversation.formats.base import behind_thinking
from mt_grpo.rollout import Turn

OPEN, CLOSE = "<action>", "</action>"


def said(turn: Turn) -> str:
    """Return a turn's text without its thinking.

    >>> said(Turn([], None, "<think>left?</think> right", "stop"))
    ' right'
    """
    if turn.open_thinking:
        return ""
    behind = behind_thinking(turn.text)  # an answer is without what stands beside its tags
    return behind if turn.answer is None or (CLOSE in behind and CLOSE not in turn.answer) else turn.answer


def tagged(text: str) -> str:
    """Return the action in a text: the contents of its last <action>, or the whole text without one.

    >>> tagged("First <action>up</action>, no: <action>down</action>"), tagged(" left "), tagged("<action>up")
    ('down', 'left', '<action>up')
    """
    before, closed, _ = text.rpartition(CLOSE)
    return (before.rpartition(OPEN)[2] if closed and OPEN in before else text).strip()
