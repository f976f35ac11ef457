"""One schema for every format: what it allows reaches the tool as a value of its type, and nothing else does."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import enum
import functools
import inspect
import json
import pathlib
import random
import re
import types
import typing
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from pydantic import Field
from test_formats import tokenizer_of
from transformers.utils import get_json_schema
from typing_extensions import TypedDict

from mt_grpo.conversation.formats.choose import TOOL_FORMATS, typed
from mt_grpo.conversation.tools import signature
from mt_grpo.conversation.tools.signature import check_schema, check_tool, read_call, signature_of, tool_schema
from mt_grpo.rollout import ToolCall, ToolResult


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Size(enum.Enum):
    SMALL = "1"
    LARGE = "2"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Item(pydantic.BaseModel):
    """An item."""

    sku: str
    count: int = Field(ge=1)
    size: Size | None = None


class Point(TypedDict):
    x: int
    unit: Unit


@dataclasses.dataclass
class Line:
    start: Point
    label: str = ""


class Tree(pydantic.BaseModel):
    name: str
    parts: list[Tree] = []


def weather(
    city: str, unit: Unit, day: datetime.date, size: Size = Size.LARGE,
    items: list[Item] = (), limit: int = None, at: Point | None = None, **more: Level,
) -> str:  # fmt: skip
    """The weather of a city.

    Args:
        city: Its name.
        unit: Of temperature.
        day: The day,
            in local time.
        size: Of the picture.
        items: To take along.
        limit: Of lines.
        at: A point.
        more: Levels.

    Returns:
        A text.
    """


ITEM = {
    "description": "An item.", "type": "object", "required": ["sku", "count"],
    "properties": {
        "sku": {"type": "string"}, "count": {"type": "integer", "minimum": 1},
        "size": {"anyOf": [{"type": "string", "enum": ["1", "2"]}, {"type": "null"}], "default": None},
    },
}  # fmt: skip
POINT = {
    "type": "object", "required": ["x", "unit"],
    "properties": {"x": {"type": "integer"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
}  # fmt: skip
WEATHER = {
    "type": "object", "required": ["city", "unit", "day"],
    "properties": {
        "city": {"type": "string", "description": "Its name."},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Of temperature."},
        "day": {"type": "string", "format": "date", "description": "The day, in local time."},
        "size": {"type": "string", "enum": ["1", "2"], "default": "2", "description": "Of the picture."},
        "items": {"type": "array", "items": ITEM, "default": [], "description": "To take along."},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "description": "Of lines."},
        "at": {"anyOf": [POINT, {"type": "null"}], "default": None, "description": "A point."},
    },
    "additionalProperties": {"type": "integer", "enum": [1, 2]},
}  # fmt: skip


@pytest.mark.parametrize("name, template", [("hermes", "qwen3"), ("native", "qwen3_5_think"), ("native", "gptoss")])
def test_the_schema_that_a_chat_template_gets(name, template):
    (schema,) = TOOL_FORMATS[name](tokenizer_of(template)).prompt([], {"weather": weather})["tools"]
    function = schema["function"]
    assert schema["type"] == "function"
    assert function == {
        "name": "weather", "description": "The weather of a city.", "parameters": WEATHER,
        "return": {"type": "string", "description": "A text."},
    }  # fmt: skip


def test_the_schema_of_the_prompt_of_xml_is_the_same():
    """The signature is made of it. There each type that JSON does not have has a line."""
    lines = dict(line.split(": ", 1) for line in signature.describe_tools({"weather": weather}).splitlines()[1:7])
    assert json.loads(lines["unit"]) == {"type": "string", "enum": ["celsius", "fahrenheit"]}
    assert json.loads(lines["items"]) == {"type": "array", "items": ITEM}
    assert list(lines) == ["unit", "day", "size", "items", "at", "more"]

    def said() -> ToolResult | str:
        """Says."""

    assert signature_of(said) == "() -> str"  # what the model reads of it
    assert signature_of(weather) == (
        "(city: str, unit: Literal['celsius', 'fahrenheit'], day: str, size: Literal['1', '2'] = '2', items: list["
        "dict[str, Any]] = [], limit: int | None = None, at: dict[str, Any] | None = None, **others: Literal[1, 2])"
        " -> str"
    )


def plain(
    a: int, b: str = "x", c: list[float] | None = None, d: Literal["p", "q"] = "p", e: dict[str, bool] = None
) -> str:
    """Adds.

    Args:
        a: A number.
        b: A drink.
        c: Some.
        d: One.
        e: Which.
    """


def test_a_tool_of_plain_types_reads_as_transformers_shows_it():
    """So that models that know such prompts read the same; but null is allowed where it is, and defaults are shown."""
    theirs = get_json_schema(plain)
    ours = tool_schema("plain", plain)
    for parameter, default in (("b", "x"), ("c", None), ("d", "p"), ("e", None)):
        assert ours["function"]["parameters"]["properties"][parameter].pop("default") == default
    null = {"c": {"type": "array", "items": {"type": "number"}},
            "e": {"type": "object", "additionalProperties": {"type": "boolean"}}}  # fmt: skip
    for parameter, without in null.items():
        assert ours["function"]["parameters"]["properties"][parameter]["anyOf"] == [without, {"type": "null"}]
        for schema in (ours, theirs):
            del schema["function"]["parameters"]["properties"][parameter]
    assert ours == theirs
    assert json.dumps(tool_schema("one", one)) == json.dumps(get_json_schema(one))  # in the same order


def parameters_of(tool):
    return tool_schema("tool", tool)["function"]["parameters"]


def one(expression: str) -> str:
    """Evaluates.

    Args:
        expression: What to evaluate.
    """


def test_a_docstring_of_another_style_is_shown_and_a_generator_is_no_tool():
    def find(city: str, day: datetime.date) -> ToolResult:
        """Find things.

        :param city: Where.
        """

    assert tool_schema("find", find)["function"] == {
        "name": "find", "description": "Find things.\n\n:param city: Where.",
        "parameters": {"type": "object", "required": ["city", "day"], "properties": {
            "city": {"type": "string"}, "day": {"type": "string", "format": "date"}}},
        "return": {"type": "string"},
    }  # fmt: skip

    def pages(query: str):
        """Search."""
        yield query

    with pytest.raises(ValueError, match="Tool pages is a generator function"):
        check_tool(pages)


class Book(pydantic.BaseModel):
    title: str
    default: int = 3
    about: dict[str, str] = {"title": "none"}
    tags: set[str] = {"b", "d", "a", "c"}


def test_classes_in_a_schema():
    def order(book: Book) -> str:
        """Orders."""

    assert parameters_of(order)["properties"]["book"] == {
        "type": "object", "required": ["title"],
        "properties": {
            "title": {"type": "string"}, "default": {"type": "integer", "default": 3},
            "about": {"type": "object", "additionalProperties": {"type": "string"}, "default": {"title": "none"}},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "default": [*"abcd"]},
        },
    }  # fmt: skip

    def plant(tree: Tree, second: Tree | None = None) -> Tree:
        """Plants."""

    schema = parameters_of(plant)
    node = {"type": "object", "required": ["name"], "properties": {
        "name": {"type": "string"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "default": []}}}  # fmt: skip
    assert schema == {
        "type": "object", "required": ["tree"], "$defs": {"Tree": node},
        "properties": {"tree": node, "second": {"anyOf": [node, {"type": "null"}], "default": None}},
    }  # fmt: skip
    jsonschema.Draft202012Validator.check_schema(schema)


def test_null_where_the_default_is_none():
    """Its default is shown as None, so the model may write null. A tool's own schema says itself what may be."""

    def find(city: str, limit: int = None) -> str:
        """Finds."""

    given = {"city": "x", "limit": None}
    assert read_call(ToolCall("find", given), {"find": find}) == (given, None)
    arguments, mistake = read_call(ToolCall("find", {"city": None}), {"find": find})
    assert arguments == {} and mistake.startswith("argument 'city' must be str, got None: ")
    _, mistake = read_call(ToolCall("find", {"city": "x", "limit": "3"}), {"find": find})
    assert mistake.startswith("argument 'limit' must be int | None, got '3'")

    def tool(x: Annotated[str | None, Field(description="the x")] = None, y: dict[str, Any] = None, z: Any = None):
        """Takes."""

    assert list(parameters_of(tool)["properties"].values()) == [  # a type that takes null is not written twice
        {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "the x", "default": None},
        {"anyOf": [{"type": "object", "additionalProperties": True}, {"type": "null"}], "default": None},
        {"default": None},
    ]
    assert signature_of(tool) == "(x: str | None = None, y: dict[str, Any] | None = None, z: Any = None) -> str"


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    "text, schema, value",
    [
        ("75001", {"type": "string"}, "75001"), ("75001", OPTIONAL, "75001"), ("75001", {"type": "integer"}, 75001),
        ("75001", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "75001"),
        ("75001", {"type": ["integer", "string"]}, "75001"), ("75001", {}, 75001), ("a b", {}, "a b"),
        ("1", {"enum": ["1", "2"]}, "1"), ("1", {"enum": ["1", 1]}, "1"), ("1", {"enum": ["a", 1]}, 1),
        ("3", {"enum": ["1", "2"]}, "3"), ("1", {"const": "1"}, "1"), ("null", OPTIONAL, None),
        ("None", OPTIONAL, None), ("null", {"type": "string"}, "null"), ("null", {"enum": ["null", None]}, None),
        ("null", {"type": "string", "nullable": True}, None), ('["a"]', {"type": ["string", "array"]}, ["a"]),
        ('["a"]', {"type": "string"}, '["a"]'),
        ('{"a": 1}', {"oneOf": [{"type": "string"}, {"type": "object"}]}, {"a": 1}),
        ("True", {"type": "boolean"}, True), ("true", {"type": "string"}, "true"), ("3.0", {"type": "integer"}, 3.0),
        ("x", {"type": "integer"}, "x"),
    ],
)  # fmt: skip
def test_values_without_quotes(text, schema, value):
    read = typed(text, schema)
    assert read == value and type(read) is type(value)


