"""How a call is parsed and checked, and tools files."""

import pytest
from scripted import ADD, ANSWER, add, call, converse, make_env, run_many

from mt_grpo.conversation.formats.choose import parse_tags
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
    tool_call, answer = parse_tags(text)
    assert answer is None
    assert part in tool_call.error
    assert part in check_call(tool_call, {"add": add}) and "<tool>{" in check_call(tool_call, {"add": add})


TYPED = '''
from __future__ import annotations
import dataclasses, enum
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
        "Error: argument 'line' must be dict[str, Any], got 'blue' at line['start']['colour']: Input should be 'red'. "
        "Usage: draw(line: dict[str, Any], kind: Literal['red'] = 'red', other: dict[str, Any] | None = None, "
    )
    prompt = make_env(tools, "{tool_descriptions}").system_prompt
    assert all(f'{{"properties": {{"{name}": {{"type": "integer"}}' in prompt for name in "xy")
    assert "mt_grpo_" not in prompt and "shapes" not in prompt


def by_position(name: str, /) -> str:
    """Takes one."""


def test_a_tool_that_no_call_can_give_a_result_is_refused():
    with pytest.raises(ValueError, match="by_position: no call can pass 'name'"):
        make_env([by_position])


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
