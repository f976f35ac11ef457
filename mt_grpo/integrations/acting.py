"""Turns that are actions of a game, their tags and texts; tools as methods of an environment; accepted arguments."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from mt_grpo.conversation.formats.base import THINKING_TAGS
from mt_grpo.conversation.tools.signature import as_tool
from mt_grpo.rollout import ToolResult, Turn

OPEN, CLOSE = "<action>", "</action>"


def behind_thinking(text: str) -> str:
    """The text after a turn's thinking in any family's tags, of which only `<think>` may be missing from the text.

    >>> [behind_thinking(text) for text in ("a</think> b", "<|channel>thought\\na<channel|> b", "so <|end|> b")]
    [' b', ' b', 'so <|end|> b']
    """
    for family, (opening, closing) in THINKING_TAGS.items():
        if family == "most" or opening.strip() in text.partition(closing)[0]:
            text = text.rpartition(closing)[2]
    return text


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


def accepted(function: Callable, **offered: Any) -> dict[str, Any]:
    """Those of the offered keyword arguments that a function takes, by their names or by **kwargs."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in offered.items() if takes_all or name in parameters}


def as_method(name: str, schema: dict[str, Any], run: Callable) -> Callable:
    """Convert a tool with a JSON schema to an async method that awaits `run(environment, name, arguments)`."""

    async def method(self: Any, **arguments: Any) -> ToolResult:
        return await run(self, name, arguments)

    functools.update_wrapper(method, as_tool(types.SimpleNamespace(name=name, schema=schema, run=method)))
    del method.__wrapped__  # it wraps nothing: the tool calls the method
    return method