QWEN = "<tool_call>\n<function=find>\n<parameter=%s>\n%s\n</parameter>\n</function>\n</tool_call>"


def test_arguments_of_any_name_are_typed_by_a_schema_of_its_own():
    """As an agent sends it, whose tool runs elsewhere."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    tools = {"find": types.SimpleNamespace(json_schema={"name": "find", "parameters": schema})}
    syntax = TOOL_FORMATS["native"](tokenizer_of("qwen3_5_think")).syntax
    for key, value in (("n", 75001), ("zip", "75001")):
        assert syntax.split(QWEN % (key, "75001"), tools)[0] == [ToolCall("find", {key: value})]


TEXTS = ["", "a", "1", "2", "75001", "null", "None", "true", "True", "[1]", "{}", "x y", "\n", "é", "1.5", '"', "<a>"]
KEYS = ["a", "b", "x y", "1"]
DAY, MOMENT = datetime.date(2026, 2, 28), datetime.datetime(2026, 1, 3, 12, 30, tzinfo=datetime.timezone.utc)  # noqa: UP017
POINTS = [({"x": x, "unit": unit.value}, {"x": x, "unit": unit}) for x in (0, -7, 10**20) for unit in Unit]
ITEMS = [({"sku": text, "count": 3}, Item(sku=text, count=3)) for text in TEXTS]
ITEMS += [({"sku": "a", "count": 9, "size": each.value}, Item(sku="a", count=9, size=each)) for each in Size]
ITEMS += [({"sku": "1", "count": 1, "size": None}, Item(sku="1", count=1, size=None))]
LEAVES = [({"name": text, "parts": []}, Tree(name=text)) for text in TEXTS]
TREES = [*LEAVES, *(({"name": "r", "parts": [w, w]}, Tree(name="r", parts=[read, read])) for w, read in LEAVES)]


def same(*values):
    """Values that a tool gets as they are written."""
    return [(value, value) for value in values]


DRAWN = [  # (a type, JSON values that it takes with the Python values that arrive)
    (str, same(*TEXTS)),
    (Annotated[str, "short"], same(*TEXTS)),
    (int, same(0, 1, -7, 2**53, 10**20, 42)),
    (Annotated[int, Field(ge=0, le=10)], same(0, 3, 10)),
    (float, same(0.5, -1.25, 1e300, 3.0)),
    (bool, same(True, False)),
    (Literal["a", "1", "2"], same("a", "1", "2")),
    (Literal["1", "null"], same("1", "null")),
    *((kind, [(member.value, member) for member in kind]) for kind in (Unit, Size)),
    (datetime.date, [(DAY.isoformat(), DAY)]),
    (datetime.datetime, [(MOMENT.isoformat(), MOMENT)]),
    (uuid.UUID, [(str(each), each) for each in (uuid.UUID(int=5), uuid.UUID(int=2**127 + 9))]),
    (Item, ITEMS),
    (Point, POINTS),
    (Line, [({"start": w, "label": text}, Line(read, text)) for w, read in POINTS for text in TEXTS]),
    (Tree, TREES),
]


def some_type(rng, depth=0):
    """(a type, a function that draws a JSON value that it takes and the Python value that arrives)."""
    kind = rng.randrange(7) if depth <= 2 else None
    if kind not in (0, 1, 2, 3):
        hint, values = rng.choice(DRAWN)
        return hint, lambda: copy.deepcopy(rng.choice(values))
    (hint, draw), (other, draw_other) = some_type(rng, depth + 1), some_type(rng, depth + 1)

    def drawn():
        if kind == 0:
            each = [draw() for _ in range(rng.randint(0, 3))]
            return [written for written, _ in each], [read for _, read in each]
        if kind == 1:
            return (None, None) if rng.random() < 0.3 else draw()
        if kind == 2:
            each = {key: draw() for key in rng.sample(KEYS, rng.randint(0, 3))}
            return {key: pair[0] for key, pair in each.items()}, {key: pair[1] for key, pair in each.items()}
        each = [draw(), draw_other()]
        return [written for written, _ in each], tuple(read for _, read in each)

    return [list[hint], typing.Optional[hint], dict[str, hint], tuple[hint, other]][kind], drawn  # noqa: UP045


def tool_of(parameters):
    """A tool with these parameters (name -> type), which says what arrived."""

    def tool(**given):
        return given

    tool.__name__, tool.__doc__ = "tool", "Takes."
    tool.__annotations__ = dict(parameters)
    tool.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint) for name, hint in parameters.items()]
    )
    check_tool(tool)
    return tool


def read(kind, value):
    """(repr of the argument that a parameter of this type gets, what is wrong with it)."""
    arguments, mistake = read_call(ToolCall("tool", {"where": value}), {"tool": tool_of({"where": kind})})
    return repr(arguments.get("where")), mistake


@pytest.mark.parametrize(
    "kind, value, given",
    [
        (Level, 2, "<Level.HIGH: 2>"),
        (set[str], ["a", "a"], "{'a'}"),
        (dict[int, str], {"7": "a"}, "{7: 'a'}"),
        (pathlib.Path, "a/b", repr(pathlib.Path("a/b"))),
        (typing.NewType("User", int), 3, "3"),
        (bool | int, True, "True"),
        (bool | int, 1, "1"),
        (float, 7, "7"),  # what JSON itself has stays as it was read
        (float, 7.0, "7.0"),
        (Any, {"a": [1, None, 2.5]}, "{'a': [1, None, 2.5]}"),
        (object, "\ud800", "'\\ud800'"),
        (dict[str, float], {"a": float("inf")}, "{'a': inf}"),
    ],
)
def test_an_argument_becomes_what_its_parameter_is(kind, value, given):
    assert read(kind, value) == (given, None)


@pytest.mark.parametrize(
    "kind, value, mistake",
    [
        (tuple[int, str], ["1", "a"], "list[Any], got '1' at where[0]: Input should be a valid integer. "),
        (Item | list[Item], [{"sku": "x", "count": 1}, {"sku": 7, "count": 1}],
         "dict[str, Any] | list[dict[str, Any]], got 7 at where['list[Item]'][1]['sku']: "),
        (Annotated[str, pydantic.AfterValidator({"a": 1}.__getitem__)], "b", "str, got 'b': KeyError: 'b'. "),
    ],
)  # fmt: skip
def test_an_argument_that_is_not_what_its_parameter_is(kind, value, mistake):
    _, words = read(kind, value)
    assert words.startswith(f"argument 'where' must be {mistake}") and "Usage: tool(where: " in words


@pytest.mark.parametrize("kind", [types.CodeType, list[types.CodeType], Unit | types.CodeType, Callable[[], int]])
def test_a_parameter_that_no_json_fits_is_refused(kind):
    with pytest.raises(ValueError, match="Tool tool: its parameters have no JSON schema"):
        tool_of({"where": kind})


def same_value(one, other):
    """Equal, and of the same types throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    return one == other


