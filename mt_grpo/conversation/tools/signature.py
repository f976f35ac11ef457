"""Functions as tools: what the model reads of them, and a call's arguments checked and converted by pydantic."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from mt_grpo.base.errors import error_line
from mt_grpo.conversation.tools.results import json_form
from mt_grpo.rollout import Origin, ToolCall, ToolResult

CALL_FORMAT = '<tool>{"name": "tool name", "args": {"argument": "value"}}</tool>'
EMPTY = inspect.Parameter.empty
UNIONS = (typing.Union, types.UnionType)


class Shown(str):
    """A text that is shown in a signature without quotes."""

    __repr__ = str.__str__


def is_json_type(expected: Any) -> bool:
    """Whether a type is one of JSON's own. Such arguments are passed unchanged.

    >>> [is_json_type(t) for t in (list[dict[str, float]], str | None, bytes | None, dict[int, str])]
    [True, True, False, False]
    """
    origin, options = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin is typing.Annotated:
        return is_json_type(options[0]) and all(isinstance(note, str) for note in options[1:])
    if origin is Literal:
        return all(type(option) in (str, int, bool, type(None)) for option in options)
    if origin is dict:
        return not options or (options[0] in (str, Any) and is_json_type(options[1]))
    if origin in (list, Sequence, *UNIONS):
        return all(map(is_json_type, options))
    return expected in (str, int, float, bool, type(None), Any, object)


def type_name(expected: Any) -> str:
    """A type as one writes it, without modules and notes: `int`, `list[int]`, `Literal['a', 'b']`, `str | None`.

    >>> type_name(typing.Optional[re.RegexFlag]), type_name(tuple[int, ...]), type_name(typing.Annotated[int, 3])
    ('RegexFlag | None', 'tuple[int, ...]', 'int')
    """
    origin, options = typing.get_origin(expected), typing.get_args(expected)
    if origin is typing.Annotated:
        return type_name(options[0])
    if origin is Literal:  # a member of an Enum by its value, which is what one writes
        return f"Literal[{', '.join(repr(getattr(option, 'value', option)) for option in options)}]"
    if origin in UNIONS:
        return " | ".join(map(type_name, options))
    if expected in (type(None), ...):
        return "..." if expected is ... else "None"
    name = getattr(origin or expected, "__name__", str(expected))
    return f"{name}[{', '.join(map(type_name, options))}]" if options else name


class ArgumentReader:
    """Reads the arguments of one parameter. Raises pydantic's `ValidationError`, or the error of a validator."""

    def __init__(self, hint: Any):
        self.hint, self.plain, self.adapter = hint, is_json_type(hint), TypeAdapter(hint)

    def read(self, value: Any) -> Any:
        if self.plain:  # 7 stays an int where a float is expected
            self.adapter.validate_python(value, strict=True)
            return value
        return self.adapter.validate_json(json.dumps(value), strict=True)


def cached_by_function(function: Callable) -> Callable:
    """Cache the result per tool while the tool exists. A method is one tool, whatever object it is bound to."""
    cache = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def wrapper(tool: Callable) -> Any:
        results = cache.setdefault(getattr(tool, "__func__", tool), {})
        if (bound := inspect.ismethod(tool)) not in results:
            results[bound] = function(tool)
        return results[bound]

    return wrapper


def takes_none(hint: Any) -> bool:
    """Whether a type allows None."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (*UNIONS, Literal, typing.Annotated) else ()
    return hint in (Any, object, None, type(None)) or any(map(takes_none, options))


def hints_of(tool: Callable) -> dict[str, Any]:
    """The types of a tool's parameters, and of its result as `return`. A parameter with default None takes None."""
    hints = typing.get_type_hints(tool, include_extras=True)
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.default is None and not takes_none(hints.get(name, Any)):
            hints[name] = typing.Union[hints[name], None]  # noqa: UP007 (not all hints have `|`)
    return hints


@cached_by_function
def readers_of(tool: Callable) -> dict[str, ArgumentReader]:
    """A reader per parameter of a tool. The last one may be that of `**rest`, for arguments of any name."""
    hints = hints_of(tool)
    return {name: ArgumentReader(hints.get(name, Any)) for name in inspect.signature(tool).parameters}


