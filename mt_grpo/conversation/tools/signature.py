"""Functions as tools: the description that the model reads, and the check of a call against it."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import keyword
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import parse_google_format_docstring

from mt_grpo.base.errors import error_line
from mt_grpo.conversation.formats.base import load_json
from mt_grpo.conversation.formats.control_tokens import Origin, check_names, forbidden_in, neutralise
from mt_grpo.conversation.tools.arguments import (
    ArgumentReader,
    argument_mistake,
    cached_by_function,
    default_text,
    hints_of,
    is_json_type,
    json_schema,
    parameters_schema,
    read_argument,
    readers_of,
    type_name,
)
from mt_grpo.conversation.tools.results import ADDRESS
from mt_grpo.rollout import ToolCall, ToolResult

CALL_FORMAT = '<tool>{"name": "tool name", "args": {"argument": "value"}}</tool>'
OTHERS = "others"  # in a signature: all parameters that the schema leaves open, or whose names Python does not take
EMPTY = inspect.Parameter.empty


class Shown(str):
    """A text that is shown in a signature without quotes."""

    __repr__ = str.__str__


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
        properties = {key: with_note(each, notes[key]) for key, each in parameters["properties"].items()}
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


def with_note(schema: dict[str, Any], note: str) -> dict[str, Any]:
    """A parameter's schema with its description, whose end may list its choices, as transformers reads them.

    >>> with_note({"type": "array", "items": {"type": "string"}}, 'Drinks (choices: ["tea", "water"])')
    {'type': 'array', 'items': {'type': 'string', 'enum': ['tea', 'water']}, 'description': 'Drinks'}
    """
    listed = re.search(r"\(choices:\s*(\[.*\])\)\s*$", note, re.IGNORECASE | re.DOTALL)
    choices = load_json(listed[1])[0] if listed else None
    if not isinstance(choices, list):
        return {**schema, "description": note}
    is_list = schema.get("type") == "array"  # each of its values is one of them
    added = {"items": {**schema.get("items", {}), "enum": choices}} if is_list else {"enum": choices}
    return {**schema, **added, "description": note[: listed.start()].strip()}


def named_tools(tools: Iterable) -> dict[str, Callable]:
    """Convert tools to functions by name. Raises `ValueError` for an invalid tool, and for two of the same name."""
    named: dict[str, Callable] = {}
    for tool in map(as_tool, tools):
        check_tool(tool)
        if tool.__name__ in named:
            raise ValueError(f"Two tools are called {tool.__name__!r}. The model could not tell them apart.")
        named[tool.__name__] = tool
    return named


def as_tool(tool: Any) -> Callable:
    """Convert a tool to a function. A function is returned unchanged.

    An object has `name`, `schema` (of a function, as in OpenAI's API) and `run(**arguments)`, which may be async.
    Raises `ValueError` if the schema describes no function.
    """
    if isinstance(tool, type) or not all(hasattr(tool, key) for key in ("name", "schema", "run")):
        return tool
    schema = tool.schema() if callable(tool.schema) else tool.schema
    try:
        function = dict(schema.get("function", schema))
        check_schema(function.get("parameters") or {})
        properties, required, further = parts_of_schema(function.get("parameters"))
        if not getattr(tool, "as_written", False) and not takes_any(tool.run):
            further = False
        signature = signature_from(properties, required, further, returned_by(tool.run))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Tool {tool.name} has the schema {schema!r:.200}, expected that of a function, with name, description "
            f"and parameters: {error}."
        ) from None
    described = {name: each for name, each in properties.items() if isinstance(each, dict) and each.get("description")}
    notes = [f"    {name}: {each['description']}" for name, each in described.items()]
    made = functools.partial(tool.run)
    made.__name__ = made.__qualname__ = tool.name
    made.__doc__ = "\n".join([function.get("description", ""), *(["", "Args:", *notes] if notes else [])])
    made.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    made.__signature__, made.json_schema = signature, {**function, "name": tool.name}
    return made


def signature_from(properties: dict[str, Any], required: list[str], further: Any, returned: Any) -> inspect.Signature:
    """The signature of a tool with a JSON schema. `**others` stand for names that Python does not take."""
    parameters = []
    for name, schema in sorted(properties.items(), key=lambda item: item[0] not in required):
        default = schema.get("default", Shown("...")) if isinstance(schema, dict) else Shown("...")
        if name.isidentifier() and not keyword.iskeyword(name) and name != OTHERS:
            kind, default = inspect.Parameter.POSITIONAL_OR_KEYWORD, EMPTY if name in required else default
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=hint_of(schema)))
    if (unnamed := len(parameters) < len(properties)) or further is not False:
        hint = Any if unnamed else hint_of(further)
        parameters.append(inspect.Parameter(OTHERS, inspect.Parameter.VAR_KEYWORD, annotation=hint))
    return inspect.Signature(parameters, return_annotation=returned)


def as_method(name: str, schema: dict[str, Any], run: Callable) -> Callable:
    """Convert a tool with a JSON schema to an async method of an environment.

    It passes a call's arguments as the model wrote them: `await run(environment, name, arguments)`.
    """

    async def method(self: Any, **arguments: Any) -> ToolResult:
        return await run(self, name, arguments)

    tool = as_tool(types.SimpleNamespace(name=name, schema=schema, run=run, as_written=True))
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    functools.update_wrapper(method, tool)
    parameters = [own, *inspect.signature(tool).parameters.values()]
    method.__signature__ = inspect.Signature(parameters, return_annotation=ToolResult)
    method.as_written = True  # who runs it reads the arguments itself
    return method


def parts_of_schema(schema: dict[str, Any] | None) -> tuple[dict[str, Any], list[str], Any]:
    """(properties, required names, schema of further ones or False) of a tool's parameters."""
    schema = schema or {}
    further = schema.get("additionalProperties")
    return schema.get("properties") or {}, schema.get("required") or [], False if further is None else further


def takes_any(run: Callable) -> bool:
    """Whether a callable takes keyword arguments of any name."""
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(run).parameters.values())