def other_values(rng, value):
    """JSON values beside this one: of other types, and with one part changed."""
    yield from (None, True, 0, -1, 11, 3.7, "no such", "1", "", [], {}, [None], [[1]], {"a": None}, {"x": "1"})
    if isinstance(value, list):
        for k, part in enumerate(value):
            for other in other_values(rng, part):
                yield [*value[:k], other, *value[k + 1 :]]
        yield [*value, {"no": []}]
        yield value[:-1]
    if isinstance(value, dict):
        for key in value:
            for other in other_values(rng, value[key]):
                yield {**value, key: other}
            yield {k: v for k, v in value.items() if k != key}


# jsonschema's types, but of integers: JSON's 1.0 is no int here, as for TRL and verl.
DRAFT = jsonschema.Draft202012Validator
TYPES = DRAFT.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
VALIDATOR = jsonschema.validators.extend(DRAFT, type_checker=TYPES)
FORMATS = jsonschema.FormatChecker(["date", "uuid"])
# A number as text is a time in seconds to pydantic; in JSON's format it is none.
FORMATS.checks("date-time")(lambda value: not isinstance(value, str) or "T" in value or value == "1")


def allows(schema, whole, value):
    """Whether a parameter's schema allows a value, its formats included."""
    judge = VALIDATOR({**schema, "$defs": whole.get("$defs", {})}, format_checker=FORMATS)
    return judge.is_valid(value)