# What the model reads of a tool.


class ParameterSchema(GenerateJsonSchema):
    """A JSON schema whose defaults are the same in every process: sets are sorted."""

    def encode_default(self, dft: Any) -> Any:
        return json.loads(json.dumps(dft, default=json_form))


def written_out(part: Any, definitions: dict[str, Any], inside: tuple[str, ...] = (), fields: bool = False) -> Any:
    """A JSON schema without titles and references, which few chat templates follow. `fields`: its keys are names."""
    if isinstance(part, list):
        return [written_out(each, definitions, inside) for each in part]
    if not isinstance(part, dict):
        return part
    name = str(part.get("$ref", "")).removeprefix("#/$defs/")
    if name in definitions and name not in inside:
        further = {key: each for key, each in part.items() if key != "$ref"}
        return written_out({**definitions[name], **further}, definitions, (*inside, name))
    return {
        key: each
        if not fields and key in ("const", "default", "enum", "examples")
        else written_out(each, definitions, inside, key == "properties" and not fields)
        for key, each in part.items()
        if fields or key not in ("title", "$defs", "mapping")  # `mapping`: references of a discriminator
    }


def with_definitions(written: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A schema in which a class that contains itself is a definition, and no other."""
    written = written_out(written, definitions)
    if '"#/$defs/' not in json.dumps(written):
        return written
    return {**written, "$defs": {name: written_out(each, definitions, (name,)) for name, each in definitions.items()}}


def json_schema(hint: Any, mode: Literal["validation", "serialization"] = "validation") -> dict[str, Any]:
    """The JSON schema of a type. Raises pydantic's errors for one that JSON cannot hold."""
    schema = TypeAdapter(hint).json_schema(mode=mode, schema_generator=ParameterSchema)
    return with_definitions(schema, schema.get("$defs", {}))


@cached_by_function
def parameters_schema(tool: Callable) -> dict[str, Any]:
    """The JSON schema of all parameters of a tool, as one object. Raises the errors of `json_schema`."""
    properties: dict[str, Any] = {}
    written: dict[str, Any] = {"type": "object", "properties": properties}
    adapters = [(name, "validation", reader.adapter) for name, reader in readers_of(tool).items()]
    schemas, shared = TypeAdapter.json_schemas(adapters, schema_generator=ParameterSchema)
    required: list[str] = []
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            written["additionalProperties"] = schemas[name, "validation"]
            continue
        properties[name] = dict(schemas[name, "validation"])
        if parameter.default is EMPTY:
            required.append(name)
        else:
            properties[name]["default"] = json.loads(json.dumps(parameter.default, default=json_form))
    written |= {"required": required} if required else {}
    return with_definitions(written, shared.get("$defs", {}))


def tool_schema(name: str, tool: Callable) -> dict[str, Any]:
    """The JSON schema of a tool for chat templates. A tool that is an object brings its own."""
    return {"type": "function", "function": {**(getattr(tool, "json_schema", None) or described(tool)), "name": name}}


@cached_by_function
def described(tool: Callable) -> dict[str, Any]:
    """What the model reads of a function, with the notes of a docstring in Google's style beside the parameters."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    text = (inspect.getdoc(tool) or "").strip()
    description, notes, returns = parse_google_format_docstring(text)
    parameters = dict(parameters_schema(tool))
    if parameters["properties"].keys() <= notes.keys():
        parameters["properties"] = properties = {}
        for key, schema in parameters_schema(tool)["properties"].items():
            # As transformers reads it: the choices may stand behind the note.
            note, choices = re.fullmatch(r"(.*?)(?:\s*\(choices:\s*(\[.*\])\)\s*)?", notes[key], re.I | re.S).groups()
            properties[key] = {**schema, **({"enum": json.loads(choices)} if choices else {}), "description": note}
    else:  # then the model reads all of the docstring, whatever its style
        description = text
    function = {"name": tool.__name__, "description": description, "parameters": parameters}
    hint = hints_of(tool).get("return", EMPTY)
    with suppress(Exception):  # no hint, or none that JSON can hold; a class's own hooks may raise anything
        function["return"] = json_schema(str if hint is ToolResult else hint, "serialization")
        function["return"] |= {} if returns is None else {"description": returns}
    return function


@cached_by_function
def signature_of(tool: Callable) -> inspect.Signature | str:
    """A tool's signature for the model: types by their names, and defaults of types that JSON lacks as JSON."""
    if hasattr(tool, "shown_signature"):
        return tool.shown_signature
    signature, hints, parameters = inspect.signature(tool), hints_of(tool), []
    for name, parameter in signature.parameters.items():
        hint, default = hints.get(name, Any), parameter.default
        if not is_json_type(hint) and default is not EMPTY and default is not None:
            default = Shown(json.dumps(default, default=json_form, ensure_ascii=False))
        parameters.append(parameter.replace(annotation=Shown(type_name(hint)), default=default))
    hint = hints.get("return", EMPTY)
    returned = hint if hint is EMPTY else Shown(type_name(str if hint is ToolResult else hint))
    return inspect.Signature(parameters, return_annotation=returned)


def describe_tools(tools: dict[str, Callable], tokenizer: Any = None) -> str:
    """Describe tools for the system prompt: signatures, docstrings, and JSON schemas of types that JSON lacks.

    With a tokenizer the texts are made free of control tokens. A name that holds one raises `ValueError`.
    """
    from mt_grpo.conversation.formats.control_tokens import check_names, forbidden_in, neutralise

    texts = []
    for name, tool in tools.items():
        readers = {} if hasattr(tool, "json_schema") else readers_of(tool)
        hints = {key: reader.hint for key, reader in readers.items() if not reader.plain}
        lines = [f"{key}: {json.dumps(json_schema(hint), ensure_ascii=False)}" for key, hint in hints.items()]
        text = "\n".join([f"{name}{signature_of(tool)}", *lines, inspect.getdoc(tool)])
        if tokenizer is not None:
            forbidden = forbidden_in(Origin.OUTSIDE, "tool", tokenizer)
            properties, *_ = parts_of_schema(tool_schema(name, tool)["function"].get("parameters"))
            check_names([name, *properties], forbidden)
            text = neutralise(text, tokenizer, forbidden)
        texts.append(text)
    return "\n\n".join(texts)


def fill_in_tools(system_prompt: str, tools: dict[str, Callable], tokenizer: Any = None) -> str:
    """Replace `{tool_descriptions}` in the system prompt. Raises `ValueError` for any other single brace."""
    texts = describe_tools(tools, tokenizer)
    try:
        return system_prompt.format(tool_descriptions=texts)
    except (LookupError, ValueError, AttributeError) as error:
        words = f"system_prompt has a placeholder or brace that is not {{tool_descriptions}} ({error!r})"
        raise ValueError(words + ". Write literal braces twice: {{ and }}.") from None


# From what a file or an integration lists to tools by name.


def named_tools(tools: Iterable) -> dict[str, Callable]:
    """Convert tools to functions by name. Raises `ValueError` for an invalid tool, and for two of the same name."""
    named: dict[str, Callable] = {}
    for tool in map(as_tool, tools):
        check_tool(tool)
        if tool.__name__ in named:
            raise ValueError(f"Two tools are called {tool.__name__!r}. The model could not tell them apart.")
        named[tool.__name__] = tool
    return named


def check_tool(tool: Callable) -> None:
    """Raise `ValueError` unless the tool is a function with name, type hints and docstring: the model reads them."""
    name = getattr(tool, "__name__", None)
    if isinstance(tool, type) or not callable(tool) or not re.fullmatch(r"[\w.:/-]+", name or ""):
        raise ValueError(f"A tool is a function with a name of letters, digits and _.:/-, got {name or tool!r:.100}.")
    if not inspect.getdoc(tool):
        raise ValueError(f"Tool {name} has no docstring. Write one: the model reads it to use the tool.")
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise ValueError(f"Tool {name} is a generator function. Use `return` with the whole result, not `yield`.")
    for key, parameter in inspect.signature(tool).parameters.items() if not hasattr(tool, "json_schema") else ():
        if parameter.annotation is EMPTY:
            raise ValueError(f"Tool {name} has no type hint for {key!r}. Write `{key}: str`; list `MyClass().f`.")
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ValueError(f"Tool {name}: no call can pass {key!r}, since it names arguments. Remove * and /.")
    try:
        tool_schema(name, tool)
    except Exception as error:  # a class's own hooks may raise anything
        words = f"Tool {name}: pydantic finds no JSON schema of its parameters: {error_line(error)}."
        raise ValueError(words) from error


class JsonSchema(BaseModel, extra="allow"):
    """What is read of a JSON schema that is not our own. What it says beyond that is only shown to the model."""

    type: str | list[str] = []
    enum: list[Any] = []
    required: list[str] = []
    properties: dict[str, bool | JsonSchema] = {}
    additionalProperties: bool | JsonSchema | None = None
    anyOf: list[bool | JsonSchema] = []
    oneOf: list[bool | JsonSchema] = []


def check_schema(schema: Any) -> None:
    """Raise `ValueError` unless this can be read as the JSON schema of a tool's parameters; None: it has none."""
    try:
        JsonSchema.model_validate(schema or {})
    except (ValidationError, RecursionError) as error:
        raise ValueError(f"no JSON schema of parameters: {error_line(error)}") from None


def as_tool(tool: Any) -> Callable:
    """Convert a tool to a function. A function is returned unchanged.

    An object has `name`, `schema` (of a function, as in OpenAI's API) and `run(**arguments)`, which may be async. It
    gets a call's arguments as the model wrote them: their names alone are checked.
    """
    if isinstance(tool, type) or not all(hasattr(tool, key) for key in ("name", "schema", "run")):
        return tool
    schema = tool.schema() if callable(tool.schema) else tool.schema
    made = functools.partial(tool.run)
    made.__name__ = made.__qualname__ = tool.name
    try:
        made.json_schema = function = {**schema.get("function", schema), "name": tool.name}
        check_schema(function.get("parameters"))
        made.shown_signature = shown_signature(function.get("parameters"))
        properties = parts_of_schema(function.get("parameters"))[0].items()
        described = {name: each for name, each in properties if isinstance(each, dict) and each.get("description")}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"Tool {tool.name} has the schema {schema!r:.200}, which describes no function: {error}."
        ) from None
    notes = [f"    {name}: {each['description']}" for name, each in described.items()]
    made.__doc__ = "\n".join([function.get("description", ""), *(["", "Args:", *notes] if notes else [])])
    return made


