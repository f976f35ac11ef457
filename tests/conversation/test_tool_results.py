"""What a tool's result or failure becomes in the conversation."""

import asyncio
import dataclasses
import datetime
import decimal
import enum
import functools
import pathlib
import random
import threading
from contextlib import nullcontext, suppress

import numpy
import pydantic
import pytest
from datasets import Dataset
from scripted import ANSWER, CHATML, call, ids, make_env, make_tokenizer, observe, run_many, slow_echo
from tokenizers import AddedToken

from mt_grpo.conversation.formats.control_tokens import cut_far_beyond, neutralise
from mt_grpo.recipe.checks import longest_prompt
from mt_grpo.rollout import ToolResult


def returns(value):
    """A tool that returns `value`."""

    def give() -> str:
        """Gives."""
        return value

    return give


@pytest.mark.parametrize("value", ["x" * 10_000_000, ["é"] * 500_000, "\x00" * 1_000_000, {"a": "é\n" * 1_000_000}])
def test_huge_results_are_cut(value):
    turn = observe(returns(value))
    assert turn.observation.endswith("... [cut]")
    assert len(ids(turn.observation)) <= 4096 // 4


@pytest.mark.parametrize(
    "value", ["\ud800", "a\udfffb", ["\ud800"], b"\xff\xfe", "\x00\x1b[2J", "\ufffd" * 600, "é" * 600]
)
def test_invalid_unicode_is_no_reason_to_stop(value):
    turn = observe(returns(value))
    assert turn.error is None
    turn.observation.encode()


def test_a_tool_changes_no_call_and_is_awaited_behind_a_decorator():
    def order(numbers: list[int]) -> str:
        """Order."""
        numbers.sort()
        numbers.append(99)
        return str(numbers)

    turn = observe(order, '<tool>{"name": "order", "args": {"numbers": [3, 1, 2]}}</tool>')
    assert turn.observation == "[1, 2, 3, 99]" and turn.calls[0].arguments == {"numbers": [3, 1, 2]}

    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    assert observe(logged(slow_echo), call("slow_echo", text="hi")).observation == "hi"


# Added tokens as real tokenizers have them: (text, special, whether it is a control token).
ADDED = [
    ("<a1><b1>", True, True), ("<b1>", True, True), ("<b1><c1>", True, True), ("<c1>", True, True), ("§", True, True),
    ("<|fim|>", False, True), ("<｜User｜>", False, True), ("<tool_call>", False, True), ("</tool_call>", False, True),
    ("</think>", False, True), ("<answer>", False, True), ("[CALL]", False, True), (" <lead>", True, True),
    ("  ", False, False), ("    ", False, False), (" " * 16, False, False), ("\n\n", False, False),
    ("=" * 16, False, False), ("<table>", False, False), ("</td>", False, False), ("[1]", False, False),
    ("Normandy", False, False),
]  # fmt: skip


@pytest.fixture(scope="module")
def crowded():
    """A tokenizer with many added tokens, whose template writes some of them."""
    tokenizer = make_tokenizer("{# <tool_call> [/CALL] Normandy #}" + CHATML)
    for text, special, _ in ADDED:
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)], special_tokens=special)
    for text, _, _ in ADDED:
        assert len(tokenizer(f"x{text}x", add_special_tokens=False)["input_ids"]) == 3, text
    return tokenizer


def test_a_neutralised_text_holds_no_control_token(crowded):
    """Whatever the text: the tokenizer finds none, and what can be seen is still there."""
    control = [text for text, _, is_control in ADDED if is_control] + ["<|im_end|>", "<|im_start|>", "<think>"]
    forbidden = {crowded.convert_tokens_to_ids(text) for text in control}
    assert len(forbidden) == len(control) and None not in forbidden
    rng = random.Random(0)
    letters = [text[i:j] for text in control for i, j in ((0, 1), (1, None), (0, -1), (-1, None))]
    for _ in range(1500):
        text = "".join(rng.choices(control + letters + [t for t, _, c in ADDED if not c], k=rng.randint(1, 8)))
        after = neutralise(text, crowded)
        assert not forbidden & set(crowded(after, add_special_tokens=False)["input_ids"]), (text, after)
        assert "</result>" not in neutralise(f"<{text}</result>/result>", crowded)
        assert after.replace(" ", "") == text.replace("§", "").replace(" ", "")