@pytest.mark.parametrize("seed", range(30))
def test_what_the_schema_allows_is_what_the_tool_takes(seed):
    """Random types: values that the schema allows arrive as values of the type, all others are refused."""
    rng = random.Random(seed)
    parameters = {f"p{k}": some_type(rng) for k in range(3)}
    tool = tool_of({name: hint for name, (hint, _) in parameters.items()})
    whole = parameters_of(tool)
    jsonschema.Draft202012Validator.check_schema(whole)
    assert list(whole["properties"]) == whole["required"] == list(parameters)
    judged = 0
    for _ in range(4):
        drawn = {name: draw() for name, (_, draw) in parameters.items()}
        written = json.loads(json.dumps({name: value for name, (value, _) in drawn.items()}))
        for name, value in written.items():
            assert allows(whole["properties"][name], whole, value), (whole["properties"][name], value)
        arguments, mistake = read_call(ToolCall("tool", written), {"tool": tool})
        assert mistake is None, (parameters, written)
        assert same_value(arguments, {name: read for name, (_, read) in drawn.items()})
        for name, value in written.items():
            for other in other_values(rng, value):
                taken = read_call(ToolCall("tool", {**written, name: other}), {"tool": tool})[1] is None
                assert taken == allows(whole["properties"][name], whole, other), (whole["properties"][name], other)
                judged += 1
    assert judged > 100