def shown_signature(schema: dict[str, Any] | None) -> str:
    """The signature of a tool with a JSON schema of its parameters. Its result is shown as text.

    >>> shown_signature({"properties": {"a": {"type": "integer"}, "b": True}, "required": ["b"]})
    '(b: Any, a: int = ...) -> str'
    """
    properties, required, further = parts_of_schema(schema)
    shown = [f"{name}: {type_of_schema(each)}" for name, each in properties.items() if name in required]
    for name, each in [(name, each) for name, each in properties.items() if name not in required]:
        default = each.get("default", ...) if isinstance(each, dict) else ...
        shown.append(f"{name}: {type_of_schema(each)} = {'...' if default is ... else repr(default)}")
    shown += [] if further is False else [f"**others: {type_of_schema(further)}"]
    return f"({', '.join(shown)}) -> str"


def type_of_schema(schema: Any) -> str:
    """The Python type of a parameter that a JSON schema describes, by its name; `Any` if there is none.

    >>> [type_of_schema(each) for each in ({"type": ["integer", "null"]}, {"type": "array"}, {"enum": ["a"]}, True)]
    ['int | None', 'list[Any]', "Literal['a']", 'Any']
    """
    names = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
    schema = schema if isinstance(schema, dict) else {}  # `true` allows everything
    kind, options = schema.get("type", ""), schema.get("anyOf") or schema.get("oneOf")
    if "enum" in schema:
        return f"Literal[{', '.join(map(repr, schema['enum']))}]"
    if options or isinstance(kind, list):
        return " | ".join(map(type_of_schema, options or [{**schema, "type": each} for each in kind]))
    if kind == "array":
        return f"list[{type_of_schema(schema.get('items'))}]"
    return "dict[str, Any]" if kind == "object" else names.get(kind, "Any")


