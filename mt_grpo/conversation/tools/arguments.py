"""A tool's parameters as types and as the JSON schema that the model reads, and its arguments checked by pydantic."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import json
import re
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticKnownError, SchemaValidator, ValidationError, core_schema, to_jsonable_python

from mt_grpo.base.errors import error_line
from mt_grpo.conversation.tools.results import ADDRESS, json_form

UNIONS = (typing.Union, types.UnionType)


def strict_schema(schema: Any) -> Any:
    """pydantic's core schema without lazy iterators. Its Literals and Enums do not take `True` or 1.0 for 1."""
    if type(schema) in (list, tuple):
        return type(schema)(map(strict_schema, schema))
    if type(schema) is not dict:
        return schema
    kind = schema.get("type")
    schema = {key: part if (kind, key) == ("default",) * 2 else strict_schema(part) for key, part in schema.items()}
    if kind == "model" and "'type': 'generator'" in str(schema):  # pydantic has compiled it already
        raise TypeError("a field is Iterable, whose items would be checked too late. Write list[...]")
    if kind == "generator":
        return {**schema, "type": "list"}
    if kind not in ("literal", "enum"):
        return schema
    members = schema["expected" if kind == "literal" else "members"]
    options = [getattr(member, "value", member) for member in members]
    if all(type(option) is str for option in (members if kind == "literal" else options)):
        return schema

    def member_of(value: Any) -> Any:
        for member, option in zip(members, options):
            if option == value and (type(option), type(value)) in ((type(value),) * 2, (float, int)):
                return member if kind == "literal" else value
        if kind == "literal" or value in options:
            raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, options))})
        return value  # pydantic says what is wrong, or the Enum's `_missing_` finds a member

    return core_schema.no_info_before_validator_function(member_of, schema)


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
    if origin in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        return not options or (options[0] in (str, Any) and is_json_type(options[1]))
    lists = (list, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Iterable)
    if origin in (*lists, *UNIONS):
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
    if origin and not is_json_type(expected):
        if origin is Literal:  # a member of an Enum by its value, which is what one writes
            names = [repr(getattr(option, "value", option)) for option in options]
        else:
            names = [type_name(option) for option in options]
        return " | ".join(names) if origin in UNIONS else f"{type_name(origin)}[{', '.join(names)}]"
    if expected in (type(None), ...):
        return "..." if expected is ... else "None"
    name = None if origin else getattr(expected, "__name__", None)
    return name or str(expected).replace("typing.", "")


class ArgumentReader:
    """Reads the arguments of one parameter. Raises pydantic's `ValidationError`, or the error of a validator."""

    def __init__(self, hint: Any):
        self.hint, self.plain = hint, is_json_type(hint)
        self.validator = SchemaValidator(strict_schema(TypeAdapter(hint).core_schema))

    def read(self, value: Any) -> Any:
        if self.plain:  # 7 stays an int where a float is expected
            self.validator.validate_python(value, strict=True)
            return value
        return self.validator.validate_json(json.dumps(value), strict=True)


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
        if parameter.default is None and name in hints and not takes_none(hints[name]):
            hints[name] = typing.Union[hints[name], None]  # noqa: UP007 (not all hints have `|`)
    return hints


@cached_by_function
def readers_of(tool: Callable) -> tuple[dict[str, ArgumentReader], ArgumentReader | None]:
    """(a reader per parameter of a tool, the reader of `**rest` for any other name or None)."""
    hints, parameters = hints_of(tool), inspect.signature(tool).parameters.values()
    readers = {p.name: ArgumentReader(hints.get(p.name, Any)) for p in parameters}
    return readers, next((readers[p.name] for p in parameters if p.kind is p.VAR_KEYWORD), None)


def read_argument(tool: Callable, name: str, value: Any) -> Any:
    """An argument as its parameter's type. A value of a JSON type is returned unchanged."""
    readers, rest = readers_of(tool)
    return (readers.get(name) or rest).read(value)


