"""The syntaxes of calls that chat templates write themselves, one per family of models."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

from mt_grpo.base.json_types import is_nested
from mt_grpo.conversation.formats.base import THINKING_TAGS, load_json, parse_call
from mt_grpo.conversation.formats.hermes import HERMES, TOOL_CALL, CallSyntax, HermesFormat, Reader
from mt_grpo.conversation.tools.arguments import read_argument
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.rollout import ToolCall, join

UNREADABLE_CALL = "the call cannot be read"
JSON_TYPES = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def accepts(schema: Any, value: Any) -> bool:
    """Whether a JSON schema allows a value, by its types, enums and constants.

    >>> [accepts({"anyOf": [{"type": "integer"}, {"type": "null"}]}, value) for value in (7, None, "7", True)]
    [True, True, False, False]
    >>> accepts({"enum": ["1", "2"]}, "1"), accepts({"enum": ["1", "2"]}, 1), accepts({}, "any")
    (True, False, True)
    """
    if not isinstance(schema, dict):
        return schema is not False
    choices = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    if not any(each == value and type(each) is type(value) for each in choices):
        return False
    if value is None and schema.get("nullable"):
        return True
    options, kinds = schema.get("anyOf") or schema.get("oneOf"), schema.get("type") or list(JSON_TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    whole = "integer" in kinds and isinstance(value, float) and value.is_integer()
    fits = whole or any(type(value) in JSON_TYPES.get(kind, ()) for kind in kinds)
    return fits and (not options or any(accepts(option, value) for option in options))


def takes_text(schema: dict[str, Any]) -> bool:
    """Whether a JSON schema allows text. Values of a schema without a type are parsed as JSON first.

    >>> takes_text({"type": "string"}), takes_text({"anyOf": [{"type": "integer"}, {"type": "null"}]}), takes_text({})
    (True, False, False)
    """
    kinds, options = schema.get("type") or [], [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    choices = [schema.get("const"), *schema.get("enum", [])]
    return (
        "string" in ([kinds] if isinstance(kinds, str) else kinds)
        or any(isinstance(each, str) for each in choices)
        or any(takes_text(each) for each in options if isinstance(each, dict))
    )


def typed(text: str, schema: dict[str, Any], fits: Callable[[Any], bool] | None = None) -> Any:
    """Parse a value that the syntax writes without quotes, for a parameter with this schema.

    It is the first of these that fits: null, a list or object in JSON, text, any other JSON. `fits` is whether the
    parameter takes a value; None: whether the schema allows it.

    >>> typed("75001", {"type": "string"}), typed("75001", {"type": "integer"}), typed("True", {}), typed("a b", {})
    ('75001', 75001, True, 'a b')
    >>> typed("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}), typed("null", {"type": "string"})
    (None, 'null')
    >>> typed('["a"]', {"type": ["string", "array"]}), typed("1", {"enum": ["1", "2"]}), typed("1", {"enum": ["a", 1]})
    (['a'], '1', 1)
    """
    try:
        value = json.loads(text)
        value = text if is_nested(value) else value
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    read_first = value is None or isinstance(value, (list, dict)) or not takes_text(schema)
    candidates = [value, text] if read_first else [text, value]
    return next(filter(fits or functools.partial(accepts, schema), candidates), candidates[0])


def typed_arguments(name: str, tools: dict[str, Callable], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """The arguments of a tool's call from the texts of (key, value), as its parameters take them."""
    tool = tools.get(name)
    described = {} if tool is None else tool_schema(name, tool)["function"].get("parameters") or {}
    properties, further = described.get("properties") or {}, described.get("additionalProperties")

    def fits(key: str, value: Any) -> bool:
        try:
            read_argument(tool, key, value)
        except (Exception, SystemExit):  # a validator may raise anything
            return False
        return True

    described_only = tool is None or hasattr(tool, "json_schema")
    schemas = {key: properties.get(key, further if isinstance(further, dict) else {}) for key, _ in pairs}
    return {k: typed(text, schemas[k], None if described_only else functools.partial(fits, k)) for k, text in pairs}


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


class JsonNames(ast.NodeTransformer):
    """Replace the words of JSON by True, False and None of Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def read_python(body: str, name: str | None, tools: dict[str, Callable], raw: bool = False) -> list[ToolCall]:
    """`[tool(key='value'), ...]`, as LFM2 writes several calls. `raw`: where the template escapes no backslash."""
    if (whole := python_calls(body.strip(), raw)) is not None:
        return whole
    read = [python_calls(part, raw) for part in python_parts(body.strip(), raw) or [body]]
    unreadable = [ToolCall(None, {}, UNREADABLE_CALL)]  # one error for parts in a row that cannot be read
    groups = itertools.groupby(read, lambda calls: calls is not None)
    return join(join(group) if good else unreadable for good, group in groups)


def python_parts(text: str, raw: bool) -> list[str]:
    r"""The parts of a list between the commas that stand in no string and no bracket of its own.

    Behind a string or a bracket that is not closed all is one part. All of the text is one where it is unclear what is
    a string: a text that the model only quotes must not run.

    >>> python_parts("note(text='f(x), g(y)'), bad(1]), plan(get(1), add(a=2)),", False)
    ["note(text='f(x), g(y)')", 'bad(1])', 'plan(get(1), add(a=2))']
    >>> python_parts(r"w(p='C:\'), x(q='y')", True)  # does the backslash escape the quote?
    ["w(p='C:\\'), x(q='y')"]
    """
    inner, readings, brackets = text.removeprefix("[").removesuffix("]"), [], {"(": ")", "[": "]", "{": "}"}
    escaping, plain = r"""'(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?""", r"""'[^']*'?|"[^"]*"?"""
    for strings in (escaping, plain) if raw else (escaping,):
        cuts, waits = [-1], []
        for found in re.finditer(rf"{strings}|[\[\](){{}},]", inner, re.DOTALL):
            if found[0] in brackets:
                waits.append(brackets[found[0]])
            elif waits and found[0] == waits[-1]:
                waits.pop()
            elif found[0] == "," and not waits:
                cuts.append(found.start())
        parts = [inner[start + 1 : end].strip() for start, end in itertools.pairwise([*cuts, len(inner)])]
        readings.append([part for part in parts if part])
    return readings[0] if readings[0] == readings[-1] else [text]


def python_value(node: ast.expr, source: str, doubled: bool) -> Any:
    """The value of an argument. In a list or a dict the templates escape what they write, so `doubled` is undone."""
    if doubled and not isinstance(node, ast.Constant):
        node = ast.parse(ast.get_source_segment(source, node).replace("\\\\", "\\"), mode="eval").body
    return ast.literal_eval(JsonNames().visit(node))


def python_calls(text: str, raw: bool = False) -> list[ToolCall] | None:
    r"""The calls of a Python expression, of which nothing is run; None if it is anything else.

    A single call may be that of a tool whose name Python does not take.

    >>> [python_calls(r"look(path='C:\new')", raw)[0].arguments["path"] for raw in (True, False)]
    ['C:\\new', 'C:\new']
    >>> python_calls(r"fs.look(path='C:\new', of='a\'b')", True)  # the escape of one costs the other nothing
    [ToolCall(name='fs.look', arguments={'path': 'C:\\new', 'of': "a'b"}, error=None)]
    """
    header = re.match(r"([\w.:/-]+)\(", text)
    name = header[1] if header and not header[1].isidentifier() else None
    text = text if name is None else f"call{text[len(name) :]}"
    kept = re.sub(r"\\(?!['\"])", r"\\\\", text)  # those that escape no quote
    texts = [text.replace("\\", "\\\\"), kept, text] if raw else [text]
    # No template escapes the ends of lines.
    for escaped, source in [(each != text, s) for each in texts for s in (each, each.replace("\n", "\\n"))]:
        try:
            tree = ast.parse(source, mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List) else [tree]
            calls = [
                ToolCall(
                    n.func.id and (name or n.func.id),
                    {k.arg: python_value(k.value, source, escaped) for k in n.keywords},
                )
                for n in nodes
                if not n.args
            ]
            json.dumps([call.arguments for call in calls])  # sets, bytes, ...: no call in JSON could hold them
            if calls and len(calls) == len(nodes) and all(key for call in calls for key in call.arguments):
                return calls
        except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
            continue
    return None


# INVARIANT: no pattern looks far from each of many places, or one turn of repetitions stops all conversations.
FUNCTION = r"<function=([^\n>]+)>((?:(?!</function>).)*)(?:</function>)?"
PARAMETER = r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>"
ARGUMENT = r"<arg_key>((?:(?!<arg_).)*?)</arg_key>\s*<arg_value>((?:(?!<arg_).)*?)</arg_value>"
LFM2 = r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"
SYNTAXES = (
    HERMES,  # Qwen 2.5, Qwen 3
    CallSyntax("Qwen 3.5 and Nemotron 3", *TOOL_CALL, read_tags(FUNCTION, PARAMETER)),
    CallSyntax("GLM 4", *TOOL_CALL, read_tags(r"([^\s<{]+)(.*)", ARGUMENT)),
    CallSyntax(
        "Gemma 4",
        r"<\|tool_call>",
        r"<tool_call\|>",
        read_gemma,
        thinking=THINKING_TAGS["Gemma 4"],
        headers=("<tool_response|>",),
    ),
    CallSyntax("LFM2", *LFM2, read_python),
    CallSyntax("LFM2.5", *LFM2, functools.partial(read_python, raw=True)),
    CallSyntax(
        "DeepSeek V3",
        r"(?:<｜tool▁calls▁begin｜>|\n)?<｜tool▁call▁begin｜>",
        r"<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
        read_fenced,
        headers=("<｜tool▁outputs▁end｜>",),
    ),
    CallSyntax(
        "gpt-oss",
        r"to=functions\.(?P<name>[^\s<]{0,100})(?:(?!<\|(?:message|start|end|call)\|>).){0,100}<\|message\|>",
        r"(?=<\|(?:call|end)\|>)|\Z",
        lambda body, name, tools: [named(name, body)],
        tail=r'"\}',
        answer=r"<\|channel\|>final(?:(?!<\|message\|>).){0,100}<\|message\|>((?:(?!<\|end\|>).)*)",
        thinking=THINKING_TAGS["gpt-oss"],
    ),
    CallSyntax(
        "Llama 3.1",
        # Its keys in any order, and with the type that the template shows of a tool.
        r'(?:<\|python_tag\|>)?(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
        r'"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:)'
        r'|(?:\A\s*|<\|python_tag\|>)(?=\{\s*"(?:parameters|arguments)"\s*:\s*\{.{0,2000}?"name"\s*:\s*")',
        r"(?=<\|(?:eot|eom)_id\|>)|\Z",
        lambda body, name, tools: [parse_call(body.strip().removesuffix(";"), "parameters", others=("type",))],
        tail=r'"\}\}',
    ),
)


class NativeFormat(HermesFormat):
    """Tool format in the chat template's own syntax, which is detected from what the template writes."""

    syntaxes = SYNTAXES

    def refusal(self, what: str) -> ValueError:
        known = "; ".join(syntax.name for syntax in self.syntaxes)
        return ValueError(f"{super().refusal(what)} Syntaxes of calls that work: {known}.")
