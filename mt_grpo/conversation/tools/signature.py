"""Functions as tools: the description that the model reads, and the check of a call against the signature."""

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
from mt_grpo.conversation.tools.results import ADDRESS, error_text
from mt_grpo.rollout import ToolCall, ToolResult


def tool_schema(name: str, tool: Callable) -> dict[str, Any]:
    """The JSON schema of a tool for chat templates. Its types are those of pydantic, which validates its calls.

    The note that a docstring in Google's style has about a parameter stands beside the parameter's type. A tool that
    is an object brings its own schema.
    """
    if given := getattr(tool, "json_schema", None):
        return {"type": "function", "function": {**given, "name": name}}
    return {"type": "function", "function": {"name": name, **described(tool)}}


@cached_by_function
def described(tool: Callable) -> dict[str, Any]:
    """The description and parameters of a function, and its result if the type has a schema."""
    text = (inspect.getdoc(tool) or "").strip()
    description, notes, returns = parse_google_format_docstring(text)
    parameters = parameters_schema(tool)
    if parameters["properties"].keys() <= notes.keys():
        pairs = parameters["properties"].items()
        parameters = {**parameters, "properties": {key: with_note(each, notes[key]) for key, each in pairs}}
    else:  # then the model reads all of the docstring, whatever its style
        description = text
    result = result_schema(tool)
    if result is not None and returns is not None:
        result = {**result, "description": returns}
    return {"description": description, "parameters": parameters, **({} if result is None else {"return": result})}


def with_note(schema: dict[str, Any], note: str) -> dict[str, Any]:
    """A parameter's schema with its description, whose end may list its choices, as transformers reads them.

    >>> with_note({"type": "string"}, 'A drink (choices: ["tea", "water"])')
    {'type': 'string', 'enum': ['tea', 'water'], 'description': 'A drink'}
    >>> with_note({"type": "array", "items": {"type": "string"}}, 'Drinks (choices: ["tea", "water"])')
    {'type': 'array', 'items': {'type': 'string', 'enum': ['tea', 'water']}, 'description': 'Drinks'}
    """
    listed = re.search(r"\(choices:\s*(\[.*\])\)\s*$", note, re.IGNORECASE | re.DOTALL)
    choices = load_json(listed[1])[0] if listed else None
    if not isinstance(choices, list):
        return {**schema, "description": note}
    described = {"description": note[: listed.start()].strip()}
    if schema.get("type") == "array":  # each of its values is one of them
        return {**schema, "items": {**schema.get("items", {}), "enum": choices}, **described}
    return {**schema, "enum": choices, **described}


def result_schema(tool: Callable) -> dict[str, Any] | None:
    """The JSON schema of a tool's result. None if the tool has no hint for it, or if the hint has no schema."""
    hints = typing.get_type_hints(tool, include_extras=True)
    if "return" not in hints:
        return None
    if hints["return"] is ToolResult:  # the model reads its text
        return {"type": "string"}
    try:
        return json.loads(json_schema(hints["return"], "serialization"))
    except Exception:  # a class's own hooks may raise anything
        return None


CALL_FORMAT = '<tool>{"name": "tool name", "args": {"argument": "value"}}</tool>'

TYPES_THAT_WORK = (
    "str, int, float, bool, list[...], dict[str, ...], Literal[...], unions of these with |, Any, and what pydantic "
    "reads from JSON: Enum, TypedDict, dataclass, BaseModel, tuple, set, datetime"
)


class Shown(str):
    """A text that is shown in a signature without quotes."""

    __repr__ = str.__str__