def argument_mistake(tool: Callable, name: str, value: Any, error: BaseException) -> str:
    """The error of an argument for the policy: its type, the place of the mistake, and pydantic's words."""
    readers, rest = readers_of(tool)
    reader = readers.get(name) or rest
    expected = type_name(reader.hint)
    if not isinstance(error, ValidationError):
        return f"argument {name!r} must be {expected}, whose check raised {re.sub(ADDRESS, '', error_line(error))}"
    # The option of a union that fits best is the one whose error is deepest inside the value.
    wrong = max(error.errors(include_url=False, include_context=False), key=lambda wrong: len(wrong["loc"]))
    part, where = value, ""
    for key in wrong["loc"]:  # a key that is not in the value names an option of a union
        if key in part if isinstance(part, dict) else isinstance(part, list) and key in range(len(part)):
            part, where = part[key], f"{where}[{key!r}]"
    missing = wrong["type"].startswith("missing")
    if missing:
        where += f"[{wrong['loc'][-1]!r}]"
    by_value = "Literal[" in expected if reader.plain else not wrong["type"].endswith("_type")
    got = "nothing" if missing else repr(part)[:80] if by_value else type(part).__name__
    words = "" if reader.plain else f": {re.sub(ADDRESS, '', wrong['msg']).rstrip('.')}"
    return f"argument {name!r} must be {expected}, got {got}{where and f' at {name}{where}'}{words}"


def default_form(value: Any) -> Any:
    """A part of a default one step towards JSON, with its sets sorted: their order differs between processes."""
    if isinstance(value, BaseModel):
        return value.model_dump(warnings=False)
    ordered = isinstance(value, (set, frozenset)) or dataclasses.is_dataclass(value)
    return json_form(value) if ordered else to_jsonable_python(value, fallback=repr)


def default_text(default: Any) -> str:
    """A parameter's default as the model would write it."""
    return json.dumps(default, default=default_form, ensure_ascii=False)


class ParameterSchema(GenerateJsonSchema):
    """A JSON schema whose defaults are the same in every process, and whose numbers as text are numbers."""

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> dict[str, Any]:
        text = {"type": "string", "pattern": r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"}
        options = super().decimal_schema(schema)["anyOf"]
        return {"anyOf": [text if each.get("type") == "string" else each for each in options]}

    def encode_default(self, dft: Any) -> Any:
        return json.loads(default_text(dft))


def written_out(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without titles, with its definitions in place of the references to them.

    Few chat templates follow a reference. A class that contains itself stays a definition.
    """
    definitions = schema.get("$defs", {})
    inside = {name: set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(each))) for name, each in definitions.items()}
    for _ in inside:
        inside = {name: names.union(*(inside[each] for each in names)) for name, names in inside.items()}

    def walk(part: Any) -> Any:
        if isinstance(part, list):
            return [walk(each) for each in part]
        if not isinstance(part, dict):
            return part
        name = str(part.get("$ref", "")).removeprefix("#/$defs/")
        if name in definitions and name not in inside[name]:
            return walk({**definitions[name], **{key: each for key, each in part.items() if key != "$ref"}})
        written = {}
        for key, each in part.items():
            if key in ("const", "default", "enum", "examples"):
                written[key] = each
            elif key == "properties":
                written[key] = {name: walk(one) for name, one in each.items()}
            elif key not in ("title", "$defs") and not (key == "mapping" and "propertyName" in part):
                written[key] = walk(each)
        return written

    kept = {name: walk(each) for name, each in definitions.items() if name in inside[name]}
    return {**walk(schema), **({"$defs": kept} if kept else {})}


def json_schema(hint: Any, mode: Literal["validation", "serialization"] = "validation") -> dict[str, Any]:
    """The JSON schema of a type. Raises pydantic's errors for one that JSON cannot hold."""
    return written_out(TypeAdapter(hint).json_schema(mode=mode, schema_generator=ParameterSchema))


@cached_by_function
def parameters_schema(tool: Callable) -> dict[str, Any]:
    """The JSON schema of all parameters of a tool, as one object. It allows what `read_argument` reads."""
    parameters = inspect.signature(tool).parameters
    hints = [(name, "validation", TypeAdapter(reader.hint)) for name, reader in readers_of(tool)[0].items()]
    found, shared = TypeAdapter.json_schemas(hints, schema_generator=ParameterSchema)
    properties: dict[str, Any] = {}
    written: dict[str, Any] = {"type": "object", "properties": properties, "$defs": shared.get("$defs", {})}
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            written["additionalProperties"] = found[name, "validation"]
            continue
        properties[name] = dict(found[name, "validation"])
        if parameter.default is not parameter.empty:
            properties[name]["default"] = json.loads(default_text(parameter.default))
    if required := [name for name in properties if parameters[name].default is inspect.Parameter.empty]:
        written["required"] = required
    return written_out(written)