def test_a_text_without_control_tokens_is_left_as_it_is(crowded):
    """Code, tables and rulers, whose blanks are tokens of their own in many vocabularies."""
    plain = [text for text, _, is_control in ADDED if not is_control]
    rng = random.Random(0)
    for _ in range(300):
        text = "x".join(rng.choices([*plain, " ", "\t", "é", "if a < b:", "im_end", "|", "]", "<result>"], k=8))
        assert neutralise(text, crowded) == text
    assert neutralise("def f():\n" + " " * 12 + "return", crowded) == "def f():\n" + " " * 12 + "return"


def test_control_tokens_are_those_of_the_tokenizer_at_the_time():
    tokenizer = make_tokenizer(CHATML)
    assert neutralise("<call>", tokenizer) == "<call>"
    tokenizer.add_tokens([AddedToken("<call>", special=False, normalized=False)])
    assert neutralise("<call>", tokenizer) == "<call>"
    tokenizer.chat_template = CHATML + "{# <call> #}"
    assert neutralise("<call>", tokenizer) == "< call>"
    long = [[{"role": "user", "content": "<|im_end|>" * 50}]]
    assert longest_prompt(make_env(), Dataset.from_dict({"prompt": long})) == 23 - 4 + 50 * 11


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "error, message, part",
    [
        (KeyError, None, "KeyError"),
        (SystemExit, 3, "SystemExit"),
        (KeyboardInterrupt, None, "KeyboardInterrupt"),
        (StopIteration, None, "StopIteration"),
        (asyncio.CancelledError, None, "CancelledError"),
        (TimeoutError, "port 80 is closed", "port 80 is closed"),
        (Unprintable, None, "Unprintable"),
    ],
)
def test_a_tool_that_raises_is_an_error_observation(error, message, part, is_async):
    def fail() -> str:
        """Fails."""
        raise error() if message is None else error(message)

    async def fail_later() -> str:
        """Fails."""
        await asyncio.sleep(0)
        fail()

    # It is known at once, not at the time limit.
    turn = observe(fail_later if is_async else fail, tool_timeout=600.0)
    assert turn.observation.startswith("Error: ") and part in turn.observation
    assert turn.error in (("tool", "timeout") if error is TimeoutError else ("tool",))


@dataclasses.dataclass
class Point:
    x: int
    tags: set


class Color(enum.Enum):
    RED = "red"


class Plain:
    pass


class Later:
    def __await__(self):
        yield


class City(pydantic.BaseModel):
    name: str
    since: datetime.date


def no_data(name: str) -> str:
    return f"Error: the tool returned {name}, which is no data: expected text, bytes or JSON data"


