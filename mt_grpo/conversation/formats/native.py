"""The syntaxes of calls that chat templates write themselves, one per family of models."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable
from typing import Any

from transformers.utils.chat_parsing import parse_response

from mt_grpo.base.json_types import is_nested
from mt_grpo.conversation.formats.base import THINKING_TAGS, load_json, parse_call
from mt_grpo.conversation.formats.hermes import HERMES, CallSyntax, CallText, HermesFormat
from mt_grpo.conversation.tools.arguments import read_argument
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.rollout import ToolCall

UNREADABLE_CALL = "the call cannot be read"


Reads = Callable[[Any], bool]  # whether a parameter reads a value


def parameters_of(name: str, tools: dict[str, Callable]) -> Callable[[str], tuple[Any, Reads]]:
    """A function from the name of a tool's parameter to its JSON schema and whether it reads a value."""
    tool = tools.get(name)
    described = {} if tool is None else tool_schema(name, tool)["function"].get("parameters") or {}
    properties, further = described.get("properties") or {}, described.get("additionalProperties")

    def takes(key: str) -> tuple[Any, Reads]:
        def reads(value: Any) -> bool:
            try:
                read_argument(tool, key, value)
            except (Exception, SystemExit):  # a validator may raise anything
                return False
            return True

        own = tool is None or hasattr(tool, "json_schema")  # then its schema is all that is known
        return properties.get(key, further if isinstance(further, dict) else {}), (lambda _: True) if own else reads

    return takes