LEFT_OUT = Shown("...")  # the default of an optional parameter whose schema has no default
OTHERS = "others"  # in a signature: all parameters that the schema leaves open, or whose names Python does not take


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

    Args:
        tool: A function, or an object with `name`, `schema` (the JSON schema of a function, as OpenAI's API takes it)
            and `run(**arguments)`, which may be async.

    Raises:
        ValueError: the schema describes no function.
    """
    if isinstance(tool, type) or not all(hasattr(tool, key) for key in ("name", "schema", "run")):
        return tool
    schema = tool.schema() if callable(tool.schema) else tool.schema
    try:
        function = dict(schema.get("function", schema))
        described = function.get("parameters") or {}
        check_schema(described)
        properties, required = described.get("properties", {}), described.get("required", [])
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if name in required else schema_default(each),
                annotation=hint_of(each),
            )
            for name, each in sorted(properties.items(), key=lambda item: item[0] not in required)
            if is_name(name)
        ]
        others = {name: name in required for name in properties if not is_name(name)}
        further = described.get("additionalProperties")
        further = True if further == {} else further or False  # an empty schema allows everything
        further = further if getattr(tool, "as_written", False) or takes_any(tool.run) else False
        if others or further:
            hint = hint_of(further) if further and not others else Any
            parameters.append(inspect.Parameter(OTHERS, inspect.Parameter.VAR_KEYWORD, annotation=hint))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"Tool {tool.name} has the schema {schema!r:.200}, expected that of a function, with name, description "
            f"and parameters: {error}."
        ) from None

    def call(**arguments: Any) -> Any:
        return tool.run(**arguments)

    async def call_async(**arguments: Any) -> Any:
        return await tool.run(**arguments)

    made = call_async if inspect.iscoroutinefunction(tool.run) else call
    notes = {name: each.get("description") for name, each in properties.items() if isinstance(each, dict)}
    notes = [f"    {name}: {note}" for name, note in notes.items() if note]
    made.__name__, made.__qualname__ = tool.name, tool.name
    made.__doc__ = "\n".join([function.get("description", ""), *(["", "Args:", *notes] if notes else [])])
    made.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    made.__signature__ = inspect.Signature(parameters, return_annotation=returned_by(tool.run))
    made.json_schema = {**function, "name": tool.name}
    made.others, made.takes_further = others, bool(further)
    return made


def as_method(name: str, schema: dict[str, Any], run: Callable) -> Callable:
    """Convert a tool to an async method of an environment, which passes a call's arguments as the model wrote them.

    Args:
        name: The tool's.
        schema: The JSON schema of a function, as in `as_tool`.
        run: Called as `await run(environment, name, arguments)`. It returns a `ToolResult`.

    Raises:
        ValueError: the schema describes no function.
    """

    async def method(self: Any, **arguments: Any) -> ToolResult:
        return await run(self, name, arguments)

    described = as_tool(types.SimpleNamespace(name=name, schema=schema, run=run, as_written=True))
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__name__, method.__qualname__, method.__doc__ = name, name, described.__doc__
    method.__annotations__ = dict(described.__annotations__)
    method.__signature__ = inspect.signature(described).replace(
        parameters=[own, *inspect.signature(described).parameters.values()], return_annotation=ToolResult
    )
    method.json_schema, method.others = described.json_schema, described.others
    method.takes_further = described.takes_further
    method.as_written = True  # who runs it reads the arguments itself
    return method


def takes_any(run: Callable) -> bool:
    """Whether a callable takes keyword arguments of any name."""
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(run).parameters.values())


def returned_by(run: Callable) -> Any:
    """The type of a callable's result, or its text without quotes if the names in it are unknown."""
    try:
        return typing.get_type_hints(run).get("return", inspect.Signature.empty)
    except (NameError, TypeError):  # a name for type checkers alone; a partial, or an object with `__call__`
        returned = inspect.signature(run).return_annotation
        return Shown(returned) if isinstance(returned, str) else returned


def schema_default(schema: Any) -> Any:
    """The default that a JSON schema gives an optional parameter."""
    return schema.get("default", LEFT_OUT) if isinstance(schema, dict) else LEFT_OUT


def is_name(name: str) -> bool:
    """Whether a text can be the name of a Python parameter, unlike `from` or `user-id`."""
    return name.isidentifier() and not keyword.iskeyword(name) and name != OTHERS


def check_others(tool: Callable, signature: inspect.Signature, arguments: dict[str, Any]) -> None:
    """Raise `TypeError` for unknown or missing arguments of a tool with names that Python does not take."""
    if others := getattr(tool, "others", None):
        unknown = [name for name in arguments if name not in signature.parameters and name not in others]
        unknown = [] if getattr(tool, "takes_further", False) else unknown
        missing = [name for name, required in others.items() if required and name not in arguments]
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
        if missing:
            raise TypeError(f"missing a required argument: {missing[0]!r}")


def hint_of(schema: dict[str, Any]) -> Any:
    """The Python type of a parameter that a JSON schema describes, `Any` if there is none.

    >>> hint_of({"type": "array", "items": {"enum": ["a", "b"]}})
    list[typing.Literal['a', 'b']]
    >>> hint_of({"anyOf": [{"type": "integer"}, {"type": "null"}]}), hint_of({"$ref": "#/x"})
    (int | None, typing.Any)
    """
    if not isinstance(schema, dict):  # `true` allows everything
        return Any
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


def check_tool(tool: Callable) -> None:
    """Raise `ValueError` unless the tool is a function with name, type hints and docstring: the model reads them."""
    name = getattr(tool, "__name__", None)
    if isinstance(tool, type):
        raise ValueError(f"Tool {name} is a class. List its functions, or set ENVIRONMENT to it to use its methods.")
    if not callable(tool) or not name or name == "<lambda>":
        raise ValueError(
            f"A tool must be a named function, got {tool!r:.100}. Write `def` with a name and a docstring."
        )
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
        check_parameter(name, parameter, hints)


def check_parameter(tool: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> None:
    """Raise `ValueError` for a parameter that no call can pass, since a call is a JSON object of named arguments."""
    name = parameter.name
    if name not in hints and name == "self":
        raise ValueError(f"Tool {tool} is a method without its object. List it as `MyClass().{tool}`.")
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
        kind = f"*{name}" if parameter.kind is parameter.VAR_POSITIONAL else f"the positional-only {name!r}"
        raise ValueError(f"Tool {tool} has {kind}. Calls name their arguments: write `{name}: ...` without * and /.")
    if name not in hints:
        raise ValueError(f"Tool {tool} has no type hint for {name!r}. Write `{name}: str` or the like.")
    try:
        ArgumentReader(hints[name]), json_schema(hints[name])
    except Exception as error:  # a class's own hooks may raise anything
        known = getattr(error, "code", None) in ("schema-for-unknown-type", "invalid-for-json-schema")
        reason = "" if known else f" ({getattr(error, 'message', error_text(error)).rstrip('.')})"
        raise ValueError(
            f"Tool {tool}: parameter {name!r} has the type {type_name(hints[name])}, which JSON cannot "
            f"represent{reason}. Supported types: {TYPES_THAT_WORK}."
        ) from None
    if re.search(ADDRESS, repr(parameter.default)):
        raise ValueError(
            f"Tool {tool}: the default of {name!r} is {parameter.default!r}. The model would read its address, which "
            "differs between processes. Use None as default, and create the object inside the tool."
        )


def describe_tools(tools: dict[str, Callable], tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Describe tools for the system prompt: signatures, docstrings, and JSON schemas of types that JSON lacks.

    With a tokenizer the texts are made free of control tokens, and a name that holds one raises `ValueError`.
    """
    described = []
    for name, tool in tools.items():
        text = "\n".join([f"{name}{signature_of(tool)}", *schema_lines(tool), inspect.getdoc(tool)])
        if tokenizer is not None:
            forbidden = forbidden_in(Origin.OUTSIDE, "tool", tokenizer)
            check_names([name, *inspect.signature(tool).parameters, *getattr(tool, "others", ())], forbidden)
            text = neutralise(text, tokenizer, forbidden)
        described.append(text)
    return "\n\n".join(described)


def schema_lines(tool: Callable) -> list[str]:
    return [f"{name}: {json_schema(reader.hint)}" for name, reader in readers_of(tool)[0].items() if not reader.plain]


def fill_in_tools(
    system_prompt: str, tools: dict[str, Callable], tokenizer: PreTrainedTokenizerBase | None = None
) -> str:
    """Replace `{tool_descriptions}` in the system prompt. Raises `ValueError` for any other single brace.

    The prompt's own text stays as it is. With a tokenizer the texts of the tools are free of control tokens.
    """
    described = describe_tools(tools, tokenizer)
    try:
        return system_prompt.format(tool_descriptions=described)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"system_prompt has a placeholder or brace that is not {{tool_descriptions}} ({error!r}). "
            "Write literal braces twice: {{ and }}."
        ) from None


@cached_by_function
def signature_of(tool: Callable) -> inspect.Signature:
    """A tool's signature for the model: types that JSON lacks are shown by name, and defaults as JSON."""
    signature, hints = inspect.signature(tool), hints_of(tool)

    def shown_type(hint: Any) -> Any:
        return None if hint is type(None) else hint if is_json_type(hint) else Shown(type_name(hint))

    def shown(parameter: inspect.Parameter) -> inspect.Parameter:
        hint, default = hints.get(parameter.name, Any), parameter.default
        if not is_json_type(hint) and default is not parameter.empty and default is not None:
            default = Shown(default_text(default))
        return parameter.replace(annotation=shown_type(hint), default=default)

    returned = hints.get("return", signature.return_annotation)
    returned = str if returned is ToolResult else returned
    return signature.replace(
        parameters=[shown(parameter) for parameter in signature.parameters.values()],
        return_annotation=returned if returned is signature.empty else shown_type(returned),
    )


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
    tool, arguments = tools[call.name], {}
    signature = signature_of(tool)
    try:
        signature.bind(**call.arguments)
        check_others(tool, signature, call.arguments)
    except TypeError as error:
        return {}, f"{error}. Usage: {call.name}{signature}"
    given = copy.deepcopy(call.arguments)  # a tool may change what it gets, and the call stays what was written
    if getattr(tool, "as_written", False):
        return given, None
    for name, value in given.items():
        try:
            arguments[name] = read_argument(tool, name, value)
        except (Exception, SystemExit) as error:  # a validator may raise anything
            readers, rest = readers_of(tool)
            mistake = argument_mistake(readers.get(name) or rest, name, value, error)
            return {}, f"{mistake}. Usage: {call.name}{signature}"
    # A tool's process reads JSON, and makes its own objects of it.
    return (given if hasattr(tool, "prepare") else arguments), None


MOST_LEVELS = 64  # of schemas inside schemas, which are read by functions that call themselves


def check_schema(schema: Any) -> None:
    """Raise `ValueError` unless a value is a JSON schema that calls can be parsed with.

    >>> check_schema({"properties": {"a": {"anyOf": [True, {"type": ["integer", "null"]}]}}})
    >>> check_schema({"properties": {"a": {"type": 5}}})
    Traceback (most recent call last):
    ValueError: got a schema of type 5, expected the name of a type, or names
    """
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        each, level = waiting.pop()
        if isinstance(each, bool):
            continue
        if level > MOST_LEVELS:
            raise ValueError(f"got schemas inside schemas on more than {MOST_LEVELS} levels, expected fewer")
        expect(each, dict, "schemas that are objects")
        kinds = each.get("type", [])
        if not all(isinstance(kind, str) for kind in (kinds if isinstance(kinds, list) else [kinds])):
            raise ValueError(f"got a schema of type {kinds!r:.100}, expected the name of a type, or names")
        expect(each.get("enum", []), list, "an enum that is a list")
        inner = [each[key] for key in ("items", "additionalProperties") if isinstance(each.get(key), dict)]
        for key in ("anyOf", "oneOf", "allOf"):
            inner += expect(each.get(key, []), list, f"{key} that is a list of schemas")
        for key in ("properties", "$defs"):
            inner += expect(each.get(key) or {}, dict, f"{key} that are an object").values()
        waiting += [(one, level + 1) for one in inner]


def expect(value: Any, kind: type, expected: str) -> Any:
    """Return a value of this type. Raises `ValueError` for another type."""
    if not isinstance(value, kind):
        raise ValueError(f"got {value!r:.100}, expected {expected}")
    return value
