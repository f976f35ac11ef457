"""Functions as tools: what the model reads of them, and a call's arguments checked and converted by pydantic."""

from __future__ import annotations

import collections.abc
import copy
import functools
import inspect
import json
import keyword
import re
import types
import typing
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import parse_google_format_docstring

from mt_grpo.base.errors import error_line
from mt_grpo.conversation.formats.control_tokens import check_names, forbidden_in, neutralise
from mt_grpo.conversation.tools.results import json_form
from mt_grpo.rollout import Origin, ToolCall, ToolResult

CALL_FORMAT = '<tool>{"name": "tool name", "args": {"argument": "value"}}</tool>'
OTHERS = "others"  # in a signature: all parameters that the schema leaves open, or whose names Python does not take
EMPTY = inspect.Parameter.empty
UNIONS = (typing.Union, types.UnionType)


class Shown(str):
    """A text that is shown in a signature without quotes."""

    __repr__ = str.__str__


def is_json_type(expected: Any) -> bool:
    """Whether a type is one of JSON's own. Such arguments are passed unchanged.

    >>> [is_json_type(t) for t in (int, list[dict[str, float]], str | None, typing.Annotated[int, "how many"])]
    [True, True, True, True]
    >>> [is_json_type(t) for t in (bytes | None, tuple, dict[int, str], re.RegexFlag)]
    [False, False, False, False]
    """
    origin, options = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin is typing.Annotated:
        return is_json_type(options[0]) and all(isinstance(note, str) for note in options[1:])
    if origin is Literal:
        return all(type(option) in (str, int, bool, type(None)) for option in options)
    if origin is dict:
        return not options or (options[0] in (str, Any) and is_json_type(options[1]))
    if origin in (list, collections.abc.Sequence, *UNIONS):
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


def argument_mistake(name: str, value: Any, reader: ArgumentReader, error: Exception) -> str:
    """The error of an argument for the policy: its type, the place of the mistake, and pydantic's words."""
    expected = type_name(reader.hint)
    if not isinstance(error, ValidationError):
        return f"argument {name!r} must be {expected}, whose check raised {error_line(error)}"
    # The option of a union that fits best is the one whose error is deepest inside the value.
    wrong = max(error.errors(include_url=False, include_context=False), key=lambda wrong: len(wrong["loc"]))
    part, where, missing = value, "", wrong["type"].startswith("missing")
    for key in wrong["loc"]:
        with suppress(LookupError, TypeError):  # a key that is not in the value names an option of a union
            part, where = part[key], f"{where}[{key!r}]"
    if missing:
        where += f"[{wrong['loc'][-1]!r}]"
    got = type(part).__name__ if wrong["type"].endswith("_type") else repr(part)[:80]
    words = "" if reader.plain else f": {wrong['msg'].rstrip('.')}"
    got = "nothing" if missing else got
    return f"argument {name!r} must be {expected}, got {got}{where and f' at {name}{where}'}{words}"


# What the model reads of a tool.


def default_text(default: Any) -> str:
    """A parameter's default as the model would write it. Raises `TypeError` for an object without data."""
    return json.dumps(default, default=json_form, ensure_ascii=False)


class ParameterSchema(GenerateJsonSchema):
    """A JSON schema whose defaults are the same in every process: sets are sorted."""

    def encode_default(self, dft: Any) -> Any:
        return json.loads(default_text(dft))