FAMILIES = ("qwen3 qwen3_5_think qwen3_8 nemotron_3_nano glm4moe gemma4 llama3_1 gptoss").split()
QUOTELESS = ("qwen3_5_think", "qwen3_8", "nemotron_3_nano", "glm4moe")  # values stand in tags, text without quotes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_call_that_the_template_writes_arrives_as_it_was(family, seed):
    """In each family's syntax: schema, the template's own writing of the call, its reading, the tool's values."""
    rng = random.Random(seed)
    fmt = TOOL_FORMATS["native"](tokenizer_of(family))
    checked = 0
    for _ in range(12):
        parameters = {f"p{k}": some_type(rng) for k in range(2)}
        tool = tool_of({name: hint for name, (hint, _) in parameters.items()})
        drawn = {name: draw() for name, (_, draw) in parameters.items()}
        written = {name: value for name, (value, _) in drawn.items()}
        if family in QUOTELESS and any(ambiguous(parameters[name][0], value) for name, value in written.items()):
            continue
        if family == "gemma4" and re.search(r'"(x y|1)":', json.dumps(written)):
            continue  # its keys have no quotes, so that none may hold a blank, or be 1
        message = fmt.turn_message([ToolCall("tool", written)])
        text = fmt._render([{"role": "user", "content": "?"}, message], add_generation_prompt=False)
        (call,), _ = fmt.syntax.split(text[text.index("?") :], {"tool": tool})
        arguments, mistake = read_call(call, {"tool": tool})
        assert mistake is None, (parameters, written, call)
        assert same_value(arguments, {name: read for name, (_, read) in drawn.items()}), (written, call)
        checked += 1
    assert checked


