"""The formats hermes and native: calls as the chat template writes them, and results in messages of role `tool`.

Hermes is the syntax of many models: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_grpo.base.rows import is_nested
from mt_grpo.conversation.formats.base import (
    ASK,
    SEVERAL_CALLS,
    THINKING_TAGS,
    ChatFormat,
    load_json,
    parse_call,
    thinking_length,
)
from mt_grpo.conversation.formats.control_tokens import clean_schema
from mt_grpo.conversation.tools.signature import parts_of_schema, tool_schema
from mt_grpo.rollout import Message, Origin, ToolCall, ToolResult

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


IN_TAGS = "arguments", "several calls in one <tool_call>; write one <tool_call> for each"
TOOL_CALL = "<tool_call>", "</tool_call>"
HERMES = CallSyntax("hermes (Qwen 2.5, Qwen 3)", *TOOL_CALL, lambda body, *_: [parse_call(body, *IN_TAGS)])
NUMBER = {"type": "object", "properties": {"first": {"type": "integer", "description": "A."}}, "required": ["first"]}
GET_TOTAL = {"type": "function", "function": {"name": "get_total", "description": "A.", "parameters": NUMBER}}


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
            self.describes_tools = "get_total" in self._render([ASK], tools=[GET_TOTAL])
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
        origins = [getattr(tool, "origin", Origin.OUTSIDE) for tool in tools.values()]
        shown = [tool_schema(name, tool) for name, tool in tools.items()]
        schemas = [clean_schema(schema, self.tokenizer, origin) for schema, origin in zip(shown, origins)]
        messages = messages if self.keeps_results else self.with_calls(messages, tools)
        return {**super().prompt(messages, tools), **({"tools": schemas} if schemas else {})}

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


def call_id(index: int) -> str:
    """An id for a call within its turn: nine letters and digits, which all templates accept."""
    return f"call{index:05d}"


def plain_name(call: ToolCall) -> str:
    """The tool's name in a result message. The name that the model wrote may be anything."""
    return call.name if call.name and re.fullmatch(r"[\w.:/-]{1,128}", call.name) else "unknown"


# The format native: the syntaxes of calls that chat templates write themselves, one per family of models.

UNREADABLE_CALL = "the call cannot be read"
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