def as_method(name: str, schema: dict[str, Any], run: Callable) -> Callable:
    """Convert a tool with a JSON schema to an async method that awaits `run(environment, name, arguments)`."""

    async def method(self: Any, **arguments: Any) -> ToolResult:
        return await run(self, name, arguments)

    functools.update_wrapper(method, as_tool(types.SimpleNamespace(name=name, schema=schema, run=method)))
    del method.__wrapped__  # it wraps nothing: the tool calls the method
    return method


def parts_of_schema(schema: dict[str, Any] | None) -> tuple[dict[str, Any], list[str], Any]:
    """(properties, required names, schema of further ones or False) of a tool's parameters."""
    schema = schema or {}
    further = schema.get("additionalProperties")
    return schema.get("properties") or {}, schema.get("required") or [], False if further is None else further


# A call and its arguments.


def unreadable(call: ToolCall, call_format: str = CALL_FORMAT) -> str:
    """The error of a call that cannot be parsed, with an example of the tool format."""
    return f"{call.error}. Expected: {call_format}"


def check_call(call: ToolCall, tools: dict[str, Callable]) -> str | None:
    """The reason why a call cannot run (the policy's mistake), or None if it can."""
    return read_call(call, tools)[1]


def read_call(call: ToolCall, tools: dict[str, Callable]) -> tuple[dict[str, Any], str | None]:
    """Convert a call's arguments to the types of their parameters. Returns (arguments, None) or ({}, error).

    This function and the validators of pydantic models run in the loop of all conversations: they must be quick.
    """
    if call.error:
        return {}, unreadable(call)
    if call.name not in tools:
        return {}, f"unknown tool {call.name!r}. Known tools: {', '.join(tools)}"
    tool, usage = tools[call.name], f"Usage: {call.name}{signature_of(tools[call.name])}"
    schema = tool.json_schema.get("parameters") if hasattr(tool, "json_schema") else parameters_schema(tool)
    properties, required, further = parts_of_schema(schema)
    if missing := [name for name in required if name in properties and name not in call.arguments]:
        return {}, f"missing a required argument: {missing[0]!r}. {usage}"
    if unknown := [name for name in call.arguments if name not in properties and further is False]:
        return {}, f"got an unexpected keyword argument {unknown[0]!r}. {usage}"
    written = copy.deepcopy(call.arguments)  # a tool may change what it gets, and the call stays what was written
    try:
        return read_arguments(tool, written), None
    except ValueError as error:
        return {}, f"{error}. {usage}"