def returned_by(run: Callable) -> Any:
    """The type of a callable's result, or its text without quotes if the names in it are unknown."""
    try:
        return typing.get_type_hints(run).get("return", EMPTY)
    except (NameError, TypeError):  # a name for type checkers alone; a partial, or an object with `__call__`
        returned = inspect.signature(run).return_annotation
        return Shown(returned) if isinstance(returned, str) else returned


def hint_of(schema: Any) -> Any:
    """The Python type of a parameter that a JSON schema describes, `Any` if there is none.

    >>> hint_of({"anyOf": [{"type": "integer"}, {"type": "null"}]}), hint_of({"$ref": "#/x"}), hint_of(True)
    (int | None, typing.Any, typing.Any)
    """
    schema = schema if isinstance(schema, dict) else {}  # `true` allows everything
    plain = {"string": str, "integer": int, "number": float, "boolean": bool, "null": type(None)}
    kind, options = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    if "enum" in schema:
        return typing.Literal[tuple(schema["enum"])]
    if isinstance(kind, list):
        options = [{**schema, "type": each} for each in kind]
    if options:
        return functools.reduce(operator.or_, map(hint_of, options))
    if kind == "array":
        return list[hint_of(schema.get("items", {}))]
    return dict[str, Any] if kind == "object" else plain.get(kind, Any)


class JsonSchema(BaseModel, strict=True):
    """What is read of a JSON schema to parse calls."""

    type: str | list[str] = ""
    enum: list = []
    items: bool | JsonSchema | list | None = None
    additional_properties: bool | JsonSchema | None = Field(None, alias="additionalProperties")
    required: list[str] | None = None
    any_of: list[bool | JsonSchema] = Field([], alias="anyOf")
    one_of: list[bool | JsonSchema] = Field([], alias="oneOf")
    all_of: list[bool | JsonSchema] = Field([], alias="allOf")
    properties: dict[str, bool | JsonSchema] | None = None
    definitions: dict[str, bool | JsonSchema] | None = Field(None, alias="$defs")


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


def check_tool(tool: Callable) -> None:
    """Raise `ValueError` unless the tool is a function with name, type hints and docstring: the model reads them."""
    name = getattr(tool, "__name__", None)
    if isinstance(tool, type):
        raise ValueError(f"Tool {name} is a class. List its functions, or set ENVIRONMENT to it to use its methods.")
    if not callable(tool) or not name:
        raise ValueError(f"A tool must be a named function, got {tool!r:.100}.")
    if not re.fullmatch(r"[\w.:/-]+", name):
        raise ValueError(f"Tool {name!r:.100} has a name of other characters than letters, digits and _ . : / -.")
    if not inspect.getdoc(tool):
        raise ValueError(f"Tool {name} has no docstring. Write one: the model reads it to use the tool.")
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise ValueError(f"Tool {name} is a generator function. Use `return` with the whole result, not `yield`.")
    try:
        hints = hints_of(tool)
    except Exception as error:
        raise ValueError(f"Tool {name} has type hints that cannot be read: {error_line(error)}.") from error
    for parameter in inspect.signature(tool).parameters.values():
        check_parameter(f"Tool {name}", parameter, hints)


