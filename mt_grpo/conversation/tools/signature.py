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
from mt_grpo.conversation.tools.running import json_form
from mt_grpo.rollout import Origin, ToolCall

CALL_FORMAT = '<tool>{"name": "tool name", "args": {"argument": "value"}}</tool>'
EMPTY = inspect.Parameter.empty


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
    if origin in (list, Sequence, typing.Union, types.UnionType):
        return all(map(is_json_type, options))
    return expected in (str, int, float, bool, type(None), Any, object)


def cached_by_function(function: Callable) -> Callable:
    """Cache the result per tool while the tool exists. A method is one tool, whatever object it is bound to."""
    cache = weakref.WeakKeyDictionary()

    def wrapper(tool: Callable) -> Any:
        results = cache.setdefault(getattr(tool, "__func__", tool), {})
        if (bound := inspect.ismethod(tool)) not in results:
            results[bound] = function(tool)
        return results[bound]

    return wrapper


@cached_by_function
def types_of(tool: Callable) -> dict[str, tuple[bool, TypeAdapter]]:
    """(whether JSON has the type, pydantic's adapter) per parameter, `**rest` last. A default of None is allowed."""
    hints, bare, adapters = typing.get_type_hints(tool, include_extras=True), typing.get_type_hints(tool), {}
    for name, parameter in inspect.signature(tool).parameters.items():
        hint = hints.get(name, Any)
        if parameter.default is None and hint is not Any and type(None) not in typing.get_args(bare.get(name)):
            hint = typing.Union[hint, None]  # noqa: UP007 (not all hints have `|`)
        adapters[name] = is_json_type(hint), TypeAdapter(hint)
    return adapters


def as_json(value: Any) -> Any:
    """Convert a default value to JSON, in the same way in every process."""
    return json.loads(json.dumps(value, default=json_form))


class PlainSchema(GenerateJsonSchema):
    """A JSON schema without titles of fields and without references."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def tagged_union_schema(self, schema: Any) -> dict[str, Any]:
        """The schema without OpenAPI's `discriminator`, which has references."""
        return {"oneOf": super().tagged_union_schema(schema)["oneOf"]}

    encode_default = staticmethod(as_json)

    def generate_definitions(self, inputs: Any) -> tuple[dict[Any, Any], dict[str, Any]]:
        """The schemas written out, and definitions only if a class contains itself."""
        schemas, shared = super().generate_definitions(inputs)
        classes = {name: {key: part for key, part in each.items() if key != "title"} for name, each in shared.items()}
        written = {key: written_out(each, classes) for key, each in schemas.items()}
        recursive = '"#/$defs/' in json.dumps(list(written.values()))
        return written, {name: written_out(each, classes, (name,)) for name, each in classes.items() if recursive}