def accepts(schema: Any, value: Any) -> bool:
    """Whether a JSON schema allows a value, by its types, enums and constants.

    >>> [accepts({"anyOf": [{"type": "integer"}, {"type": "null"}]}, value) for value in (7, None, "7", True)]
    [True, True, False, False]
    >>> accepts({"enum": ["1", "2"]}, "1"), accepts({"enum": ["1", "2"]}, 1), accepts({}, "any")
    (True, False, True)
    """
    if not isinstance(schema, dict):
        return schema is not False
    if "enum" in schema and not any(each == value and type(each) is type(value) for each in schema["enum"]):
        return False
    if "const" in schema and (schema["const"] != value or type(schema["const"]) is not type(value)):
        return False
    if value is None and schema.get("nullable"):
        return True
    options = schema.get("anyOf") or schema.get("oneOf")
    kinds = schema.get("type") or list(JSON_TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    whole = isinstance(value, float) and value.is_integer()
    fits = any(type(value) in JSON_TYPES.get(kind, ()) or (kind == "integer" and whole) for kind in kinds)
    return fits and (not options or any(accepts(option, value) for option in options))


JSON_TYPES = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def takes_text(schema: dict[str, Any]) -> bool:
    """Whether a JSON schema allows text. Values of a schema without a type are parsed as JSON first.

    >>> takes_text({"type": "string"}), takes_text({"anyOf": [{"type": "integer"}, {"type": "null"}]}), takes_text({})
    (True, False, False)
    """
    kind, options = schema.get("type"), [each for key in ("anyOf", "oneOf") for each in schema.get(key, [])]
    return (
        "string" in ([kind] if isinstance(kind, str) else kind or [])
        or any(isinstance(each, str) for each in [schema.get("const"), *schema.get("enum", [])])
        or any(takes_text(each) for each in options if isinstance(each, dict))
    )


def typed(text: str, schema: dict[str, Any], reads: Reads = lambda value: True) -> Any:
    """Parse a value that the syntax writes without quotes.

    It is the first of these that the parameter takes: null, a list or object in JSON, text, any other JSON.

    Args:
        text: As it was written.
        schema: Of the parameter.
        reads: Whether the tool takes a value, where it can be asked.

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
    fitting = [each for each in candidates if accepts(schema, each)]
    return next((each for each in fitting if reads(each)), (fitting or candidates)[0])


def read_tags(header: str, argument: str) -> Callable[[CallText, dict[str, Callable]], list[ToolCall]]:
    """A reader of calls whose arguments stand in tags: `header` finds (name, rest), `argument` each (key, value)."""

    def read(call: CallText, tools: dict[str, Callable]) -> list[ToolCall]:
        found = re.fullmatch(header, call.body.strip(), re.DOTALL)
        if found is None:
            return [ToolCall(None, {}, UNREADABLE_CALL)]
        name, rest = found.groups()
        if re.sub(argument, "", rest, flags=re.DOTALL).strip():
            return [ToolCall(name, {}, f"{UNREADABLE_CALL}: it holds text that is no argument")]
        takes, pairs = parameters_of(name, tools), re.findall(argument, rest, re.DOTALL)
        return [ToolCall(name, {key: typed(value, *takes(key)) for key, value in pairs})]

    return read


def read_parameters(call: CallText, tools: dict[str, Callable]) -> list[ToolCall]:
    """Read a call such as `{"name": ..., "parameters": {...}}`, the syntax of Llama."""
    return [parse_call(call.body.strip().removesuffix(";"), "parameters", others=("type",))]


def read_arguments(call: CallText, tools: dict[str, Callable]) -> list[ToolCall]:
    """Read a call with the name of the tool, followed by its arguments in JSON."""
    return [named(call.name, call.body)]


def named(name: str | None, arguments: str) -> ToolCall:
    """Create the call of a tool from its arguments in JSON."""
    value, error = load_json(arguments.strip() or "{}")
    if error is None and not isinstance(value, dict):
        error = f"the arguments must be a JSON object, got {type(value).__name__}"
    return ToolCall(name, {} if error else value, error)


def read_fenced(call: CallText, tools: dict[str, Callable]) -> list[ToolCall]:
    """Read a call with its arguments in a Markdown code block, the syntax of DeepSeek."""
    found = re.fullmatch(r"\w*<｜tool▁sep｜>([^\n]+)\n+```json\n(.*)```", call.body.strip(), re.DOTALL)
    return [named(found[1].strip(), found[2]) if found else ToolCall(None, {}, UNREADABLE_CALL)]


def read_gemma(call: CallText, tools: dict[str, Callable]) -> list[ToolCall]:
    """Read JSON that has keys without quotes, and a token for the quotes of text."""
    found = re.fullmatch(r"call:([^\s{]+)(\{.*\})", call.body.strip(), re.DOTALL)
    if found is None:
        return [ToolCall(None, {}, UNREADABLE_CALL)]
    parts = found[2].split('<|"|>')
    # The template writes a null as Python does.
    parts[::2] = (re.sub(r"\bNone\b", "null", part) for part in parts[::2])
    parts[::2] = (re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', part) for part in parts[::2])
    parts[1::2] = map(json.dumps, parts[1::2])
    return [named(found[1], "".join(parts))]


class JsonNames(ast.NodeTransformer):
    """Replace True, False and None of Python by the words of JSON."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def read_python(call: CallText, tools: dict[str, Callable], raw: bool = False) -> list[ToolCall]:
    """`[tool(key='value'), ...]`, as LFM2 writes several calls. `raw`: where the template escapes no backslash."""
    body = call.body.strip()
    calls = python_calls(body, raw)
    if calls is None:  # then those that can be read, one by one
        parts = python_parts(body.removeprefix("[").removesuffix("]"), raw) or [body]
        read, calls = [python_call(part, raw) for part in parts], []
        for k, found in enumerate(read):  # one error for what cannot be read, however many commas it has
            calls += found or ([] if k and read[k - 1] is None else [ToolCall(None, {}, UNREADABLE_CALL)])
    return calls


def python_parts(text: str, raw: bool) -> list[str]:
    r"""The parts of a list between the commas that stand in no string and no bracket.

    Behind a string or a bracket that is not closed all is one part. All of the text is one where it is unclear what is
    a string: a text that the model only quotes must not run.

    >>> python_parts("note(text='f(x), g(y)'), bad(1]), plan(get(1), add(a=2)),", False)
    ["note(text='f(x), g(y)')", 'bad(1])', 'plan(get(1), add(a=2))']
    >>> python_parts(r"w(p='C:\'), x(q='y')", True)  # does the backslash escape the quote?
    ["w(p='C:\\'), x(q='y')"]
    """
    found, closed_by = [], {"(": ")", "[": "]", "{": "}"}
    for escapes in (True, False) if raw else (True,):
        cuts, waits, quote, escaped = [0], [], "", False
        for k, each in enumerate(text):
            if quote:
                quote = "" if each == quote and not escaped else quote
                escaped = escapes and each == "\\" and not escaped
            elif each in "'\"":
                quote, escaped = each, False
            elif each in closed_by:
                waits.append(closed_by[each])
            elif waits and each == waits[-1]:
                waits.pop()
            elif each == "," and not waits:
                cuts.append(k + 1)
        ends = [*(cut - 1 for cut in cuts[1:]), len(text)]
        found.append([part for start, end in zip(cuts, ends) if (part := text[start:end].strip())])
    return found[0] if found.count(found[0]) == len(found) else [text]


def python_call(text: str, raw: bool) -> list[ToolCall] | None:
    """The call in a part of a list, whose tool may have a name that Python does not take; None: it cannot be read.

    >>> python_call("fs.get-file(path='a')", False)
    [ToolCall(name='fs.get-file', arguments={'path': 'a'}, error=None)]
    """
    found = re.match(r"([\w.:/-]+)\(", text)
    if found is None or found[1].isidentifier():
        return python_calls(text, raw)
    calls = python_calls("call" + text[found.end() - 1 :], raw)
    return calls and [ToolCall(found[1], call.arguments) for call in calls]


def python_value(node: ast.expr, source: str, doubled: bool) -> Any:
    """The value of an argument. In a list or a dict the templates escape what they write, so `doubled` is undone."""
    if doubled and not isinstance(node, ast.Constant):
        node = ast.parse(ast.get_source_segment(source, node).replace("\\\\", "\\"), mode="eval").body
    return ast.literal_eval(JsonNames().visit(node))


def python_calls(text: str, raw: bool = False) -> list[ToolCall] | None:
    r"""The calls of a Python expression, of which nothing is run; None if it is anything else.

    >>> [python_calls(r"look(path='C:\new')", raw)[0].arguments["path"] for raw in (True, False)]
    ['C:\\new', 'C:\new']
    >>> python_calls(r"look(path='C:\new', of='a\'b')", True)[0].arguments  # the escape of one costs the other nothing
    {'path': 'C:\\new', 'of': "a'b"}
    """
    kept = re.sub(r"\\(?!['\"])", r"\\\\", text)  # those that escape no quote
    texts = [text.replace("\\", "\\\\"), kept, text] if raw else [text]
    # No template escapes the ends of lines.
    sources = [(one != text, each) for one in texts for each in (one, one.replace("\n", "\\n"))]
    for doubled, source in sources:
        try:
            tree = ast.parse(source, mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List) else [tree]
            calls = [
                ToolCall(n.func.id, {k.arg: python_value(k.value, source, doubled) for k in n.keywords})
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
PARAMETER = r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>"
ARGUMENT = r"<arg_key>((?:(?!<arg_).)*?)</arg_key>\s*<arg_value>((?:(?!<arg_).)*?)</arg_value>"
SYNTAXES = (
    HERMES,  # Qwen 2.5, Qwen 3
    CallSyntax(
        "Qwen 3.5 and Nemotron 3",
        opening="<tool_call>",
        closing="</tool_call>",
        read=read_tags(r"<function=([^\n>]+)>((?:(?!</function>).)*)(?:</function>)?", PARAMETER),
    ),
    CallSyntax(
        "GLM 4",
        opening="<tool_call>",
        closing="</tool_call>",
        read=read_tags(r"([^\s<{]+)(.*)", ARGUMENT),
    ),
    CallSyntax(
        "Gemma 4",
        opening=r"<\|tool_call>",
        closing=r"<tool_call\|>",
        read=read_gemma,
        thinking=THINKING_TAGS["Gemma 4"],
        headers=("<tool_response|>",),
    ),
    CallSyntax(
        "LFM2",
        opening=r"<\|tool_call_start\|>",
        closing=r"<\|tool_call_end\|>",
        read=read_python,
    ),
    CallSyntax(
        "LFM2.5",
        opening=r"<\|tool_call_start\|>",
        closing=r"<\|tool_call_end\|>",
        read=functools.partial(read_python, raw=True),
    ),
    CallSyntax(
        "DeepSeek V3",
        opening=r"(?:<｜tool▁calls▁begin｜>|\n)?<｜tool▁call▁begin｜>",
        closing=r"<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
        read=read_fenced,
        headers=("<｜tool▁outputs▁end｜>",),
    ),
    CallSyntax(
        "gpt-oss",
        opening=r"to=functions\.(?P<name>[^\s<]{0,100})(?:(?!<\|(?:message|start|end|call)\|>).){0,100}<\|message\|>",
        closing=r"(?=<\|(?:call|end)\|>)|\Z",
        read=read_arguments,
        tail=r'"\}',
        answer=r"<\|channel\|>final(?:(?!<\|message\|>).){0,100}<\|message\|>((?:(?!<\|end\|>).)*)",
        thinking=THINKING_TAGS["gpt-oss"],
    ),
    CallSyntax(
        "Llama 3.1",
        # Its keys in any order, and with the type that the template shows of a tool.
        opening=r'(?:<\|python_tag\|>)?(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
        r'"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:)'
        r'|(?:\A\s*|<\|python_tag\|>)(?=\{\s*"(?:parameters|arguments)"\s*:\s*\{.{0,2000}?"name"\s*:\s*")',
        closing=r"(?=<\|(?:eot|eom)_id\|>)|\Z",
        read=read_parameters,
        tail=r'"\}\}',
    ),
)


def syntax_of_template(template: dict[str, Any]) -> CallSyntax:
    """The syntax of a tokenizer's own `response_template`, which transformers reads.

    Raises:
        ValueError: it says nothing of calls.
    """
    fields = template.get("fields", {})
    if "tool_calls" not in fields:
        raise ValueError("its response_template has no field tool_calls")

    def pattern(field: dict[str, Any], name: str) -> str:
        return field.get(f"{name}_pattern") or re.escape(field.get(name, ""))

    def read(call: CallText, tools: dict[str, Callable]) -> list[ToolCall]:
        schemas = [tool_schema(name, tool) for name, tool in tools.items()]
        try:
            found = parse_response(call.text, template, prefix="", tools=schemas)["tool_calls"]
            functions = [call.get("function", call) for call in found]
            return [ToolCall(str(f["name"]), dict(f.get("arguments") or {})) for f in functions]
        except Exception:  # what parsers of other houses raise for a model's text: the policy's mistake
            return [ToolCall(call.name, {}, UNREADABLE_CALL)]

    calls = fields["tool_calls"]
    thinking = next((fields[name] for name in ("reasoning_content", "thinking") if name in fields), {})
    tags = (thinking.get("open"), thinking.get("close") or re.sub(r"\\s\*$", "", thinking.get("close_pattern", "")))
    return CallSyntax(
        "the tokenizer's response_template",
        opening=pattern(calls, "open"),
        closing=pattern(calls, "close"),
        read=read,
        thinking=tags if all(isinstance(tag, str) and tag for tag in tags) else CallSyntax.thinking,
    )


class NativeFormat(HermesFormat):
    """Tool format in the chat template's own syntax, which is detected from what the template writes."""

    syntaxes = SYNTAXES

    def setup(self) -> None:
        if template := getattr(self.tokenizer, "response_template", None):
            self.syntaxes = (*SYNTAXES, syntax_of_template(template))
        super().setup()

    def refusal(self, what: str) -> ValueError:
        known = "; ".join(syntax.name for syntax in self.syntaxes)
        return ValueError(f"{super().refusal(what)} Syntaxes of calls that work: {known}.")
