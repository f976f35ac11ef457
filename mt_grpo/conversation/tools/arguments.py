"""Converts a call's arguments, which are JSON, to the types of the tool's parameters, with pydantic."""

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


def strict_schema(schema: Any, in_model: bool = False) -> Any:
    """pydantic's core schema without lazy iterators. Its Literals and Enums do not take `True` or 1.0 for 1.

    A model's own schema stays: pydantic has compiled it already. Raises `TypeError` for an iterator in it.
    """
    if type(schema) in (list, tuple):
        return type(schema)(strict_schema(part, in_model) for part in schema)
    if type(schema) is not dict:
        return schema
    kind, in_model = schema.get("type"), in_model or schema.get("type") in ("model", "dataclass")
    schema = {
        key: part if kind == "default" and key == "default" else strict_schema(part, in_model)
        for key, part in schema.items()
    }
    if kind == "generator":
        if in_model:
            raise TypeError("a field is Iterable, whose items would be checked too late. Write list[...]")
        return {**schema, "type": "list"}
    if in_model or kind not in ("literal", "enum"):
        return schema
    members = schema["expected" if kind == "literal" else "members"]
    options = [getattr(member, "value", member) for member in members]
    if all(type(option) is str for option in (members if kind == "literal" else options)):
        return schema

    def check_type(value: Any) -> Any:
        equal = [(member, type(option)) for member, option in zip(members, options) if option == value]
        for member, of_type in equal:
            if of_type is type(value) or (of_type, type(value)) == (float, int):
                return member if kind == "literal" else value
        if equal or kind == "literal":
            raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, options))})
        return value  # pydantic says what is wrong, or the Enum's `_missing_` finds a member

    return core_schema.no_info_before_validator_function(check_type, schema)


def is_json_type(expected: Any) -> bool:
    """Whether a type is one of JSON's own. Such arguments are passed unchanged, and the type's name is shown.

    >>> [is_json_type(t) for t in (int, list[dict[str, float]], str | None, typing.Annotated[int, "how many"])]
    [True, True, True, True]
    >>> [is_json_type(t) for t in (bytes | None, tuple, dict[int, str], re.RegexFlag)]
    [False, False, False, False]
    """
    origin, options = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin is typing.Annotated:
        return is_json_type(options[0]) and all(isinstance(note, str) for note in options[1:])
    if origin is typing.Literal:
        return all(type(option) in (str, int, bool, type(None)) for option in options)
    if origin in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        return not options or (options[0] in (str, Any) and is_json_type(options[1]))
    lists = (list, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Iterable)
    if origin in (*lists, typing.Union, types.UnionType):
        return all(is_json_type(option) for option in options)
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
        if origin is typing.Literal:  # a member of an Enum by its value, which is what one writes
            names = [repr(getattr(option, "value", option)) for option in options]
        else:
            names = [type_name(option) for option in options]
        union = origin in (typing.Union, types.UnionType)
        return " | ".join(names) if union else f"{type_name(origin)}[{', '.join(names)}]"
    if expected in (type(None), ...):
        return "..." if expected is ... else "None"
    if origin is None and hasattr(expected, "__name__"):
        return expected.__name__
    return str(expected).replace("typing.", "")


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
    of_functions, of_methods = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def wrapper(tool: Callable) -> Any:
        key, cache = (tool.__func__, of_methods) if inspect.ismethod(tool) else (tool, of_functions)
        if key not in cache:
            cache[key] = function(tool)
        return cache[key]

    return wrapper


def takes_none(hint: Any) -> bool:
    """Whether a type allows None."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return takes_none(options[0])
    if origin is typing.Literal:
        return None in options
    if origin in (typing.Union, types.UnionType):
        return any(map(takes_none, options))
    return hint in (Any, object, None, type(None))


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
    hints = hints_of(tool)
    parameters = inspect.signature(tool).parameters.values()
    readers = {p.name: ArgumentReader(hints.get(p.name, Any)) for p in parameters}
    return readers, next((readers[p.name] for p in parameters if p.kind is p.VAR_KEYWORD), None)


def read_argument(tool: Callable, name: str, value: Any) -> Any:
    """An argument as its parameter's type. A value of a JSON type is returned unchanged."""
    readers, rest = readers_of(tool)
    return (readers.get(name) or rest).read(value)


# INVARIANT: these functions also run in a tool's process, and use only the imports of this source. The import of
# pydantic takes tenths of a second. A process whose tools have JSON types alone does without it: the trainer's process
# has checked its arguments.
PLAIN_SOURCE = """
def readers_of(tool): pass
def read_argument(tool, name, value): return value
"""
ARGUMENTS_SOURCE = "\n".join(
    [
        "import collections.abc, functools, inspect, json, types, typing, weakref",
        "from collections.abc import Callable",
        "from pydantic import TypeAdapter",
        "from pydantic_core import PydanticKnownError, SchemaValidator, core_schema",
        *map(
            inspect.getsource,
            (
                is_json_type,
                takes_none,
                hints_of,
                strict_schema,
                ArgumentReader,
                cached_by_function,
                readers_of,
                read_argument,
            ),  # fmt: skip
        ),
    ]
)


def arguments_source(tools: list[Callable]) -> str:
    """The source with which the process of these tools reads arguments."""
    typed = any(not reader.plain for tool in tools for reader in readers_of(tool)[0].values())
    return ARGUMENTS_SOURCE if typed else PLAIN_SOURCE


