"""The formats xml, hermes and native, and the choice of a format by its name.

In xml calls and answers stand in the paper's tags. In hermes and native the chat template writes calls, and results
are messages of role `tool`. Hermes is many models': `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mt_grpo.base.rows import is_nested
from mt_grpo.conversation.formats.base import ASK, SEVERAL_CALLS, ChatFormat, load_json, parse_call, thinking_length
from mt_grpo.conversation.formats.control_tokens import check_names, forbidden_in, neutralise_json
from mt_grpo.conversation.tools.signature import CALL_FORMAT, parts_of_schema, tool_schema
from mt_grpo.rollout import Message, Origin, ToolCall, ToolResult

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


UNREADABLE_CALL = "the call cannot be read"
MAX_CALLS = 32  # of a turn; more are a repetition, and results for all of them would be rendered again and again


@dataclass(frozen=True)
class CallSyntax:
    """A syntax of calls. `opening`, `closing`, `header`, `tail` and `answer` are regular expressions."""

    name: str
    opening: str
    closing: str
    read: Callable[[str | None, str, dict[str, Callable]], ToolCall]  # from (the tool's name if known, text, tools)
    header: str = ""  # finds (name, arguments) between the tags; empty: `read` gets all of it
    tail: str = ""  # what the template writes behind the last argument of the last call; empty: `closing`
    answer: str = ""  # where a turn's answer stands; empty: the text beside thinking and calls
    headers: tuple[str, ...] = ()  # as in `ChatFormat`

    def split(self, text: str, tools: dict[str, Callable], broken: bool = True) -> tuple[list[ToolCall], str]:
        """Parse the calls of a text. Returns (calls, remaining text), which has broken calls if not `broken`."""
        calls, beside, start, tried = [], [], 0, None
        opening, closing = re.compile(self.opening, re.DOTALL), re.compile(self.closing, re.DOTALL)
        closed = closing.search(text)
        while (opened := opening.search(text, start)) is not None:
            beside.append(text[start : opened.start()])
            name = opened.groupdict().get("name")
            following = opening.search(text, max(opened.end(), opened.start() + 1))
            if closed and closed.start() < opened.end():
                closed = closing.search(text, opened.end())
            call, start = ToolCall(name, {}, "the call is not closed"), following.start() if following else len(text)
            # What opens a call can stand in an argument of it. Tried once per closing: a text may open thousands.
            nested = closed and following and following.start() < closed.start()
            if closed and not (nested and tried == closed.start()):
                read, tried = self.read_body(name, text[opened.end() : closed.start()], tools), closed.start()
                if not (nested and read.error):  # otherwise this call was never closed
                    call, start = read, max(closed.end(), opened.start() + 1)
            if broken or not call.error:
                calls.append(call)
            else:
                beside.append(text[opened.start() : start])
        return calls, "".join([*beside, text[start:]])

    def read_body(self, name: str | None, body: str, tools: dict[str, Callable]) -> ToolCall:
        """Parse what stands between the tags of a call, whose opening may have the tool's name."""
        if not self.header:
            return self.read(name, body, tools)
        found = re.fullmatch(self.header, body.strip(), re.DOTALL)
        return self.read(*found.groups(), tools) if found else ToolCall(None, {}, UNREADABLE_CALL)


IN_TAGS = "arguments", "several calls in one <tool_call>; write one <tool_call> for each"
TOOL_CALL = "<tool_call>", "</tool_call>"
HERMES = CallSyntax("hermes (Qwen 2.5, Qwen 3)", *TOOL_CALL, lambda _, body, __: parse_call(body, *IN_TAGS))
NUMBER = {"type": "object", "properties": {"first": {"type": "integer", "description": "A."}}, "required": ["first"]}
GET_TOTAL = {"type": "function", "function": {"name": "get_total", "description": "A.", "parameters": NUMBER}}