def written_out(part: Any, definitions: dict[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """A JSON schema without references, which few chat templates follow. A class inside itself stays one."""
    if isinstance(part, list):
        return [written_out(each, definitions, inside) for each in part]
    if not isinstance(part, dict):
        return part
    name = str(part.get("$ref", "")).removeprefix("#/$defs/")
    if name in definitions and name not in inside:
        further = {key: each for key, each in part.items() if key != "$ref"}
        return written_out({**definitions[name], **further}, definitions, (*inside, name))
    return {key: written_out(each, definitions, inside) for key, each in part.items()}


def json_schema(adapter: TypeAdapter, mode: Literal["validation", "serialization"] = "validation") -> dict[str, Any]:
    """The JSON schema of a type. Raises pydantic's errors for one that JSON cannot hold."""
    schemas, definitions = TypeAdapter.json_schemas([("", mode, adapter)], schema_generator=PlainSchema)
    return {**schemas["", mode], **definitions}


@cached_by_function
def described(tool: Callable) -> dict[str, Any]:
    """What the model reads of a function, with the notes of a docstring in Google's style beside the parameters."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    adapters = [(name, "validation", adapter) for name, (_, adapter) in types_of(tool).items()]
    schemas, definitions = TypeAdapter.json_schemas(adapters, schema_generator=PlainSchema)
    parameters = {"type": "object", "properties": (properties := {})}
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            parameters["additionalProperties"] = schemas[name, "validation"]
            continue
        properties[name] = schemas[name, "validation"]
        if parameter.default is EMPTY:
            parameters.setdefault("required", []).append(name)
        else:
            properties[name]["default"] = as_json(parameter.default)
    text = (inspect.getdoc(tool) or "").strip()
    description, notes, returns = parse_google_format_docstring(text)
    if properties.keys() <= notes.keys():
        for name, schema in properties.items():
            schema["description"] = notes[name]
    else:  # then the model reads all of the docstring, whatever its style
        description = text
    function = {"name": tool.__name__, "description": description, "parameters": parameters | definitions}
    hint = typing.get_type_hints(tool, include_extras=True).get("return", EMPTY)
    with suppress(Exception):  # no hint, or none that JSON can hold; a class's own hooks may raise anything
        function["return"] = json_schema(TypeAdapter(str if "ToolResult" in str(hint) else hint), "serialization")
        function["return"] |= {} if returns is None else {"description": returns}
    return function


def tool_schema(name: str, tool: Callable) -> dict[str, Any]:
    """The JSON schema of a tool for chat templates. A tool that is an object brings its own."""
    return {"type": "function", "function": {**(getattr(tool, "json_schema", None) or described(tool)), "name": name}}


def parts_of_schema(schema: dict[str, Any] | None) -> tuple[dict[str, Any], list[str], Any]:
    """(properties, required names, schema of further ones or False) of a tool's parameters."""
    schema = schema or {}
    further, properties = schema.get("additionalProperties"), schema.get("properties") or {}
    properties = {name: each if isinstance(each, dict) else {} for name, each in properties.items()}
    return properties, schema.get("required") or [], False if further is None else further


def type_of_schema(schema: Any) -> str:
    """The Python type of a value that a JSON schema describes, by its name; `Any` if there is none.

    >>> [type_of_schema(each) for each in ({"type": ["integer", "null"]}, {"type": "array"}, {"enum": ["a"]}, True)]
    ['int | None', 'list[Any]', "Literal['a']", 'Any']
    """
    names = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
    schema = schema if isinstance(schema, dict) else {}  # `true` allows everything
    kind, options = schema.get("type", ""), schema.get("anyOf") or schema.get("oneOf")
    if "enum" in schema or "const" in schema:
        return f"Literal[{', '.join(map(repr, schema.get('enum', [schema.get('const')])))}]"
    if options or isinstance(kind, list):
        options = options or [{**schema, "type": each} for each in kind]
        return " | ".join(dict.fromkeys(map(type_of_schema, options)))
    if kind == "array":
        return f"list[{type_of_schema(schema.get('items'))}]"
    if kind == "object":
        return f"dict[str, {type_of_schema(schema.get('additionalProperties'))}]"
    return names.get(kind, "Any")


def signature_of(tool: Callable) -> str:
    """The signature of a tool as the model reads it, made of the JSON schema: `(city: str, days: int = 1) -> str`."""
    function = tool_schema("", tool)["function"]
    properties, required, further = parts_of_schema(function.get("parameters"))
    shown = [f"{name}: {type_of_schema(properties[name])}" for name in properties if name in required]
    for name in [name for name in properties if name not in required]:
        default = repr(properties[name]["default"]) if "default" in properties[name] else "..."
        shown.append(f"{name}: {type_of_schema(properties[name])} = {default}")
    shown += [] if further is False else [f"**others: {type_of_schema(further)}"]
    returned = type_of_schema(function.get("return", {"type": "string"}))
    if "return" not in function and not hasattr(tool, "json_schema"):  # such as an image
        returned = getattr(typing.get_type_hints(tool).get("return"), "__name__", returned)
    return f"({', '.join(shown)}) -> {returned}"


def describe_tools(tools: dict[str, Callable], tokenizer: Any = None) -> str:
    """Describe tools for the system prompt: signatures, docstrings, and JSON schemas of types that JSON lacks.

    With a tokenizer the texts are made free of control tokens. A name that holds one raises `ValueError`.
    """
    from mt_grpo.conversation.formats.control_tokens import check_names, forbidden_in, neutralise

    texts = []
    for name, tool in tools.items():
        adapters = {} if hasattr(tool, "json_schema") else types_of(tool)
        shown = {key: json_schema(adapter) for key, (plain, adapter) in adapters.items() if not plain}
        lines = [f"{key}: {json.dumps(schema, ensure_ascii=False)}" for key, schema in shown.items()]
        text = "\n".join([f"{name}{signature_of(tool)}", *lines, inspect.getdoc(tool)])
        if tokenizer is not None:
            forbidden = forbidden_in(Origin.OUTSIDE, "tool", tokenizer)
            check_names(tool_schema(name, tool)["function"], forbidden)
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


def named_tools(tools: Iterable) -> dict[str, Callable]:
    """Convert tools to functions by name. Raises `ValueError` for an invalid tool, and for two of the same name."""
    tools = list(map(as_tool, tools))
    for tool in tools:
        check_tool(tool)
    return merged("the list of tools", tools)


def merged(name: str, *groups: Iterable[Callable]) -> dict[str, Callable]:
    """Merge groups of tools, name -> function. Raises `ValueError` if two have the same name."""
    tools = {}
    for tool in (tool for group in groups for tool in group):
        if tool.__name__ in tools:
            raise ValueError(f"Two tools are called {tool.__name__!r}, one of them in {name}. Rename one.")
        tools[tool.__name__] = tool
    return tools


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
            raise ValueError(f"Tool {name} has no type hint for {key!r}. Write `{key}: str`; a method: `MyClass().f`.")
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ValueError(f"Tool {name}: no call can pass {key!r}, since it names arguments. Remove * and /.")
    try:
        tool_schema(name, tool)
    except Exception as error:  # a class's own hooks may raise anything
        raise ValueError(f"Tool {name}: its parameters have no JSON schema: {error_line(error)}.") from error


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
        signature_of(made)
    except (AttributeError, TypeError, ValueError) as error:
        words = f"Tool {tool.name} has the schema {schema!r:.200}, which describes no function: {error}."
        raise ValueError(words) from None
    properties, *_ = parts_of_schema(function.get("parameters"))
    notes = [f"    {name}: {each['description']}" for name, each in properties.items() if each.get("description")]
    made.__doc__ = "\n".join([function.get("description", ""), *(["", "Args:", *notes] if notes else [])])
    return made


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
        return {}, f"unknown tool {call.name!r}. Known tools: {', '.join(tools) or 'none'}"
    try:
        return read_arguments(tools[call.name], call.arguments), None
    except ValueError as error:
        return {}, f"{error}. Usage: {call.name}{signature_of(tools[call.name])}"


def read_arguments(tool: Callable, written: dict[str, Any]) -> dict[str, Any]:
    """Convert arguments to the types of a tool's parameters. Raises `ValueError` for those that do not fit."""
    properties, required, further = parts_of_schema(tool_schema("", tool)["function"].get("parameters"))
    if missing := [name for name in required if name in properties and name not in written]:
        raise ValueError(f"missing a required argument: {missing[0]!r}")
    if unknown := [name for name in written if name not in properties and further is False]:
        raise ValueError(f"got an unexpected keyword argument {unknown[0]!r}")
    arguments = copy.deepcopy(written)  # a tool may change what it gets, and the call stays what was written
    if hasattr(tool, "json_schema"):  # checked by the tool itself
        return arguments
    adapters = types_of(tool)
    for name, value in arguments.items():
        plain, adapter = adapters[name] if name in properties else list(adapters.values())[-1]
        try:
            if plain:  # 7 stays an int where a float is expected
                adapter.validate_python(value, strict=True)
            else:
                arguments[name] = adapter.validate_json(json.dumps(value), strict=True)
        except (Exception, SystemExit) as error:  # a validator may raise anything
            own = {"loc": (), "input": value, "msg": error_line(error)}
            errors = error.errors() if isinstance(error, ValidationError) else [own]
            wrong = max(errors, key=lambda each: len(each["loc"]))  # of a union, the option that fits best
            where = f" at {name}{''.join(f'[{key!r}]' for key in wrong['loc'])}" if wrong["loc"] else ""
            expected = type_of_schema(properties.get(name, further))
            words = f"argument {name!r} must be {expected}, got {wrong['input']!r:.80}{where}"
            raise ValueError(f"{words}: {wrong['msg'].rstrip('.')}") from error
    return arguments