def ambiguous(hint, value):
    """Whether a syntax without quotes cannot say this: a text that reads as null where null may be, blanks at ends."""
    options = typing.get_args(hint) if type(None) in typing.get_args(hint) else ()
    if isinstance(value, str):
        return value != value.strip() or value == "" or (bool(options) and value in ("null", "None"))
    return False


@pytest.mark.parametrize("seed", range(8))
def test_a_schema_that_is_let_in_reads_every_value(seed):
    """An agent's tools have any schema: what cannot be read by it is refused before a turn is, or ends the run."""
    rng = random.Random(seed)

    def anything(level=0):
        some = [None, True, False, 5, "x", "string", "integer", [], {}, ["integer", "null"], [{}], [5]]
        if level > 3 or rng.random() < 0.3:
            return rng.choice(some)
        if rng.random() < 0.3:
            return [anything(level + 1) for _ in range(2)]
        keys = ("type", "anyOf", "oneOf", "enum", "const", "nullable", "items", "properties", "additionalProperties")
        return {key: anything(level + 1) for key in rng.sample(keys, 3)}

    schemas = [{"type": 5}, {"anyOf": None}, {"anyOf": [True]}, *(anything() for _ in range(300))]
    read = 0
    for schema in schemas:
        try:
            check_schema({"properties": {"a": schema}})
        except ValueError:
            continue
        read += 1
        for text in ("5", "null", "a b", "[1]", '{"b": 1}', "[" * 3000):
            typed(text, schema if isinstance(schema, dict) else {})
            own = {"parameters": {"properties": {"a": schema}}}
            with contextlib.suppress(ValueError):  # Python has fewer types
                signature.as_tool(types.SimpleNamespace(name="f", schema=own, run=len))
    assert read > 10
    deep = functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(62), {})
    check_schema({"properties": {"a": deep}})
    typed("5", deep)