def written_out(part: Any, definitions: dict[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """A JSON schema without titles, with its definitions in place of the references to them.

    Few chat templates follow a reference. A class that contains itself stays one.
    """
    if isinstance(part, list):
        return [written_out(each, definitions, inside) for each in part]
    if not isinstance(part, dict):
        return part
    name = str(part.get("$ref", "")).removeprefix("#/$defs/")
    if name in definitions and name not in inside:
        further = {key: each for key, each in part.items() if key != "$ref"}
        return written_out({**definitions[name], **further}, definitions, (*inside, name))
    written = {}
    for key, each in part.items():
        if key in ("const", "default", "enum", "examples"):
            written[key] = each
        elif key == "properties":  # a parameter may be called `title`
            written[key] = {name: written_out(one, definitions, inside) for name, one in each.items()}
        elif key not in ("title", "$defs") and not (key == "mapping" and "propertyName" in part):
            written[key] = written_out(each, definitions, inside)
    return written


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
    parameters = inspect.signature(tool).parameters
    adapters = [(name, "validation", reader.adapter) for name, reader in readers_of(tool).items()]
    schemas, shared = TypeAdapter.json_schemas(adapters, schema_generator=ParameterSchema)
    properties: dict[str, Any] = {}
    written: dict[str, Any] = {"type": "object", "properties": properties}
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            written["additionalProperties"] = schemas[name, "validation"]
            continue
        properties[name] = dict(schemas[name, "validation"])
        if parameter.default is not EMPTY:
            properties[name]["default"] = json.loads(default_text(parameter.default))
    if required := [name for name in properties if parameters[name].default is EMPTY]:
        written["required"] = required
    return with_definitions(written, shared.get("$defs", {}))


def tool_schema(name: str, tool: Callable) -> dict[str, Any]:
    """The JSON schema of a tool for chat templates. A tool that is an object brings its own."""
    return {"type": "function", "function": {**(getattr(tool, "json_schema", None) or described(tool)), "name": name}}


@cached_by_function
def described(tool: Callable) -> dict[str, Any]:
    """What the model reads of a function, with the notes of a docstring in Google's style beside the parameters."""
    text = (inspect.getdoc(tool) or "").strip()
    description, notes, returns = parse_google_format_docstring(text)
    parameters = parameters_schema(tool)
    if parameters["properties"].keys() <= notes.keys():
        properties = {key: {**each, "description": notes[key]} for key, each in parameters["properties"].items()}
        for schema in properties.values():
            if listed := re.search(
                r"\s*\(choices:\s*(\[.*\])\)\s*$", schema["description"], re.IGNORECASE | re.DOTALL
            ):
                note = schema.pop("description")[: listed.start()]
                schema |= {"enum": json.loads(listed[1]), "description": note}
        parameters = {**parameters, "properties": properties}
    else:  # then the model reads all of the docstring, whatever its style
        description = text
    function = {"name": tool.__name__, "description": description, "parameters": parameters}
    hint = hints_of(tool).get("return", EMPTY)
    try:
        result = json_schema(str if hint is ToolResult else hint, "serialization")
    except Exception:  # no hint, or none that JSON can hold; a class's own hooks may raise anything
        return function
    return {**function, "return": result if returns is None else {**result, "description": returns}}


@cached_by_function
def signature_of(tool: Callable) -> inspect.Signature:
    """A tool's signature for the model: types by their names, and defaults of types that JSON lacks as JSON."""
    if hasattr(tool, "shown_signature"):
        return tool.shown_signature
    signature, hints = inspect.signature(tool), hints_of(tool)

    def shown(parameter: inspect.Parameter) -> inspect.Parameter:
        hint, default = hints.get(parameter.name, Any), parameter.default
        if not is_json_type(hint) and default is not EMPTY and default is not None:
            default = Shown(default_text(default))
        return parameter.replace(annotation=Shown(type_name(hint)), default=default)

    return inspect.Signature(list(map(shown, signature.parameters.values())), return_annotation=shown_result(hints))


def shown_result(hints: dict[str, Any]) -> Any:
    """The type of a tool's result in its signature, by the hints of its function."""
    hint = hints.get("return", EMPTY)
    return hint if hint is EMPTY else Shown(type_name(str if hint is ToolResult else hint))


def describe_tools(tools: dict[str, Callable], tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Describe tools for the system prompt: signatures, docstrings, and JSON schemas of types that JSON lacks.

    With a tokenizer the texts are made free of control tokens. A name that holds one raises `ValueError`.
    """
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


def fill_in_tools(
    system_prompt: str, tools: dict[str, Callable], tokenizer: PreTrainedTokenizerBase | None = None
) -> str:
    """Replace `{tool_descriptions}` in the system prompt. Raises `ValueError` for any other single brace."""
    texts = describe_tools(tools, tokenizer)
    try:
        return system_prompt.format(tool_descriptions=texts)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
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
        raise ValueError(
            f"A tool must be a function whose name has letters, digits and _ . : / -, got {name or tool!r:.100}."
        )
    if not inspect.getdoc(tool):
        raise ValueError(f"Tool {name} has no docstring. Write one: the model reads it to use the tool.")
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise ValueError(f"Tool {name} is a generator function. Use `return` with the whole result, not `yield`.")
    if hasattr(tool, "json_schema"):
        return
    for key, parameter in inspect.signature(tool).parameters.items():
        if parameter.annotation is EMPTY:
            raise ValueError(f"Tool {name} has no type hint for {key!r}. Write `{key}: str`; list `MyClass().f`.")
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ValueError(f"Tool {name}: no call can pass {key!r}, since it names arguments. Remove * and /.")
    try:
        parameters_schema(tool)
    except Exception as error:  # a class's own hooks may raise anything
        raise ValueError(
            f"Tool {name}: the model cannot be told its parameters, by a JSON schema: {error_line(error)}. Use str, "
            "int, list[...], a dataclass or other types and defaults that pydantic reads from JSON."
        ) from error


class JsonSchema(BaseModel, strict=True):
    """What is read of a JSON schema to parse calls."""

    type: str | list[str] = ""
    enum: list = []
    items: bool | JsonSchema | list | None = None
    additional_properties: bool | JsonSchema | None = Field(None, alias="additionalProperties")
    required: list[str] | None = None
    any_of: list[bool | JsonSchema] = Field([], alias="anyOf")
    one_of: list[bool | JsonSchema] = Field([], alias="oneOf")
    properties: dict[str, bool | JsonSchema] | None = None


def check_schema(schema: Any) -> None:
    """Raise `ValueError` unless a value is a JSON schema that calls can be parsed with.

    >>> check_schema({"properties": {"a": {"anyOf": [True, {"type": ["integer", "null"]}]}}})
    """
    try:
        JsonSchema.model_validate(schema)
    except ValidationError as error:
        wrong = max(error.errors(), key=lambda each: len(each["loc"]))
        where = ".".join(str(key) for key in wrong["loc"] if key != "JsonSchema")
        raise ValueError(f"got {wrong['input']!r:.100} at {where or 'the schema'}: {wrong['msg']}") from None


def as_tool(tool: Any) -> Callable:
    """Convert a tool to a function. A function is returned unchanged.

    An object has `name`, `schema` (of a function, as in OpenAI's API) and `run(**arguments)`, which may be async. It
    gets a call's arguments as the model wrote them: their names alone are checked. Raises `ValueError` if the schema
    describes no function.
    """
    if isinstance(tool, type) or not all(hasattr(tool, key) for key in ("name", "schema", "run")):
        return tool
    schema = tool.schema() if callable(tool.schema) else tool.schema
    try:
        function = dict(schema.get("function", schema))
        check_schema(function.get("parameters") or {})
        properties, required, further = parts_of_schema(function.get("parameters"))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Tool {tool.name} has the schema {schema!r:.200}, expected that of a function, with name, description "
            f"and parameters: {error}."
        ) from None
    if not any(each.kind is each.VAR_KEYWORD for each in inspect.signature(tool.run).parameters.values()):
        further = False  # `run` takes no other names
    described = {name: each for name, each in properties.items() if isinstance(each, dict) and each.get("description")}
    notes = [f"    {name}: {each['description']}" for name, each in described.items()]
    made = functools.partial(tool.run)
    made.__name__ = made.__qualname__ = tool.name
    made.__doc__ = "\n".join([function.get("description", ""), *(["", "Args:", *notes] if notes else [])])
    made.json_schema, hints = {**function, "name": tool.name}, {}
    with suppress(NameError, TypeError):  # a name for type checkers alone; a partial, or an object with `__call__`
        hints = typing.get_type_hints(tool.run)
    made.shown_signature = signature_from(properties, required, further, shown_result(hints))
    return made


def signature_from(properties: dict[str, Any], required: list[str], further: Any, returned: Any) -> inspect.Signature:
    """The signature of a tool with a JSON schema. `**others` stand for names that Python does not take."""
    parameters = []
    for name, schema in sorted(properties.items(), key=lambda item: item[0] not in required):
        default = schema.get("default", Shown("...")) if isinstance(schema, dict) else Shown("...")
        if name.isidentifier() and not keyword.iskeyword(name) and name != OTHERS:
            kind, default = inspect.Parameter.POSITIONAL_OR_KEYWORD, EMPTY if name in required else default
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=type_of_schema(schema)))
    if len(parameters) < len(properties) or further is not False:
        parameters.append(inspect.Parameter(OTHERS, inspect.Parameter.VAR_KEYWORD, annotation=type_of_schema(further)))
    return inspect.Signature(parameters, return_annotation=returned)


def type_of_schema(schema: Any) -> Shown:
    """The Python type of a parameter that a JSON schema describes, by its name; `Any` if there is none.

    >>> [type_of_schema(each) for each in ({"type": ["integer", "null"]}, {"type": "array"}, {"enum": ["a"]}, True)]
    [int | None, list[Any], Literal['a'], Any]
    """
    names = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
    schema = schema if isinstance(schema, dict) else {}  # `true` allows everything
    kind, options = schema.get("type", ""), schema.get("anyOf") or schema.get("oneOf")
    if "enum" in schema:
        return Shown(f"Literal[{', '.join(map(repr, schema['enum']))}]")
    if options or isinstance(kind, list):
        return Shown(" | ".join(map(type_of_schema, options or [{**schema, "type": each} for each in kind])))
    if kind == "array":
        return Shown(f"list[{type_of_schema(schema.get('items'))}]")
    return Shown("dict[str, Any]" if kind == "object" else names.get(kind, "Any"))


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
    if hasattr(tool, "json_schema"):
        return written, None
    arguments, readers = {}, readers_of(tool)
    for name, value in written.items():
        reader = readers.get(name) or list(readers.values())[-1]
        try:
            arguments[name] = reader.read(value)
        except (Exception, SystemExit) as error:  # a validator may raise anything
            return {}, f"{argument_mistake(name, value, reader, error)}. {usage}"
    # A tool's process reads JSON, and makes its own objects of it.
    return (written if hasattr(tool, "prepare") else arguments), None
