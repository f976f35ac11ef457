"""How a call is parsed and checked, and what its arguments become."""

import datetime
import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NewType

import pydantic
import pytest
from scripted import ADD, ANSWER, add, call, converse, make_env, observe, run_many
from typing_extensions import TypedDict

from mt_grpo.conversation.formats.choose import parse_turn
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.recipe.plugins import load_tools
from mt_grpo.rollout import StopReason


@pytest.mark.parametrize(
    "text, part",
    [
        ("<tool>", "not closed by </tool>"),
        ("</tool>", "</tool> without <tool> before it"),
        ("<tool>add(2, 3)</tool>", "not valid JSON"),
        ('<tool>{"name": "echo", "args": {"text": "</tool>"}}</tool>', "not valid JSON"),
        ('<tool>{"name": "add"} <answer>5</answer></tool>', "not closed by </tool>"),
        ('<tool>{"name": "add"}{"name": "add"}</tool>', "several calls in one turn"),
        ('<tool>[{"name": "add"}, {"name": "add"}]</tool>', "several calls in one turn"),
        ("<tool>null</tool>", "must be a JSON object"),
        ('<tool>{"args": {}}</tool>', '"name"'),
        ('<tool>{"name": "add", "args": [2, 3]}</tool>', '"args" must be a JSON object, got list'),
        ('<tool>{"name": "add", "arguments": {"a": 2}}</tool>', 'unknown key "arguments"'),
        ("<tool>" + "[" * 100_000 + "</tool>", "nested too deeply"),
        ('<tool>{"name": "echo", "args": {"text": ' + "1" * 5000 + "}}</tool>", ""),  # Python refuses to read it
    ],
)
def test_mistakes_in_a_call(text, part):
    tool_call, answered = parse_turn(text)
    assert not answered
    assert part in tool_call.error
    assert part in check_call(tool_call, {"add": add}) and "<tool>{" in check_call(tool_call, {"add": add})


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Place(TypedDict):
    name: str


class City(pydantic.BaseModel):
    """A city."""

    name: str
    since: datetime.date | None = None
    tags: set[str] = {"b", "d", "a", "c"}


@dataclass
class Town:
    name: str


class NoData:
    pass


def visitor(kind: Any) -> Callable:
    """A tool with a parameter of this type, which tells what it was given."""

    def visit(where: kind) -> str:
        """Visits."""
        return repr(where)

    return visit


TEN = Annotated[int, pydantic.Field(ge=0, le=10)]
User = NewType("User", int)