def typed_arguments(name: str, tools: dict[str, Callable], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """The arguments of a tool's call from the texts of (key, value), as its parameters take them."""
    described = tool_schema(name, tools[name])["function"].get("parameters") if name in tools else None
    properties, _, further = parts_of_schema(described)
    schemas = {key: properties.get(key, further) for key, _ in pairs}  # true and false say nothing of a type
    return {key: typed(text, schemas[key] if isinstance(schemas[key], dict) else {}) for key, text in pairs}


def read_tags(header: str, argument: str) -> Reader:
    """A reader of calls whose arguments stand in tags: `header` finds (name, rest), `argument` each (key, value)."""

    def read(body: str, name: str | None, tools: dict[str, Callable]) -> list[ToolCall]:
        found = re.fullmatch(header, body.strip(), re.DOTALL)
        if found is None:
            return [ToolCall(None, {}, UNREADABLE_CALL)]
        name, rest = found.groups()
        if re.sub(argument, "", rest, flags=re.DOTALL).strip():
            return [ToolCall(name, {}, f"{UNREADABLE_CALL}: it holds text that is no argument")]
        return [ToolCall(name, typed_arguments(name, tools, re.findall(argument, rest, re.DOTALL)))]

    return read


def named(name: str | None, arguments: str) -> ToolCall:
    """Create the call of a tool from its arguments in JSON."""
    value, error = load_json(arguments.strip() or "{}")
    if error is None and not isinstance(value, dict):
        error = f"the arguments must be a JSON object, got {type(value).__name__}"
    return ToolCall(name, {} if error else value, error)


def read_fenced(body: str, name: str | None, tools: dict[str, Callable]) -> list[ToolCall]:
    """Read a call with its arguments in a Markdown code block, the syntax of DeepSeek."""
    found = re.fullmatch(r"\w*<｜tool▁sep｜>([^\n]+)\n+```json\n(.*)```", body.strip(), re.DOTALL)
    return [named(found[1].strip(), found[2]) if found else ToolCall(None, {}, UNREADABLE_CALL)]


def read_gemma(body: str, name: str | None, tools: dict[str, Callable]) -> list[ToolCall]:
    """Read JSON that has keys without quotes, and a token for the quotes of text."""
    found = re.fullmatch(r"call:([^\s{]+)(\{.*\})", body.strip(), re.DOTALL)
    if found is None:
        return [ToolCall(None, {}, UNREADABLE_CALL)]
    parts = found[2].split('<|"|>')
    for k, part in enumerate(parts):
        # Between texts. The template writes a null as Python does.
        plain = re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', re.sub(r"\bNone\b", "null", part))
        parts[k] = json.dumps(part) if k % 2 else plain
    return [named(found[1], "".join(parts))]


# INVARIANT: no pattern looks far from each of many places, or one turn of repetitions stops all conversations.
class JsonNames(ast.NodeTransformer):
    """Replace the words of JSON by True, False and None of Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def read_python(raw: bool) -> Reader:
    """A reader of `[tool(key='value'), ...]`, as LFM2 writes calls. `raw`: where the template escapes no backslash."""
    unreadable = ToolCall(None, {}, UNREADABLE_CALL)
    return lambda body, name, tools: python_calls(body.strip(), raw) or [unreadable]


def python_value(node: ast.expr, source: str, doubled: bool) -> Any:
    """The value of an argument. In a list or a dict the templates escape what they write, so `doubled` is undone."""
    if doubled and not isinstance(node, ast.Constant):
        node = ast.parse(ast.get_source_segment(source, node).replace("\\\\", "\\"), mode="eval").body
    return ast.literal_eval(JsonNames().visit(node))


def python_call(text: str, escaped: bool) -> ToolCall:
    """The call `tool(key=value, ...)`, of which nothing is run. Python need not take the tool's name."""
    name = re.match(r"[\w.:/-]+(?=\()", text)[0]
    source = f"call{text[len(name) :]}"
    node = ast.parse(source, mode="eval").body
    arguments = {each.arg: python_value(each.value, source, escaped) for each in node.keywords}
    json.dumps(arguments)  # sets, bytes, ...: no call in JSON could hold them
    if node.args or None in arguments or not isinstance(node.func, ast.Name):
        raise ValueError("only arguments with names can be passed")
    return ToolCall(name, arguments)


def python_calls(text: str, raw: bool = False) -> list[ToolCall] | None:
    r"""The calls in `[tool(key='value'), ...]`, or a single call without brackets; None if the text is anything else.

    >>> [python_calls(r"[look(path='C:\new')]", raw)[0].arguments["path"] for raw in (True, False)]
    ['C:\\new', 'C:\new']
    >>> python_calls(r"fs.look(path='C:\new', of='a\'b')", True)  # the escape of one costs the other nothing
    [ToolCall(name='fs.look', arguments={'path': 'C:\\new', 'of': "a'b"}, error=None)]
    """
    text = re.sub("\r\n?", "\n", text)  # as Python reads it
    kept = re.sub(r"\\(?!['\"])", r"\\\\", text)  # those that escape no quote
    texts = [text.replace("\\", "\\\\"), kept, text] if raw else [text]
    # No template escapes the ends of lines.
    for escaped, source in [(each != text, s) for each in texts for s in (each, each.replace("\n", "\\n"))]:
        try:
            if not source.startswith("["):
                return [python_call(source, escaped)]
            parts, data = ast.parse(source, mode="eval").body.elts, source.encode()
            # INVARIANT: linear in the length, unlike `ast.get_source_segment` for each part.
            lines = [0, *(found.end() for found in re.finditer(b"\n", data))]
            ends = [(lines[p.lineno - 1] + p.col_offset, lines[p.end_lineno - 1] + p.end_col_offset) for p in parts]
            if parts:
                return [python_call(data[start:end].decode(), escaped) for start, end in ends]
        except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
            continue
    return None


FUNCTION = r"<function=([^\n>]+)>((?:(?!</function>).)*)(?:</function>)?"
PARAMETER = r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>"
ARGUMENT = r"<arg_key>((?:(?!<arg_).)*?)</arg_key>\s*<arg_value>((?:(?!<arg_).)*?)</arg_value>"
DEEPSEEK = r"(?:<｜tool▁calls▁begin｜>|\n)?<｜tool▁call▁begin｜>", r"<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?"
# Keys in any order, and with the type that Llama's template shows of a tool.
LLAMA = (
    r'(?:<\|python_tag\|>)?(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:)'
    r'|(?:\A\s*|<\|python_tag\|>)(?=\{\s*"(?:parameters|arguments)"\s*:\s*\{.{0,2000}?"name"\s*:\s*")',
    r"(?=<\|(?:eot|eom)_id\|>)|\Z",
    lambda body, *_: [parse_call(body.strip().removesuffix(";"), "parameters", others=("type",))],
    r'"\}\}',
)
GPT_OSS = (
    r"to=functions\.(?P<name>[^\s<]{0,100})(?:(?!<\|(?:message|start|end|call)\|>).){0,100}<\|message\|>",
    r"(?=<\|(?:call|end)\|>)|\Z",
    lambda body, name, _: [named(name, body)],
    r'"\}',
    r"<\|channel\|>final(?:(?!<\|message\|>).){0,100}<\|message\|>((?:(?!<\|end\|>).)*)",
)
GEMMA = {"thinking": THINKING_TAGS["Gemma 4"], "headers": ("<tool_response|>",)}
SYNTAXES = (
    HERMES,  # Qwen 2.5, Qwen 3
    CallSyntax("Qwen 3.5 and Nemotron 3", *TOOL_CALL, read_tags(FUNCTION, PARAMETER)),
    CallSyntax("GLM 4", *TOOL_CALL, read_tags(r"([^\s<{]+)(.*)", ARGUMENT)),
    CallSyntax("Gemma 4", r"<\|tool_call>", r"<tool_call\|>", read_gemma, **GEMMA),
    CallSyntax("LFM2", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", read_python(raw=False)),
    CallSyntax("LFM2.5", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", read_python(raw=True)),
    CallSyntax("DeepSeek V3", *DEEPSEEK, read_fenced, headers=("<｜tool▁outputs▁end｜>",)),
    CallSyntax("gpt-oss", *GPT_OSS, thinking=THINKING_TAGS["gpt-oss"]),
    CallSyntax("Llama 3.1", *LLAMA),
)


class NativeFormat(HermesFormat):
    """Tool format in the chat template's own syntax, which is detected from what the template writes."""

    syntaxes = SYNTAXES

    def refusal(self, what: str) -> ValueError:
        known = "; ".join(syntax.name for syntax in self.syntaxes)
        return ValueError(f"{super().refusal(what)} Syntaxes of calls that work: {known}.")
