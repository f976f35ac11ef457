"""The format hermes: calls as the chat template writes them, several per turn, and results in messages of role `tool`.

Hermes is the syntax of many models: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_grpo.conversation.formats.base import (
    ASK,
    SEVERAL_CALLS,
    THINKING_TAGS,
    ChatFormat,
    parse_call,
    thinking_length,
)
from mt_grpo.conversation.formats.control_tokens import Origin, clean_schema
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.rollout import Message, ToolCall, ToolResult

# From (the text between the tags of a call, the tool's name if the opening tag has it, the tools) to the calls in it.
Reader = Callable[[str, str | None, dict[str, Callable]], list[ToolCall]]


@dataclass(frozen=True)
class CallSyntax:
    """A syntax of calls. `opening`, `closing`, `tail` and `answer` are regular expressions."""

    name: str
    opening: str
    closing: str
    read: Reader
    tail: str = ""  # what the template writes behind the last argument of the last call; empty: `closing`
    answer: str = ""  # where a turn's answer stands; empty: the text beside thinking and calls
    thinking: tuple[str, str] = THINKING_TAGS["most"]
    headers: tuple[str, ...] = ()  # as in `ChatFormat`

    def split(self, text: str, tools: dict[str, Callable], broken: bool = True) -> tuple[list[ToolCall], str]:
        """Parse the calls of a text. Returns (calls, remaining text). A broken call does not affect the others.

        If not `broken`, broken calls are left out, and their text remains.
        """
        calls, beside, start, tried = [], [], 0, None
        opening, closing = re.compile(self.opening, re.DOTALL), re.compile(self.closing, re.DOTALL)
        closed = closing.search(text)
        while (opened := opening.search(text, start)) is not None:
            beside.append(text[start : opened.start()])
            name = opened.groupdict().get("name")
            following = opening.search(text, max(opened.end(), opened.start() + 1))
            if closed and closed.start() < opened.end():
                closed = closing.search(text, opened.end())
            # What opens a call can stand in an argument of it. Tried once per closing: a text may open thousands.
            nested = closed and following and following.start() < closed.start()
            read, start = [], following.start() if following else len(text)
            if closed and not (nested and tried == closed.start()):
                read, tried = self.read(text[opened.end() : closed.start()], name, tools), closed.start()
                if nested and any(call.error for call in read):
                    read = []  # this call was never closed
                else:
                    start = max(closed.end(), opened.start() + 1)
            read = read or [ToolCall(name, {}, "the call is not closed")]
            if not broken and any(call.error for call in read):
                beside.append(text[opened.start() : start])
            calls += [call for call in read if broken or not call.error]
        return calls, "".join([*beside, text[start:]])

    def example(self, text: str) -> str:
        """The text of the first call, as the model wrote it."""
        opened = re.search(self.opening, text, re.DOTALL)
        closed = re.compile(self.closing, re.DOTALL).search(text, opened.end())
        return text[opened.start() : closed.end()].strip()


SEVERAL_IN_TAGS = "several calls in one <tool_call>; write one <tool_call> for each"
TOOL_CALL = "<tool_call>", "</tool_call>"
HERMES = CallSyntax(
    "hermes (Qwen 2.5, Qwen 3)", *TOOL_CALL, lambda body, name, tools: [parse_call(body, "arguments", SEVERAL_IN_TAGS)]
)


class HermesFormat(ChatFormat):
    """Tool format with several calls per turn, which only an end id or a limit ends. It uses the first fitting syntax.

    INVARIANT: what the chat template writes for a call is read as that call; `setup` tries it.
    """

    syntaxes: tuple[CallSyntax, ...] = (HERMES,)
    probes = (ToolCall("get_total", {"first": 2, "second": "a b"}), ToolCall("get_name", {"key": "a\\b"}))

    def setup(self) -> None:
        """Choose the first syntax that reads the calls which the template writes correctly."""
        self.call_format = self.syntax_example()
        self.thinking, self.headers = self.syntax.thinking, self.syntax.headers
        self.begins, self.closes = f"{self.syntax.opening}|<answer>", f"{self.syntax.closing}|</answer>"
        try:
            self.describes_tools = "get_total" in self._render([ASK], tools=[tool_schema("get_total", get_total)])
        except Exception as error:
            raise self.refusal(f"cannot render tools: {error}") from error
        turn, results = {"role": "assistant", "content": self.call_format}, [ToolResult("result-1")]
        try:  # whether results reach the model after a turn whose call is only in its text
            self.keeps_results = "result-1" in self._render([ASK, turn, *self.results(self.probes, results)])
        except Exception:  # whatever a template raises
            self.keeps_results = False

    def _render(self, messages: list[Message], **kwargs: Any) -> str:
        # Some tokenizers have a template of their own for conversations with tools.
        template = self.tokenizer.get_chat_template(self.chat_template_kwargs.get("chat_template"), tools=[])
        return super()._render(messages, **{**kwargs, "chat_template": template})

    def syntax_example(self) -> str:
        """A call as the template writes it. Sets `syntax`, `several` (calls per turn), `probes` and `arguments`."""
        written, problem = "", None
        # Some templates take one call per turn, and some take arguments as text.
        for number, self.arguments in ((2, dict), (2, json.dumps), (1, dict), (1, json.dumps)):
            probes = list(type(self).probes[:number])
            try:
                written = self._render([ASK, self.turn_message(probes)])
            except Exception as error:  # whatever a template raises
                problem = error
                continue
            self.syntax = next((each for each in self.syntaxes if each.split(written, {})[0] == probes), None)
            if self.syntax is not None:
                self.several, self.probes = number > 1, probes
                return self.syntax.example(written)
        if not written:
            raise self.refusal(f"cannot render a turn with calls: {problem}") from problem
        if "get_total" not in written:
            raise self.refusal("has no tool support: it leaves calls out")
        raise self.refusal(f"writes calls in another syntax than this tool_format reads: ...{written[-300:]!r}")

    def closings(self) -> list[str]:
        return [*super().closings(), self.suffix(self.probes, self.results(self.probes, [ToolResult("0")]))]

    def prompt(self, messages: list[Message], tools: dict[str, Callable]) -> dict[str, Any]:
        shown = "" if self.describes_tools else str([message["content"] for message in messages])
        if missing := [name for name in tools if not self.describes_tools and name not in shown]:
            raise ValueError(
                f"The chat template of {self.tokenizer.name_or_path or 'this tokenizer'} leaves tools out of the "
                f"prompt, and the messages do not name {missing[0]!r}. Write {{tool_descriptions}} in system_prompt."
            )
        schemas = [
            clean_schema(tool_schema(name, tool), self.tokenizer, getattr(tool, "origin", Origin.OUTSIDE))
            for name, tool in tools.items()
        ]
        messages = messages if self.keeps_results else self.with_calls(messages, tools)
        return {**super().prompt(messages, tools), **({"tools": schemas} if schemas else {})}

    def with_calls(self, messages: list[Message], tools: dict[str, Callable]) -> list[Message]:
        """Move calls from texts into `tool_calls`, for a template that leaves out results after calls in a text.

        Such are the turns of a history that an environment has edited. A call for each result, so that none is lost.
        """
        written = []
        for k, message in enumerate(messages):
            if (
                message["role"] == "assistant"
                and "tool_calls" not in message
                and isinstance(message.get("content"), str)
            ):
                count = len([*itertools.takewhile(lambda m: m["role"] == "tool", messages[k + 1 :])])
                message = self.with_reasoning(message)
                text = message["content"]
                start = thinking_length(text, "", *self.thinking)
                thought, text = (text, "") if start is None else (text[:start], text[start:])
                if count:
                    calls, beside = self.syntax.split(text, tools)
                    turn = self.turn_message((calls + [ToolCall(None, {})] * count)[:count])
                    message = {**message, **turn, "content": (thought + self.content(beside)).strip()}
                else:
                    message = {**message, "content": thought + (self.content(text) or text)}
            written.append(message)
        return written

    def results(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        return [
            {"role": "tool", "name": plain_name(call), "tool_call_id": call_id(k), "content": result.text}
            for k, (call, result) in enumerate(zip(calls, results))
        ]

    def turn_message(self, calls: list[ToolCall]) -> Message:
        """A turn with these calls and no text, as a message for the chat template."""
        functions = [{"name": plain_name(call), "arguments": self.arguments(call.arguments)} for call in calls]
        written = [{"id": call_id(k), "type": "function", "function": f} for k, f in enumerate(functions)]
        return {"role": "assistant", "content": "", "tool_calls": written}

    def written_turn(self, text: str, calls: list[ToolCall]) -> Message:
        if len(calls) > 1 and not self.several:
            raise ValueError(f"The model's chat template takes one call in a turn, got {len(calls)}.")
        return {**(self.turn_message(calls) if calls else {"role": "assistant"}), "content": text}

    def suffix(self, calls: list[ToolCall], messages: list[Message]) -> str:
        """Behind results, the stand-in holds one call for each: as content, some templates lose them."""
        results = [message for message in messages if message["role"] == "tool"]
        if not results:
            return super().suffix(calls, messages)
        names = [result.get("name", "unknown") for result in results]  # an environment's own may say none
        stand_in = self.turn_message([ToolCall(name, {"key": self._sentinel}) for name in names])
        rendered = self._render([ASK, stand_in, *messages])
        behind = rendered.rpartition(self._sentinel)[2]
        closed = re.search(self.syntax.tail or self.syntax.closing, behind, re.DOTALL)
        if rendered.count(self._sentinel) != len(results) or closed is None:
            raise ValueError(f"{len(results)} calls are not in {rendered!r}")
        return behind[closed.end() :]

    def parse_text(self, text: str, tools: dict[str, Callable]) -> tuple[list[ToolCall], str | None]:
        calls, beside = self.syntax.split(text, tools)
        if len(calls) > 1 and not self.several:
            return [ToolCall(None, {}, SEVERAL_CALLS)], None
        return calls, None if calls else self.answer(beside)

    def good_calls(self, text: str, tools: dict[str, Callable]) -> tuple[list[ToolCall], str]:
        """The calls that can be read, and the text without them: for programs that take a broken call as text."""
        if len(self.syntax.split(text, tools)[0]) > 1 and not self.several:
            return [], text
        return self.syntax.split(text, tools, broken=False)

    def content(self, text: str) -> str:
        """The text of a turn without its thinking and its calls."""
        return "".join(re.findall(self.syntax.answer, text, re.DOTALL)) if self.syntax.answer else text

    def answer(self, text: str) -> str | None:
        """The contents of `<answer>`, or the whole text without this tag. None if it is blank."""
        text = self.content(text)
        written = re.search(r"<answer>(.*?)(?:</answer>|\Z)", text, re.DOTALL)
        return written[1].strip() if written else text.strip() or None


def get_total(first: int, second: str) -> str:
    """Get a total.

    Args:
        first: A number.
        second: A text.
    """


def call_id(index: int) -> str:
    """An id for a call within its turn: nine letters and digits, which all templates accept."""
    return f"call{index:05d}"


def plain_name(call: ToolCall) -> str:
    """The tool's name in a result message. The name that the model wrote may be anything."""
    return call.name if call.name and re.fullmatch(r"[\w.:/-]{1,128}", call.name) else "unknown"