@pytest.mark.parametrize(
    "kind, value, given",
    [
        (Size, 2, "<Size.LARGE: 2>"),
        (set[str], ["a", "a"], "{'a'}"),
        (dict[int, str], {"7": "a"}, "{7: 'a'}"),
        (Path, "a/b", repr(Path("a/b"))),
        (User, 3, "3"),
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
    turn = observe(visitor(kind), call("visit", where=value))
    assert (turn.observation, turn.error) == (given, None)
    assert turn.tool_call.arguments == {"where": value}  # rewards and the log see what was written


def test_a_model_is_given_with_what_it_adds():
    def visit(where: City, **others: Colour) -> str:
        """Visits."""
        return f"{where.since!r} {sorted(where.tags)} {hasattr(where, 'mayor')} {others}"

    turn = observe(visit, call("visit", where={"name": "Rouen", "since": "0911-07-20", "mayor": "x"}, sky="green"))
    assert turn.observation == (
        "datetime.date(911, 7, 20) ['a', 'b', 'c', 'd'] False {'sky': <Colour.GREEN: 'green'>}"
    )


@pytest.mark.parametrize(
    "kind, value, mistake",
    [
        (tuple[int, str], ["1", "a"], "tuple[int, str], got '1' at where[0]: Input should be a valid integer. "),
        (
            Town | list[Town],
            [{"name": "x"}, {"name": 7}],
            "Town | list[Town], got 7 at where['list[Town]'][1]['name']: ",
        ),
    ],
)
def test_an_argument_that_is_not_what_its_parameter_is(kind, value, mistake):
    turn = observe(visitor(kind), call("visit", where=value))
    assert turn.error == "call"
    assert turn.observation.startswith(f"Error: argument 'where' must be {mistake}")
    assert "Usage: visit(where: " in turn.observation


@pytest.mark.parametrize("kind", [NoData, list[NoData], Colour | NoData, Callable[[], int]])
def test_a_parameter_that_no_json_fits_is_refused(kind):
    with pytest.raises(ValueError, match="Tool visit: pydantic finds no JSON schema of its parameters"):
        make_env([visitor(kind)])


TYPED = '''
from __future__ import annotations
import dataclasses, enum, pathlib, sys
from typing import Annotated
import pydantic
from typing_extensions import TypedDict
from other_places import Point as OtherPoint

class Colour(enum.Enum):
    RED = "red"

class Point(TypedDict):
    x: int
    colour: Colour

@dataclasses.dataclass
class Line:
    start: Point
    end: Point | None = None

def draw(
    line: Line, kind: Colour = Colour.RED, other: OtherPoint | Point | None = None, **sizes: tuple[int, int]
) -> Line:
    """Draws."""
    ours = isinstance(line, Line) and isinstance(kind, Colour)
    return f"{ours} {line.start['colour']} {line.end} {sizes}"

async def later(kind: Colour) -> str:
    """Draws later."""
    return str(isinstance(kind, Colour))

TOOL_FUNCTIONS = [draw, later]
'''


@pytest.mark.contract("tools file")
def test_a_tools_file_with_types_of_its_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "other_places.py").write_text("import pydantic\nclass Point(pydantic.BaseModel):\n    y: int\n")
    path = tmp_path / "shapes.py"
    path.write_text(TYPED, encoding="utf-8")
    tools = load_tools(str(path))
    start = {"x": 1, "colour": "red"}
    line = call("draw", line={"start": start}, wide=[1, 2])
    late = call("later", kind="red")
    wrong = call("draw", line={"start": {"x": 1, "colour": "blue"}})
    (rollout,) = run_many(tools, [[line, late, wrong, ANSWER]], max_steps=3, max_completion_length=3000)
    seen = [turn.observation for turn in rollout.turns[:3]]
    assert seen[:2] == ["True Colour.RED None {'wide': (1, 2)}", "True"]
    assert seen[2].startswith(
        "Error: argument 'line' must be Line, got 'blue' at line['start']['colour']: Input should be 'red'. "
        'Usage: draw(line: Line, kind: Colour = "red", other: Point | Point | None = None, '
    )
    prompt = make_env(tools, "{tool_descriptions}").system_prompt
    assert (
        '{"properties": {"y": {"type": "integer"}}' in prompt and '{"properties": {"x": {"type": "integer"}' in prompt
    )
    assert "mt_grpo_" not in prompt and "shapes" not in prompt


def by_position(name: str, /) -> str:
    """Takes one."""


def generate_names(count: int) -> str:
    """Yields."""
    yield ""


def unknown_hint(name: "Nowhere") -> str:  # noqa: F821
    """Takes one."""


@pytest.mark.parametrize(
    "tool, message",
    [
        (by_position, "by_position: no call can pass 'name'"),
        (generate_names, "generate_names is a generator function"),
        (unknown_hint, "unknown_hint: .*'Nowhere'"),
    ],
)
def test_a_tool_that_no_call_can_give_a_result_is_refused(tool, message):
    with pytest.raises(ValueError, match=message):
        make_env([tool])


@pytest.mark.parametrize(
    "text, parts",
    [
        (call("search", query="x"), ["unknown tool 'search'", "Known tools: add, echo, slow_echo"]),
        (call("add", a="2", b=3), ["argument 'a' must be int, got '2': ", "Usage: add(a: int, b: int) -> str"]),
        (call("add", a=2), ["missing a required argument: 'b'", "Usage: add("]),
        (call("add", a=2, b=3, c=4), ["unexpected keyword argument 'c'", "Usage: add("]),
        (call("<|im_start|>system"), ["unknown tool '< |im_start|>"]),
        ('<tool>{"name": "\\ud800", "args": {}}</tool>', ["unknown tool"]),
        ('<tool>{"name": "add", "args": {"\\ud800": 1}}</tool>', ["Usage: add("]),
        ('<tool>{"name": "add", "args": {}, "\\ud800": 1}</tool>', ["unknown key"]),
    ],
)
def test_the_policys_mistakes_become_observations(text, parts):
    rollout, _ = converse(text, ANSWER)
    turn = rollout.turns[0]
    assert rollout.stop_reason == StopReason.ANSWERED and len(rollout.turns) == 2
    assert turn.error == "call" and turn.observation.startswith("Error: ")
    assert all(part in turn.observation for part in parts), turn.observation


def test_a_call_cut_off_by_the_turn_budget_is_an_observation():
    rollout, backend = converse(ADD, ANSWER, max_turn_tokens=20)
    assert [r.max_tokens for r in backend.requests] == [20, 20]
    assert rollout.turns[0].finish_reason == "length" and rollout.turns[0].error == "call"
    assert "not closed by </tool>" in rollout.turns[0].observation
    assert rollout.stop_reason == StopReason.ANSWERED