def without_links(text: str) -> str:
    """The text of a validator without addresses and pydantic's links."""
    return re.sub(rf"{ADDRESS}|\s+For further information visit \S+", "", text).rstrip(".")


def argument_mistake(reader: ArgumentReader, name: str, value: Any, error: BaseException) -> str:
    """The error text for an argument that `reader` rejects, for the policy: type, place and pydantic's message."""
    expected = type_name(reader.hint)
    if not isinstance(error, ValidationError):
        words = without_links(error_line(error))
        return f"argument {name!r} must be {expected}, whose check raised {words}"
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
    words = "" if reader.plain else f": {without_links(wrong['msg'])}"
    return f"argument {name!r} must be {expected}, got {got}{where and f' at {name}{where}'}{words}"


def in_one_order(default: Any) -> Any:
    """A default with its sets as sorted lists: the order of a set differs from process to process."""
    if isinstance(default, BaseModel):
        default = default.model_dump(warnings=False)
    if dataclasses.is_dataclass(default):
        default = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    if isinstance(default, dict):
        return {key: in_one_order(part) for key, part in default.items()}
    if isinstance(default, (list, tuple)):
        return [in_one_order(part) for part in default]
    return json_form(default) if isinstance(default, (set, frozenset)) else default


def default_text(default: Any) -> str:
    """A parameter's default as the model would write it."""
    data = to_jsonable_python(in_one_order(default), fallback=repr)
    return json.dumps(data, ensure_ascii=False)


class ParameterSchema(GenerateJsonSchema):
    """The JSON schema that the model reads. It is the same in every process, and holds nothing that JSON cannot be."""

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> dict[str, Any]:
        return self.handle_invalid_for_json_schema(schema, "type[...]")

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> dict[str, Any]:
        """A number, or a text that is one: pydantic's own schema would allow any text."""
        written = super().decimal_schema(schema)
        text = {"type": "string", "pattern": r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"}
        return {"anyOf": [text if each.get("type") == "string" else each for each in written["anyOf"]]}

    def encode_default(self, dft: Any) -> Any:
        return super().encode_default(in_one_order(dft))


def without_titles(schema: Any) -> Any:
    """A JSON schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    data, named = ("const", "default", "enum", "examples"), ("properties", "$defs")
    return {
        key: part
        if key in data
        else {name: without_titles(each) for name, each in part.items()}
        if key in named
        else without_titles(part)
        for key, part in schema.items()
        if key != "title"
    }


def without_modules(text: str) -> str:
    """A schema's text without the modules of a recipe's files, whose names hold the hash of a folder.

    pydantic writes modules where two classes have the same name.
    """
    return re.sub(r"mt_grpo_[\w-]+?_[0-9a-f]{8}__", "", text)


def json_schema(hint: Any, mode: Literal["validation", "serialization"] = "validation") -> str:
    """The compact JSON schema of a type. Raises pydantic's errors for one that JSON cannot hold."""
    schema = TypeAdapter(hint).json_schema(mode=mode, schema_generator=ParameterSchema)
    return without_modules(json.dumps(without_titles(schema), ensure_ascii=False))


@cached_by_function
def parameters_schema(tool: Callable) -> dict[str, Any]:
    """The JSON schema of all parameters of a tool, as one object. It allows what `read_argument` reads.

    Classes are written out where they are used, since few chat templates follow a reference. A class that contains
    itself stays a definition.
    """
    parameters = {p.name: p for p in inspect.signature(tool).parameters.values()}
    hints = [(name, "validation", TypeAdapter(reader.hint)) for name, reader in readers_of(tool)[0].items()]
    found, shared = TypeAdapter.json_schemas(hints, schema_generator=ParameterSchema)
    found = {name: without_titles(schema) for (name, _), schema in found.items()}
    shared = {name: without_titles(schema) for name, schema in shared.get("$defs", {}).items()}
    properties: dict[str, Any] = {}
    written: dict[str, Any] = {"type": "object", "properties": properties}
    for name, parameter in parameters.items():
        schema = found[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            written["additionalProperties"] = schema
            continue
        default = parameter.default
        shown = {} if default is parameter.empty else {"default": json.loads(default_text(default))}
        properties[name] = {**schema, **shown}
    if required := [name for name, each in parameters.items() if each.default is each.empty and name in properties]:
        written["required"] = required
    return json.loads(without_modules(json.dumps(inlined(written, shared))))


def inlined(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A schema with its definitions in place of the references. One that contains itself stays in `$defs`."""
    left: dict[str, Any] = {}

    def written(part: Any) -> Any:
        if isinstance(part, list):
            return [written(each) for each in part]
        if not isinstance(part, dict):
            return part
        name = str(part.get("$ref", "")).removeprefix("#/$defs/")
        if name not in definitions:
            part = {key: written(each) for key, each in part.items()}
            if isinstance(discriminator := part.get("discriminator"), dict):
                discriminator.pop("mapping", None)  # it refers to definitions
            return part
        if not holds_itself(name):
            return written({**definitions[name], **{key: each for key, each in part.items() if key != "$ref"}})
        if name not in left:
            left[name] = {}  # its own parts may refer to it
            left[name] = written(definitions[name])
        return part

    def holds_itself(name: str) -> bool:
        reached, waiting = set(), [name]
        while waiting:
            text = json.dumps(definitions[waiting.pop()])
            further = set(re.findall(r'"\$ref": "#/\$defs/([^"]+)"', text)) & definitions.keys()
            waiting += further - reached
            reached |= further
        return name in reached

    whole = written(schema)
    return {**whole, "$defs": left} if left else whole