class HermesFormat(ChatFormat):
    """Tool format with several calls per turn, which only an end id or a limit ends. It uses the first fitting syntax.

    INVARIANT: what the chat template writes for a call is read as that call; `setup` tries it.
    """

    calls_by_template = True
    syntaxes: tuple[CallSyntax, ...] = (HERMES,)
    probes = (ToolCall("get_total", {"first": 2, "second": "a b"}), ToolCall("get_name", {"key": "a\\b"}))

    def setup(self) -> None:
        """Choose the first syntax that reads the calls which the template writes, two in a turn if it takes them."""
        for self.several in (True, False):
            self.probes = type(self).probes[: 1 + self.several]
            written = self._rendered([ASK, self.turn_message(self.probes)])
            if fitting := [each for each in self.syntaxes if tuple(each.split(written, {})[0]) == self.probes]:
                break
        else:
            unread = f"it writes calls in another syntax than this tool_format reads: ...{written[-300:]!r}"
            lacking = "it has no tool support: it leaves calls out" if written else "it cannot render calls"
            raise ValueError(unread if "get_total" in written else lacking)
        self.syntax, self.family, self.headers = fitting[0], fitting[0].name, fitting[0].headers
        super().setup()
        self.begins, self.closes = f"{self.syntax.opening}|<answer>", f"{self.syntax.closing}|</answer>"
        self.call_format = re.search(f"(?:{self.begins}).*?(?:{self.closes})", written, re.DOTALL)[0].strip()
        self.describes_tools = "get_total" in self._rendered([ASK], tools=[GET_TOTAL])
        # Whether results reach the model after a turn whose call is only in its text.
        turn, results = {"role": "assistant", "content": self.call_format}, [ToolResult("result-1")]
        self.keeps_results = "result-1" in self._rendered([ASK, turn, *self.results(self.probes, results)])

    def prompt(self, messages: list[Message], tools: dict[str, Callable]) -> dict[str, Any]:
        shown = "" if self.describes_tools else str([message["content"] for message in messages])
        if missing := [name for name in tools if not self.describes_tools and name not in shown]:
            lacking = f"it leaves tools out of the prompt, and the messages do not name {missing[0]!r}"
            raise self.refusal(f"{lacking} (write {{tool_descriptions}} in system_prompt)")
        schemas = [self.shown_schema(name, tool) for name, tool in tools.items()]
        messages = messages if self.keeps_results else self.with_calls(messages, tools)
        return {**super().prompt(messages, tools), **({"tools": schemas} if schemas else {})}

    def shown_schema(self, name: str, tool: Callable) -> dict[str, Any]:
        """A tool's JSON schema without control tokens. Raises `ValueError` for one in a name (`check_names`)."""
        schema = tool_schema(name, tool)
        forbidden = forbidden_in(getattr(tool, "origin", Origin.OUTSIDE), "tool", self.tokenizer)
        check_names(schema["function"], forbidden)
        return neutralise_json(schema, self.tokenizer, forbidden)

    def with_calls(self, messages: list[Message], tools: dict[str, Callable]) -> list[Message]:
        """Move calls from texts of an edited history into `tool_calls`, one for each result, so that none is lost."""
        written = list(messages)
        for k, message in enumerate(messages):
            text = message.get("content")
            if message["role"] != "assistant" or "tool_calls" in message or not isinstance(text, str):
                continue
            message = self.with_reasoning(message)
            start = thinking_length(message["content"], "", *self.thinking)
            thought, text = message["content"][:start], "" if start is None else message["content"][start:]
            if count := len([*itertools.takewhile(lambda m: m["role"] == "tool", messages[k + 1 :])]):
                calls, beside = self.syntax.split(text, tools)
                turn = self.turn_message((calls + [ToolCall(None, {})] * count)[:count])
                written[k] = {**message, **turn, "content": (thought + self.content(beside)).strip()}
            else:
                written[k] = {**message, "content": thought + (self.content(text) or text)}
        return written

    def results(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        return [
            {"role": "tool", "name": plain_name(call), "tool_call_id": call_id(k), "content": result.text}
            for k, (call, result) in enumerate(zip(calls, results))
        ]

    def turn_message(self, calls: list[ToolCall], text: str = "") -> Message:
        functions = [{"name": plain_name(call), "arguments": self.arguments(call.arguments)} for call in calls]
        written = [{"id": call_id(k), "type": "function", "function": f} for k, f in enumerate(functions)]
        return {"role": "assistant", "content": text, **({"tool_calls": written} if written else {})}

    def suffix(self, calls: list[ToolCall], messages: list[Message]) -> str:
        """Behind results, the stand-in holds one call for each: as content, some templates lose them."""
        results = [message for message in messages if message["role"] == "tool"]
        if not results:
            return super().suffix(calls, messages)
        stand_in = self.turn_message([ToolCall(each.get("name"), {"key": self._sentinel}) for each in results])
        rendered = self._render([ASK, stand_in, *messages])
        behind = rendered.rpartition(self._sentinel)[2]
        closed = re.search(self.syntax.tail or self.syntax.closing, behind, re.DOTALL)
        if rendered.count(self._sentinel) != len(results) or closed is None:
            raise ValueError(f"{len(results)} calls are not in {rendered!r}")
        return behind[closed.end() :]

    def parse_text(self, text: str, tools: dict[str, Callable]) -> tuple[list[ToolCall], str | None]:
        calls, beside = self.syntax.split(text, tools)
        if len(calls) > (MAX_CALLS if self.several else 1):
            return [ToolCall(None, {}, SEVERAL_CALLS)], None
        return calls, None if calls else self.answer(beside)

    def content(self, text: str) -> str:
        """The text of a turn without its thinking and its calls."""
        return "".join(re.findall(self.syntax.answer, text, re.DOTALL)) if self.syntax.answer else text

    def answer(self, text: str) -> str | None:
        """The contents of `<answer>`, or the whole text without this tag. None if it is blank."""
        text = self.content(text)
        written = re.search(r"<answer>(.*?)(?:</answer>|\Z)", text, re.DOTALL)
        return written[1].strip() if written else text.strip() or None


def call_id(index: int) -> str:
    """An id for a call within its turn: nine letters and digits, which all templates accept."""
    return f"call{index:05d}"


def plain_name(call: ToolCall) -> str:
    """The tool's name in a result message. The name that the model wrote may be anything."""
    return call.name if call.name and re.fullmatch(r"[\w.:/-]{1,128}", call.name) else "unknown"


# The format native: the syntaxes of calls that chat templates write themselves, one per family of models.
# What JSON schemas call the type of a value. Whether a number must be whole is checked with the call.
KINDS = {str: {"string"}, bool: {"boolean"}, type(None): {"null"}, list: {"array"}, dict: {"object"}}
KINDS |= dict.fromkeys((int, float), {"integer", "number"})


def accepts(schema: Any, value: Any) -> bool:
    """Whether a JSON schema allows a value, by its types, enums and constants."""
    if not isinstance(schema, dict):
        return schema is not False
    choices = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    chosen, kinds = any(each == value and type(each) is type(value) for each in choices), schema.get("type")
    options = schema.get("anyOf") or schema.get("oneOf") or [True]
    own = KINDS[type(value)] - ({"integer"} if isinstance(value, float) and not value.is_integer() else set())
    fits = not kinds or own.intersection([kinds] if isinstance(kinds, str) else kinds)
    fits = fits and any(accepts(option, value) for option in options)
    return chosen and bool(fits or (value is None and schema.get("nullable")))


def takes_text(schema: dict[str, Any]) -> bool:
    """Whether a JSON schema names text. Values of a schema without a type are parsed as JSON first."""
    choices = [schema.get("const"), *schema.get("enum", [])]
    options = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    direct = "string" in (schema.get("type") or []) or any(isinstance(each, str) for each in choices)
    return direct or any(takes_text(each) for each in options if isinstance(each, dict))


def typed(text: str, schema: dict[str, Any]) -> Any:
    """Parse a value that is written without quotes: null, a list or object, text, or other JSON, as the schema allows.

    >>> typed("75001", {"type": "string"}), typed("75001", {"type": "integer"}), typed("True", {}), typed("a b", {})
    ('75001', 75001, True, 'a b')
    """
    try:
        value = json.loads(text)
        value = text if is_nested(value) else value
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    read_first = value is None or isinstance(value, (list, dict)) or not takes_text(schema)
    candidates = [value, text] if read_first else [text, value]
    return next((each for each in candidates if accepts(schema, each)), candidates[0])


def in_tags(argument: str, name: str, text: str, tools: dict[str, Callable]) -> ToolCall:
    """Read arguments in tags, of which the pattern `argument` finds each (key, value), by the tool's parameters."""
    if re.sub(argument, "", text, flags=re.DOTALL).strip():
        return ToolCall(name, {}, f"{UNREADABLE_CALL}: it holds text that is no argument")
    described = tool_schema(name, tools[name])["function"].get("parameters") if name in tools else None
    properties, _, further = parts_of_schema(described)
    arguments = {}
    for key, value in re.findall(argument, text, re.DOTALL):
        schema = properties.get(key, further)  # true and false say nothing of a type
        arguments[key] = typed(value, schema if isinstance(schema, dict) else {})
    return ToolCall(name, arguments)


def in_json(name: str | None, text: str, _: dict[str, Callable]) -> ToolCall:
    """Read arguments in JSON."""
    value, error = load_json(text.strip() or "{}")
    if error is None and not isinstance(value, dict):
        error = f"the arguments must be a JSON object, got {type(value).__name__}"
    return ToolCall(name and name.strip(), {} if error else value, error)


def in_gemma(name: str, text: str, tools: dict[str, Callable]) -> ToolCall:
    """Read JSON that has keys without quotes, and a token for the quotes of text."""
    parts = text.split('<|"|>')
    for k, part in enumerate(parts):
        # Between texts. The template writes a null as Python does.
        plain = re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', re.sub(r"\bNone\b", "null", part))
        parts[k] = json.dumps(part) if k % 2 else plain
    return in_json(name, "".join(parts), tools)


# INVARIANT: no pattern looks far from each of many places, or one turn of repetitions stops all conversations.
FUNCTION = r"<function=([^\n>]+)>((?:(?!</function>).)*)(?:</function>)?"
PARAMETER = r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>"
ARGUMENT = r"<arg_key>((?:(?!<arg_).)*?)</arg_key>\s*<arg_value>((?:(?!<arg_).)*?)</arg_value>"
FENCED = r"\w*<｜tool▁sep｜>([^\n]+)\n+```json\n(.*)```"
DEEPSEEK = r"(?:<｜tool▁calls▁begin｜>|\n)?<｜tool▁call▁begin｜>", r"<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?"
# Keys in any order, and with the type that Llama's template shows of a tool.
LLAMA = (
    r'(?:<\|python_tag\|>)?(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:)'
    r'|(?:\A\s*|<\|python_tag\|>)(?=\{\s*"(?:parameters|arguments)"\s*:\s*\{.{0,2000}?"name"\s*:\s*")',
    r"(?=<\|(?:eot|eom)_id\|>)|\Z",
    lambda _, body, __: parse_call(body.strip().removesuffix(";"), "parameters", others=("type",)),
)
GPT_OSS = (
    r"to=functions\.(?P<name>[^\s<]{0,100}+)(?:(?!<\|(?:message|start|end|call)\|>).){0,100}<\|message\|>",
    r"(?=<\|(?:call|end)\|>)|\Z",
    in_json,
)
GPT_OSS_ANSWER = r"<\|channel\|>final(?:(?!<\|message\|>).){0,100}<\|message\|>((?:(?!<\|end\|>).)*)"
GEMMA = r"<\|tool_call>", r"<tool_call\|>", in_gemma, r"call:([^\s{]+)(\{.*\})"
SYNTAXES = (
    HERMES,  # Qwen 2.5, Qwen 3
    CallSyntax("Qwen 3.5 and Nemotron 3", *TOOL_CALL, partial(in_tags, PARAMETER), FUNCTION),
    CallSyntax("GLM 4", *TOOL_CALL, partial(in_tags, ARGUMENT), r"([^\s<{]+)(.*)"),
    CallSyntax("Gemma 4", *GEMMA, headers=("<tool_response|>",)),
    CallSyntax("DeepSeek V3", *DEEPSEEK, in_json, FENCED, headers=("<｜tool▁outputs▁end｜>",)),
    CallSyntax("gpt-oss", *GPT_OSS, tail=r'"\}', answer=GPT_OSS_ANSWER),
    CallSyntax("Llama 3.1", *LLAMA, tail=r'"\}\}'),
)


class NativeFormat(HermesFormat):
    """Tool format in the chat template's own syntax, which is detected from what the template writes."""

    syntaxes = SYNTAXES


# The choices of `tool_format`: a fork adds its own.
TOOL_FORMATS: dict[str, type[ChatFormat]] = {"xml": XmlFormat, "hermes": HermesFormat, "native": NativeFormat}