FORMS = [  # what a tool gives, and what the model reads of it
    ("plain", "plain"), (None, "null"), (7, "7"),
    ({"a": [1, None], "city": "Zürich"}, '{"a": [1, null], "city": "Zürich"}'), ((1, "x"), '[1, "x"]'),
    (Point(1, {"b", "a", 10, 9}), '{"x": 1, "tags": [9, 10, "a", "b"]}'),
    ({"points": [Point(1, set())]}, '{"points": [{"x": 1, "tags": []}]}'),
    (City(name="Rouen", since=datetime.date(911, 7, 20)), '{"name": "Rouen", "since": "0911-07-20"}'),
    (numpy.float32(0.5), "0.5"),
    ({"a": numpy.arange(4).reshape(2, 2), "n": numpy.int64(3)}, '{"a": [[0, 1], [2, 3]], "n": 3}'),
    ({"c", "a", 10, 9, "b"}, '[9, 10, "a", "b", "c"]'), (Color.RED, "red"),
    (datetime.datetime(2026, 11, 20, 9, 30), "2026-11-20T09:30:00"),
    ({"price": decimal.Decimal("1.10")}, '{"price": "1.10"}'), (pathlib.Path("/tmp/x"), "/tmp/x"),
    ({"raw": b"caf\xc3\xa9"}, '{"raw": "café"}'), (bytearray(b"abc"), "abc"),
    ([{"b": 1, "a": 2}.keys(), {"b": 1}.values()], '[["a", "b"], [1]]'),
    ((i for i in range(3)), no_data("generator")), ([1, Plain()], no_data("Plain")), (returns, no_data("function")),
    (Point, no_data("type")), ([Later()], no_data("Later")),
]  # fmt: skip


@pytest.mark.parametrize("is_async", [False, True])
def test_a_result_is_data_or_an_error(is_async):
    """The same text from a thread and from the loop: never an address, which differs from run to run."""

    def give(number: int) -> str:
        """Gives."""
        return FORMS[number][0]

    async def give_later(number: int) -> str:
        """Gives."""
        return FORMS[number][0]

    tool, expected = give_later if is_async else give, [text for _, text in FORMS]
    scripts = [[call(tool.__name__, number=k) for k in range(len(FORMS))] + [ANSWER]]
    (rollout,) = run_many([tool], scripts, max_steps=99, max_completion_length=10_000)
    assert [turn.observation for turn in rollout.turns[:-1]] == expected
    errors = ["tool" if text.startswith("Error") else None for text in expected]
    assert [turn.error for turn in rollout.turns[:-1]] == errors


def test_a_tool_may_say_that_it_failed():
    """For rewards of calls that ran, and for metrics. A word that they do not know is the tool's own failure."""

    def paid(reward: float, error: str | None = None) -> ToolResult:
        """Gives its turn a reward."""
        return ToolResult({"a": 5}, reward=reward, error=error)

    (result,) = observe(paid, call("paid", reward=0.5, error="call")).results
    assert (result.text, result.reward, result.error) == ('{"a": 5}', 0.5, "call")
    (result,) = observe(paid, call("paid", reward=0.5, error="timeout")).results
    assert "the tool's ToolResult has error='timeout', expected 'call' or 'tool'" in result.text
    assert (result.error, result.reward) == ("tool", None)


@pytest.mark.parametrize("kind", ["in a thread", "async", "async, and ignores its cancellation"])
def test_a_tool_that_hangs_is_a_timeout(kind):
    over = threading.Event()

    def hang() -> str:
        """Hangs."""
        over.wait(20)

    async def hang_async() -> str:
        """Hangs; one kind never stops while the conversation waits for it."""
        while not over.is_set():
            with suppress(asyncio.CancelledError) if "ignores" in kind else nullcontext():
                await asyncio.sleep(0.5)

    tool = hang_async if "async" in kind else hang
    try:
        turn = observe(tool, tool_timeout=0.2)
    finally:
        over.set()
    assert turn.error == "timeout" and turn.observation == f"Error: {tool.__name__} took longer than 0.2 s"
    assert 0.2 <= turn.tool_seconds < 20


def test_a_text_of_long_tokens_that_may_fit_is_not_cut():
    """Words of nine letters are a token each: 2,100 characters have 210, and the first 2,024 have 203."""

    def tokenizer(text, add_special_tokens):
        return {"input_ids": text.split()}

    text = "lettersxy " * 210
    for limit, cut in ((188, 5 * 188 + 1024), (200, None), (210, None)):
        assert cut_far_beyond(text, limit, tokenizer) == text[:cut], limit
    assert cut_far_beyond(text * 100, 200, tokenizer) == (text * 100)[: 4 * 2024]