def check_parameter(tool: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> None:
    """Raise `ValueError` for a parameter that no call can pass, since a call is a JSON object of named arguments."""
    name = parameter.name
    if name not in hints:
        raise ValueError(f"{tool} has no type hint for {name!r}. Write `{name}: str`; list methods as `MyClass().f`.")
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
        raise ValueError(f"{tool}: no call can pass {name!r}, since it names its arguments. Write it without * and /.")
    try:
        ArgumentReader(hints[name]), json_schema(hints[name])
    except Exception as error:  # a class's own hooks may raise anything
        known = getattr(error, "code", None) in ("schema-for-unknown-type", "invalid-for-json-schema")
        raise ValueError(
            f"{tool}: parameter {name!r} has the type {type_name(hints[name])}, which JSON cannot "
            f"represent{'' if known else f' ({error_line(error)})'}. Use str, int, list[...], a dataclass or another "
            "type that pydantic reads from JSON."
        ) from None
    if re.search(ADDRESS, repr(parameter.default)):
        raise ValueError(
            f"{tool}: the default of {name!r} is {parameter.default!r}. The model would read its address, which "
            "differs between processes. Use None as default, and create the object inside the tool."
        )


def describe_tools(tools: dict[str, Callable], tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Describe tools for the system prompt: signatures, docstrings, and JSON schemas of types that JSON lacks.

    With a tokenizer the texts are made free of control tokens. A name that holds one raises `ValueError`.
    """
    texts = []
    for name, tool in tools.items():
        own = {key: reader.hint for key, reader in readers_of(tool)[0].items() if not reader.plain}
        lines = [f"{key}: {json.dumps(json_schema(hint), ensure_ascii=False)}" for key, hint in own.items()]
        text = "\n".join([f"{name}{signature_of(tool)}", *lines, inspect.getdoc(tool)])
        if tokenizer is not None:
            forbidden = forbidden_in(Origin.OUTSIDE, "tool", tokenizer)
            properties, *_ = parts_of_schema(tool_schema(name, tool)["function"].get("parameters"))
            check_names([name, *inspect.signature(tool).parameters, *properties], forbidden)
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


@cached_by_function
def signature_of(tool: Callable) -> inspect.Signature:
    """A tool's signature for the model: types by their names, and defaults of types that JSON lacks as JSON."""
    signature, hints = inspect.signature(tool), hints_of(tool)

    def shown(parameter: inspect.Parameter) -> inspect.Parameter:
        hint, default = hints.get(parameter.name, Any), parameter.default
        if not is_json_type(hint) and default is not EMPTY and default is not None:
            default = Shown(default_text(default))
        return parameter.replace(annotation=Shown(type_name(hint)), default=default)

    returned = hints.get("return", signature.return_annotation)
    returned = returned if returned is EMPTY else Shown(type_name(str if returned is ToolResult else returned))
    return inspect.Signature(list(map(shown, signature.parameters.values())), return_annotation=returned)


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
    if mistake := mistaken_names(tool, call.arguments):
        return {}, f"{mistake}. {usage}"
    given = copy.deepcopy(call.arguments)  # a tool may change what it gets, and the call stays what was written
    if getattr(tool, "as_written", False):
        return given, None
    arguments = {}
    for name, value in given.items():
        try:
            arguments[name] = read_argument(tool, name, value)
        except (Exception, SystemExit) as error:  # a validator may raise anything
            return {}, f"{argument_mistake(tool, name, value, error)}. {usage}"
    # A tool's process reads JSON, and makes its own objects of it.
    return (given if hasattr(tool, "prepare") else arguments), None


def mistaken_names(tool: Callable, arguments: dict[str, Any]) -> str | None:
    """What is wrong with the names of a call's arguments, by the schema that the model reads; None if nothing is."""
    schema = tool.json_schema.get("parameters") if hasattr(tool, "json_schema") else parameters_schema(tool)
    properties, required, further = parts_of_schema(schema)
    if missing := [name for name in required if name in properties and name not in arguments]:
        return f"missing a required argument: {missing[0]!r}"
    if unknown := [name for name in arguments if name not in properties and further is False]:
        return f"got an unexpected keyword argument {unknown[0]!r}"
    return None
