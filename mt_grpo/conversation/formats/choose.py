"""The format xml, with tool calls and answers in the XML tags of the paper, and the choice of a format by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from mt_grpo.conversation.formats.base import ChatFormat, parse_call
from mt_grpo.conversation.formats.hermes import HermesFormat, NativeFormat
from mt_grpo.conversation.tools.signature import CALL_FORMAT
from mt_grpo.rollout import Message, ToolCall

CLOSING_TAGS = ("</tool>", "</answer>")


def parse_tags(text: str) -> tuple[ToolCall | None, str | None]:
    """Parse a turn's text after its thinking. Returns (call, answer), of which at most one is not None.

    The tag that closes first counts.

    >>> parse_tags('<tool>{"name": "calculator", "args": {"expression": "6*7"}}</tool>')
    (ToolCall(name='calculator', arguments={'expression': '6*7'}, error=None), None)
    >>> parse_tags("<reasoning>Not <answer>1.</reasoning><answer>2</answer>")
    (None, '2')
    >>> parse_tags("<answer>It ends with </reasoning></answer>")  # which is a text of the answer
    (None, 'It ends with </reasoning>')
    """
    end = min((text.find(tag) for tag in CLOSING_TAGS if tag in text), default=len(text))
    body, closing = text[:end], text[end:]
    # Tags that the model mentions while it reasons open nothing. An answer or a call may mention what ends reasoning.
    ends = [found.end() for found in re.finditer("</think>|</reasoning>", body)]
    last = max(body.rfind("<tool>"), body.rfind("<answer>"))
    first = re.search("<think>|<reasoning>|<tool>|<answer>", body)
    reasons = not closing or first is None or first[0] in ("<think>", "<reasoning>")
    start = max([k for k in ends if k <= last] or (ends if reasons else []), default=0)
    body = body[start:]
    opened, answer = body.find("<tool>"), body.find("<answer>")
    if closing.startswith("</answer>") and answer >= 0 and not 0 <= opened < answer:
        return None, body[answer + len("<answer>") :].strip()
    if not closing.startswith("</tool>"):
        return (ToolCall(None, {}, "the call is not closed by </tool>") if opened >= 0 else None), None
    if opened < 0:
        return ToolCall(None, {}, "</tool> without <tool> before it"), None
    return parse_call(body[opened + len("<tool>") :]), None


class XmlFormat(ChatFormat):
    """Tool format with the paper's tags: one call in `<tool>`, or the answer in `<answer>`, which end a turn."""

    call_format = CALL_FORMAT
    stops = CLOSING_TAGS
    begins, closes = "<tool>|<answer>", "</tool>|</answer>"

    def turn_message(self, calls: list[ToolCall], text: str = "A turn.") -> Message:
        bodies = [json.dumps({"name": call.name, "args": call.arguments}, ensure_ascii=False) for call in calls]
        content = "\n".join([*filter(None, [text]), *(f"<tool>{body}</tool>" for body in bodies)])
        return {"role": "assistant", "content": content}

    def parse_text(self, text: str, tools: dict[str, Callable]) -> tuple[list[ToolCall], str | None]:
        call, answer = parse_tags(text)
        return [] if call is None else [call], answer


# The choices of `tool_format`: a fork adds its own.
TOOL_FORMATS: dict[str, type[ChatFormat]] = {"xml": XmlFormat, "hermes": HermesFormat, "native": NativeFormat}
