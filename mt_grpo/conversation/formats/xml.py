"""How a model writes tool calls and answers: the paper's XML tags, and the choice of a format."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.conversation.formats.base import ChatFormat, parse_call, thinking_length
from mt_grpo.conversation.formats.hermes import HermesFormat
from mt_grpo.conversation.formats.native import SYNTAXES, NativeFormat
from mt_grpo.conversation.tools.signature import CALL_FORMAT
from mt_grpo.rollout import Message, ToolCall, ToolResult

CLOSING_TAGS = ("</tool>", "</answer>")


def parse_turn(text: str) -> tuple[ToolCall | None, bool]:
    """(tool call or None, answered) of one turn's text. The tag that closes first counts.

    >>> parse_turn('<tool>{"name": "calculator", "args": {"expression": "6*7"}}</tool>')
    (ToolCall(name='calculator', arguments={'expression': '6*7'}, error=None), False)
    >>> parse_turn("<reasoning>easy</reasoning><answer>42</answer>")
    (None, True)
    >>> parse_turn('<tool>{"name": "calculator", <answer>42</answer>')[0].error  # an answer inside a call is no answer
    'the call is not closed by </tool>'
    >>> parse_turn("<think>The format is <answer>x</answer>")  # tags inside thinking mean nothing
    (None, False)
    """
    start = thinking_length(text, "")
    call, answer = (None, None) if start is None else parse_tags(text[start:])
    return call, answer is not None


def parse_tags(text: str) -> tuple[ToolCall | None, str | None]:
    """(call, answer) of a turn's text behind its thinking. At most one of them is there."""
    end = min((text.find(tag) for tag in CLOSING_TAGS if tag in text), default=len(text))
    # Tags that the model only mentions while it reasons open nothing.
    start = max(
        (text.rfind(tag, 0, end) + len(tag) for tag in ("</think>", "</reasoning>") if tag in text[:end]), default=0
    )
    body, closing = text[start:end], text[end:]
    opened, answer = body.find("<tool>"), body.find("<answer>")
    if closing.startswith("</answer>") and answer >= 0 and not 0 <= opened < answer:
        return None, body[answer + len("<answer>") :].strip()
    if closing.startswith("</tool>"):
        if opened < 0:
            return ToolCall(None, {}, "</tool> without <tool> before it"), None
        return parse_call(body[opened + len("<tool>") :]), None
    return (ToolCall(None, {}, "the call is not closed by </tool>") if opened >= 0 else None), None


def result_message(observation: str) -> str:
    """The environment's message: role `user`, as in the paper."""
    return f"<result>\n{observation}\n</result>"


class XmlFormat(ChatFormat):
    """The paper's tags: one call in `<tool>`, or the answer in `<answer>`; a turn ends where the first one closes."""

    call_format = CALL_FORMAT
    stops = CLOSING_TAGS

    def setup(self) -> None:
        """Thinking stands between the tags of the model's family, which its chat template writes."""
        template = self.tokenizer.get_chat_template(self.chat_template_kwargs.get("chat_template"))
        marks = (syntax.thinking for syntax in SYNTAXES)
        self.thinking = next((pair for pair in marks if pair[0].strip() in template), ChatFormat.thinking)

    def results(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        return [{"role": "user", "content": result_message(result.text)} for result in results]

    def cut(self, ids: list[int], prompt_ids: list[int]) -> tuple[int, bool]:
        """Decided on decoded ids and the same way for every backend: a server's `stop` cuts its text and not its ids.

        A prefix of a sample is still on-policy.
        """
        length, ended = super().cut(ids, prompt_ids)
        before = self._before(prompt_ids)

        def closed(size: int) -> bool:
            text = self._decode(ids[:size])
            start = thinking_length(text, before, *self.thinking)
            return start is not None and any(tag in text[start:] for tag in CLOSING_TAGS)

        if not closed(length):
            return length, ended
        if not closed(length - 1):  # where a server's `stop` ended it
            return length, True
        return 1 + bisect.bisect_left(range(1, length + 1), True, key=closed), True

    def text(self, ids: list[int]) -> str:
        """Special tokens that end a turn are not in it, unless one is a closing tag."""
        last = ids[-1] if ids else None
        ended = last in self.ends or last in self.tokenizer.all_special_ids
        return self._decode(ids[:-1] if ended and self._decode([last]) not in CLOSING_TAGS else ids)

    def parse_text(self, text: str, tools: dict[str, Callable]) -> tuple[list[ToolCall], str | None]:
        call, answer = parse_tags(text)
        return [call] if call is not None else [], answer


TOOL_FORMATS: dict[str, type[ChatFormat]] = {
    "xml": XmlFormat,
    "hermes": HermesFormat,
    "native": NativeFormat,
}  # the choices of `tool_format`


def make_format(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
    extra_ends: Iterable[int] = (),
) -> ChatFormat:
    """The tool format of this name, for one tokenizer.

    Args:
        name: A key of `TOOL_FORMATS`.
        tokenizer: Whose chat template renders conversations.
        chat_template_kwargs: For every rendering, such as `{"enable_thinking": False}`.
        extra_ends: Further ids that end a turn, such as those of the model's generation config.

    Raises:
        ValueError: an unknown name, or a chat template that this format cannot use.
    """
    if name not in TOOL_FORMATS:
        raise ValueError(f"tool_format={name!r}, expected one of {', '.join(TOOL_FORMATS)}.")
    return TOOL_FORMATS[name](tokenizer, chat_template_kwargs, extra_ends)