def read_arguments(tool: Callable, written: dict[str, Any]) -> dict[str, Any]:
    """Convert arguments to the types of a function's parameters. Raises `ValueError` for one that does not fit.

    A tool with a schema of its own gets them as they were written.
    """
    if hasattr(tool, "json_schema"):
        return written
    arguments, readers = {}, readers_of(tool)
    for name, value in written.items():
        reader = readers.get(name) or list(readers.values())[-1]
        try:
            arguments[name] = reader.read(value)
        except ValidationError as error:
            # The option of a union that fits best is the one whose error is deepest inside the value.
            wrong = max(error.errors(), key=lambda each: len(each["loc"]))
            where = f" at {name}{''.join(f'[{key!r}]' for key in wrong['loc'])}" if wrong["loc"] else ""
            got = "nothing" if wrong["type"] == "missing" else f"{wrong['input']!r:.80}"
            words = f"got {got}{where}: {wrong['msg'].rstrip('.')}"
            raise ValueError(f"argument {name!r} must be {type_name(reader.hint)}, {words}") from error
        except (Exception, SystemExit) as error:  # a validator may raise anything
            words = f"whose check raised {error_line(error)}"
            raise ValueError(f"argument {name!r} must be {type_name(reader.hint)}, {words}") from error
    return arguments
