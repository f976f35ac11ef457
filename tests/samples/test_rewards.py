"""Tests of the reward files: hand-written rollouts with the value each function must give, and rows of real data."""

import importlib.util
import inspect
import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import data_file

from mt_grpo.conversation.formats.choose import parse_turn
from mt_grpo.rollout import ToolCall, ToolResult, Turn

REWARDS = Path(__file__).resolve().parents[2] / "rewards"


def load(name: str) -> ModuleType:
    """Load a reward file by path, as a recipe does."""
    if str(REWARDS) not in sys.path:  # a rewards file may import another one
        sys.path.append(str(REWARDS))
    spec = importlib.util.spec_from_file_location(name, REWARDS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


triviaqa = load("triviaqa_reward")
calculator = load("calculator_reward")
gsm8k = load("gsm8k_reward")
MODULES = [triviaqa, calculator, gsm8k]
ALL_FUNCS = [
    pytest.param(func, id=f"{module.__name__}.{func.__name__}")
    for module in MODULES
    for func in module.TURN_REWARD_FUNCS + module.OUTCOME_REWARD_FUNCS
]

CALL = '<reasoning>Look it up.</reasoning>\n<tool>{"name": "wiki_search", "args": {"query": "Rollo"}}</tool>'
SUM = '<reasoning>Multiply.</reasoning>\n<tool>{"name": "calculator", "args": {"expression": "37*51"}}</tool>'
BROKEN = '<reasoning>Multiply.</reasoning>\n<tool>{"name": "calculator", "args": </tool>'


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def gets(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"<result>\n{text}\n</result>"}


def answers(text: str) -> dict[str, str]:
    return says(f"<reasoning>So it is.</reasoning>\n<answer>{text}</answer>")


def turn(text, observation=None, called=True, malformed=None, error=None):
    """A turn whose fields are written by hand; with `observation`, what the model read after it."""
    calls = [ToolCall("calculator", {}, malformed)] if called else []
    results = [ToolResult(observation, error)] if called and observation is not None else []
    messages = [] if observation is None else [gets(observation)]
    return Turn([1], None, text, "stop", calls, results, messages=messages)


def answered(text, answer):
    return Turn([1], None, text, "stop", answer=answer)


def parsed(text):
    """The turn that the paper's XML format reads in a text."""
    call, answers_it = parse_turn(text)
    answer = re.split(r"</(?:think|reasoning)>", text.partition("</answer>")[0])[-1].partition("<answer>")[2]
    return Turn([1], None, text, "stop", [call] if call else [], answer=answer.strip() if answers_it else None)


def turns_of(messages):
    """The turns of a conversation that is written as messages: `says`, `gets` and `answers`."""
    turns = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append(parsed(message["content"] or ""))
        elif turns:
            turns[-1].messages.append(message)
            if turns[-1].calls:
                text = message["content"].removeprefix("<result>\n").removesuffix("\n</result>")
                turns[-1].results.append(ToolResult(text, "call" if turns[-1].calls[0].error else None))
    return turns


def one(func, messages, gold="1887", turns=None):
    """Call a reward function on one rollout, with all that the trainer passes."""
    values = func(
        prompts=[[{"role": "user", "content": "?"}]],
        completions=[messages],
        completion_ids=[[1, 2, 3]],
        rollout_turns=[turns_of(messages) if turns is None else turns],
        answer=[gold],
        question_id=["q"],
        trainer_state=SimpleNamespace(global_step=0),
        log_extra=lambda *_: None,
        log_metric=lambda *_: None,
    )
    assert isinstance(values, list) and len(values) == 1
    assert values[0] is None or type(values[0]) is float
    return values[0]


def all_of(func, conversations, **columns):
    """Call a reward function on conversations that are written as messages."""
    return func(rollout_turns=[turns_of(messages) for messages in conversations], **columns)


def test_repeated_helpers_are_identical():
    assert inspect.getsource(triviaqa._results) == inspect.getsource(calculator._results)
    every_file = [*MODULES, load("chain_reward"), load("judge_reward")]
    assert len({inspect.getsource(module._answer) for module in every_file}) == 1


@pytest.mark.contract("triviaqa rewards")
def test_lists_of_functions():
    def names(funcs):
        return [func.__name__ for func in funcs]

    assert names(triviaqa.TURN_REWARD_FUNCS) == ["tool_execution_reward_func", "exist_answer_in_search_results"]
    assert names(triviaqa.OUTCOME_REWARD_FUNCS) == [
        "exact_match_reward_func",
        "exist_answer_reward_func",
        "format_reward_func",
        "xml_tag_reward_func",
    ]
    assert names(calculator.TURN_REWARD_FUNCS) == ["tool_execution_reward_func", "result_found_reward_func"]
    assert names(calculator.OUTCOME_REWARD_FUNCS) == ["exact_match_reward_func", "answer_given_reward_func"]
    assert names(gsm8k.TURN_REWARD_FUNCS) == ["tool_execution_reward_func"]
    assert names(gsm8k.OUTCOME_REWARD_FUNCS) == ["exact_match_reward_func", "answer_format_reward_func"]


@pytest.mark.parametrize("func", ALL_FUNCS)
def test_nothing_written_earns_nothing_and_values_keep_the_order_of_the_rollouts(func):
    for messages in ([], [says("")], [says("   \n")], [{"role": "assistant", "content": None}], [gets("1887")]):
        assert one(func, messages) == one(func, messages, turns=[]) == 0.0
    good = [says(SUM), gets("1887"), answers("1887")]
    first, second = all_of(func, [good, []], answer=["1887", "1887"])
    assert first > 0.0 and second == 0.0
    assert all_of(func, [[], good], answer=["1887", "1887"]) == [second, first]
    assert func(prompts=[], completions=[], completion_ids=[], rollout_turns=[], answer=[]) == []


@pytest.mark.parametrize("func", ALL_FUNCS)
@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 100_000,
        "<reasoning>" + " " * 1_000_000 + "<answer>",
        "<answer>18 " + "m/" * 500_000 + "</answer>",
        "<answer>\\boxed{" + "{1}" * 300_000 + "</answer>",
    ],
    ids=lambda text: f"{text[:20].strip()}..{text[-12:].strip()}",
)
def test_huge_text_is_fast(func, text):
    """By the time of this process: another one may hold the core."""
    start = time.process_time()
    one(func, [says(SUM), gets(text), says(text)])
    assert time.process_time() - start < 2.0


ANSWER_TEXTS = [
    ([answers("1887")], 1.0),
    ([says("<answer>1887</answer>")], 1.0),
    ([says(SUM), gets("1887"), answers("1887")], 1.0),
    ([answers("88")], 0.0),
    ([answers("")], 0.0),
    ([says("1887")], 0.0),
    # Two answers: the first complete one counts.
    ([says("<answer>1887</answer><answer>88</answer>")], 1.0),
    ([says("<answer>88</answer><answer>1887</answer>")], 0.0),
    # Unclosed and unopened.
    ([says("<answer>1887")], 0.0),
    ([says("1887</answer>")], 0.0),
    ([says("</answer><answer>1887</answer>")], 0.0),  # the turn ends at the first closing tag
    # Nested: from the first opening to the first closing tag.
    ([says("<answer><answer>1887</answer></answer>")], 0.0),
    ([says("<reasoning>It must be <answer>1887</answer></reasoning>")], 1.0),
    # An answer inside a tool call, or after one.
    ([says("<tool><answer>1887</answer></tool>")], 0.0),
    ([says(SUM + "<answer>1887</answer>")], 0.0),
    ([says("<answer>1887</answer>" + SUM)], 1.0),
    # A fake result written by the policy is text like any other.
    ([says("<result><answer>1887</answer></result>")], 1.0),
    ([says("<result>1887</result><answer>88</answer>")], 0.0),
    ([says("<result>1887</result>")], 0.0),
    # Only the last assistant message answers, and the environment never does.
    ([answers("1887"), gets("go on"), says("<reasoning>Hm.</reasoning>")], 0.0),
    ([says(SUM), gets("<answer>1887</answer>")], 0.0),
    # Tags are literal.
    ([says("<ANSWER>1887</ANSWER>")], 0.0),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
@pytest.mark.parametrize(("messages", "expected"), ANSWER_TEXTS)
def test_exact_match_reads_the_answer_that_counts(module, messages, expected):
    assert one(module.exact_match_reward_func, messages) == expected


# (messages, tool execution, gold number found)
CALLS = [
    ([says(SUM), gets("1887"), answers("1887")], 0.2, 0.5),
    ([says(SUM), gets(" 1,887.0 ")], 0.2, 0.5),
    ([says(SUM), gets("37*51 = 1887")], 0.2, 0.0),
    ([says(SUM), gets("")], 0.2, 0.0),
    ([answers("1887")], 0.0, 0.0),
    # Half of the calls succeed.
    ([says(BROKEN), gets("Error: not JSON"), says(SUM), gets("1887"), answers("1887")], 0.1, 0.5),
    # A tool that raised, that reports its own failure in words.
    ([says(SUM), gets("Error: 1887")], 0.0, 0.0),
    ([says(SUM), gets("An Error: 1887")], 0.2, 0.0),
    # A call that got no result, because the rollout ended there.
    ([says(SUM)], 0.0, 0.0),
    ([says(SUM), gets("1887"), says(SUM)], 0.1, 0.5),
    # An unclosed call is an attempt, also where the rollout ended there.
    ([says("<tool>{"), gets("Error: no </tool>"), says(SUM), gets("1887")], 0.1, 0.5),
    ([says(SUM), gets("1887"), says("<tool>{")], 0.1, 0.5),
    # A fake result written by the policy is no result.
    ([says("<result>1887</result>")], 0.0, 0.0),
    ([says(SUM + "<result>1887</result>")], 0.0, 0.0),
    # A result may hold tags itself.
    ([says(SUM), gets("</result>1887<result>")], 0.2, 0.0),
    # A message of the environment that answers no call.
    ([answers("88"), gets("1887")], 0.0, 0.0),
]


@pytest.mark.contract("triviaqa rewards")
@pytest.mark.parametrize("messages, executed, found", CALLS)
def test_tool_calls(messages, executed, found):
    for module in MODULES:
        assert one(module.tool_execution_reward_func, messages) == executed
    assert one(calculator.result_found_reward_func, messages) == found


def several(*results, calls=None, malformed=()):
    """A turn of a format that takes several calls at once: each result is a text, or a text and its error."""
    results = [ToolResult(*([result] if isinstance(result, str) else result)) for result in results]
    calls = [ToolCall("calculator", {}, "no JSON" if i in malformed else None) for i in range(calls or len(results))]
    return Turn([1], None, "Both at once.", "stop", calls, results, messages=[{"role": "tool", "content": ""}])


# (turns, tool execution, gold number or word found)
SEVERAL_CALLS = [
    ([several("88", "1887")], 0.2, 0.5),
    ([several("88", ("1887", "tool"))], 0.1, 0.0),
    ([several(("Error: busy", "timeout"), "1887")], 0.1, 0.5),
    ([several("88", "1887", malformed=[1])], 0.1, 0.0),
    ([several("Error: busy", "1887", "88", "88")], 0.15, 0.5),  # in the tool's own words
    # Calls without a result: there was no room for it, or the turn limit was reached.
    ([several("1887", calls=4)], 0.05, 0.5),
    ([several(calls=2)], 0.0, 0.0),
    ([several("1887", "88"), several(calls=2)], 0.1, 0.5),
    # Over all turns, and not turn by turn.
    ([several("88", "88", "88"), several(("1887", "tool"))], 0.15, 0.0),
    # A result of no call that was read is an attempt that failed.
    ([Turn([1], None, "", "stop", results=[ToolResult("1887", "call")])], 0.0, 0.0),
]


@pytest.mark.parametrize(("turns", "executed", "found"), SEVERAL_CALLS)
def test_several_calls_in_a_turn(turns, executed, found):
    for module in MODULES:
        assert one(module.tool_execution_reward_func, [], turns=turns) == pytest.approx(executed, abs=1e-12)
    assert one(calculator.result_found_reward_func, [], turns=turns) == found
    assert one(triviaqa.exist_answer_in_search_results, [], "1887", turns=turns) == found


def test_an_answer_in_plain_text_is_one():
    turns = [several("1887"), answered("1,887", "1,887")]
    for module in (calculator, gsm8k):
        assert one(module.exact_match_reward_func, [], turns=turns) == 1.0
    assert one(triviaqa.exact_match_reward_func, [], ["1,887"], turns=turns) == 1.0
    assert one(calculator.answer_given_reward_func, [], turns=turns) == 0.1
    # Tags in it are text, and a turn that calls a tool does not answer, whatever its text says.
    for turns in ([answered("<answer>1887</answer>", "<answer>1887</answer>")], [several("1887")]):
        for module in MODULES:
            assert one(module.exact_match_reward_func, [], turns=turns) == 0.0


GOLDS = [
    (["France"], 1.0),
    (["Spain", "France"], 1.0),
    (["Spain"], 0.0),
    ("France", 1.0),
    ({"value": "Gaul", "aliases": ["France", "FR"]}, 1.0),
    ({"value": "France", "aliases": None}, 1.0),
    ({"value": "Spain", "aliases": ["Hispania"]}, 0.0),
    (["", "  ", "France"], 1.0),
    ([None, "France"], 1.0),
    ([" france\n"], 1.0),
    ([], None),
    (None, None),
    ("", None),
]


@pytest.mark.parametrize(("gold", "exact"), GOLDS)
def test_triviaqa_gold_may_be_a_list_a_dict_or_a_string(gold, exact):
    messages = [says(CALL), gets("Normandy lies in France."), answers("France")]
    half = None if exact is None else exact / 2
    assert one(triviaqa.exact_match_reward_func, messages, gold) == exact
    assert one(triviaqa.exist_answer_reward_func, messages, gold) == half
    assert one(triviaqa.exist_answer_in_search_results, messages, gold) == half


@pytest.mark.contract("triviaqa rewards")
@pytest.mark.parametrize(
    ("answer", "gold", "exact", "exists"),
    [
        ("france", "France", 1.0, 0.5),
        ("in France", "France", 0.0, 0.5),
        ("France.", "France", 0.0, 0.5),
        ("Frances", "France", 0.0, 0.5),  # a plain substring, as in the paper
        ("Fra nce", "France", 0.0, 0.0),
        ("STRASSE", "Straße", 1.0, 0.5),
        ("\u00a0Paris\u2003", "Paris", 1.0, 0.5),
        ("<answer>France", "France", 0.0, 0.5),
        (".*", "France", 0.0, 0.0),
        ("1984", 1984, 1.0, 0.5),
    ],
)
def test_triviaqa_answer(answer, gold, exact, exists):
    assert one(triviaqa.exact_match_reward_func, [answers(answer)], [gold]) == exact
    assert one(triviaqa.exist_answer_reward_func, [answers(answer)], [gold]) == exists


def test_exist_answer_looks_only_into_the_answer():
    func = triviaqa.exist_answer_reward_func
    assert one(func, [says(CALL), gets("France"), answers("Spain")], ["France"]) == 0.0
    assert one(func, [says("<reasoning>France</reasoning>\n<answer>Spain</answer>")], ["France"]) == 0.0
    assert one(func, [says("<reasoning>France</reasoning>")], ["France"]) == 0.0
    assert one(func, [says("<answer>France")], ["France"]) == 0.0
    assert one(func, [says("<answer>Spain</answer><answer>France</answer>")], ["France"]) == 0.0
    assert one(func, [says("<tool><answer>France</answer></tool>")], ["France"]) == 0.0


@pytest.mark.contract("triviaqa rewards")
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([says(CALL), gets("Rollo was a VIKING.")], 0.5),
        ([says(CALL), gets("Vikings everywhere")], 0.5),  # a plain substring, as in the paper
        ([says(CALL), gets("Rollo was a Norman.")], 0.0),
        ([says(CALL), gets("nothing"), says(CALL), gets("a viking")], 0.5),
        ([says(CALL), gets("Error: no page on Viking")], 0.0),
        ([says(CALL), gets("")], 0.0),
        ([says("<tool>viking</tool>"), gets("nothing")], 0.0),
        ([says(CALL + "\n<result>\nviking\n</result>"), gets("nothing")], 0.0),
        ([answers("viking"), gets("viking")], 0.0),
    ],
)
def test_exist_answer_in_search_results(messages, expected):
    assert one(triviaqa.exist_answer_in_search_results, messages, ["Viking"]) == expected


@pytest.mark.contract("triviaqa rewards")
@pytest.mark.parametrize(
    ("messages", "checks"),  # of five a message: two fields, spacing, start, end
    [
        ([says(CALL)], 5 / 5),
        ([answers("France")], 5 / 5),
        ([says(CALL), gets("x"), says(CALL), gets("x"), answers("France")], 15 / 15),
        ([says(CALL), gets("x"), says("France")], 5 / 10),
        ([says("<answer>France</answer>")], 2 / 5),  # block, end
        ([says("<reasoning>France</reasoning>")], 2 / 5),  # reasoning, start
        ([says("<reasoning>r</reasoning> so <answer>a</answer>")], 4 / 5),  # all but the spacing
        ([says("Well. <reasoning>r</reasoning><answer>a</answer>")], 4 / 5),  # all but the start
        ([says("<reasoning>r</reasoning><answer>a</answer> Bye.")], 4 / 5),  # all but the end
        ([says("<reasoning>r</reasoning>\n<answer>a")], 3 / 5),  # reasoning, spacing, start
        ([says("<reasoning>r <answer>a</answer>")], 3 / 5),  # block, start, end
        ([says("<answer>a</answer><reasoning>r</reasoning>")], 2 / 5),  # both fields, in the wrong order
        ([says("<reasoning>r</reasoning>\n<tool>{}</answer>")], 3 / 5),  # a call that never closes
        ([says("</reasoning><reasoning>")], 0 / 5),
        ([says("no tags at all")], 0 / 5),
        ([gets("<reasoning>r</reasoning>\n<answer>a</answer>")], 0),
    ],
)
def test_format(messages, checks):
    assert one(triviaqa.format_reward_func, messages) == pytest.approx(0.2 * checks, abs=1e-12)


@pytest.mark.parametrize(
    ("messages", "tags"),  # of four a message
    [
        ([says(CALL)], 4 / 4),
        ([answers("France")], 4 / 4),
        ([says(CALL), gets("<answer></answer>"), answers("France")], 8 / 8),
        ([says(CALL), gets("x"), says("France")], 4 / 8),
        ([says("<answer>France</answer>")], 2 / 4),
        ([says("<reasoning>r</reasoning>\n<answer>a")], 3 / 4),
        ([says("<reasoning>r</reasoning><answer>a</answer><answer>b</answer>")], 2 / 4),
        ([says("<answer><answer>a</answer></answer>")], 0 / 4),
        ([says("</answer></reasoning><answer><reasoning>")], 4 / 4),  # only counts; the format reward sees order
        ([says("no tags at all")], 0 / 4),
    ],
)
def test_xml_tags(messages, tags):
    assert one(triviaqa.xml_tag_reward_func, messages) == pytest.approx(0.2 * tags, abs=1e-12)


def test_the_maxima_are_exact():
    for turns in range(1, 8):
        perfect = [says(CALL), gets("x")] * turns + [answers("France")]
        assert one(triviaqa.format_reward_func, perfect) == 0.2
        assert one(triviaqa.xml_tag_reward_func, perfect) == 0.2


# (answer, gold, calculator: exact match, gsm8k: exact match, gsm8k: reads as a number)
NUMBERS = [
    ("1887", "1887", 1.0, 1.0, 0.1),
    ("1,887", "1887", 1.0, 1.0, 0.1),
    ("-10", "-10", 1.0, 1.0, 0.1),
    ("-0", "0", 1.0, 1.0, 0.1),
    ("1887.5", "1887", 0.0, 0.0, 0.1),
    ("88", "1887", 0.0, 0.0, 0.1),
    # Dressed numbers: fine in a word problem, not for the calculator.
    ("$1,887.00", "1887", 0.0, 1.0, 0.1),
    ("1887%", "1887", 0.0, 1.0, 0.1),
    ("1887.", "1887", 0.0, 1.0, 0.1),
    ("$1,887.50.", "1887.50", 0.0, 1.0, 0.1),
    ("$1887$", "1887", 0.0, 1.0, 0.1),
    # With its unit.
    ("$1,887 dollars.", "1887", 0.0, 1.0, 0.1),
    ("1887 square feet per hour", "1887", 0.0, 1.0, 0.1),
    ("1887 km/h", "1887", 0.0, 1.0, 0.1),
    ("1887 dozen", "1887", 0.0, 1.0, 0.1),  # a question asks how many dozens
    ("1887 dollars", "188", 0.0, 0.0, 0.1),
    # In a box, wherever it stands.
    ("\\boxed{1887}", "1887", 0.0, 1.0, 0.1),
    ("\\boxed{1{,}887}", "1887", 0.0, 1.0, 0.1),
    ("\\boxed{1887\\text{ apples}}", "1887", 0.0, 1.0, 0.1),
    ("She pays 37*51 = \\boxed{1887} dollars.", "1887", 0.0, 1.0, 0.1),
    ("\\boxed{1887}, that is \\boxed{1,887.0}", "1887", 0.0, 1.0, 0.1),
    ("\\boxed{88} or \\boxed{1887}", "1887", 0.0, 0.0, 0.0),
    ("1887 \\boxed{88}", "1887", 0.0, 0.0, 0.1),
    ("\\boxed{1887", "1887", 0.0, 0.0, 0.0),
    ("\\boxed{\\frac{1887}{1}}", "1887", 0.0, 0.0, 0.0),
    # No number, or not only a number and its unit.
    ("about 1887 dollars", "1887", 0.0, 0.0, 0.0),
    ("1887 is what I get for all of them", "1887", 0.0, 0.0, 0.0),
    ("2 and a half hours", "2", 0.0, 0.0, 0.0),
    ("2 hundred", "2", 0.0, 0.0, 0.0),
    ("5k", "5", 0.0, 0.0, 0.0),
    ("2½", "2", 0.0, 0.0, 0.0),
    ("10^{3}", "10", 0.0, 0.0, 0.0),
    ("2\\frac{1}{2}", "2", 0.0, 0.0, 0.0),
    ("12:30", "12", 0.0, 0.0, 0.0),
    ("900*2 = 1800", "1800", 0.0, 0.0, 0.0),
    ("37*51", "1887", 0.0, 0.0, 0.0),
    ("1 887", "1887", 0.0, 0.0, 0.0),
    ("1_887", "1887", 0.0, 0.0, 0.0),
    ("1e999999999", "1887", 0.0, 0.0, 0.0),
    ("0x75f", "1887", 0.0, 0.0, 0.0),
    ("-$-10", "10", 0.0, 0.0, 0.0),
    ("nan", "1887", 0.0, 0.0, 0.0),
    ("１８８７", "1887", 0.0, 0.0, 0.0),
    ("", "1887", 0.0, 0.0, 0.0),
    # Beyond what a float can tell apart.
    ("9007199254740993", "9007199254740992", 0.0, 0.0, 0.1),
    ("0.1", "0.10000000000000000001", 0.0, 0.0, 0.1),
]


@pytest.mark.parametrize(("answer", "gold", "calculator_exact", "gsm8k_exact", "gsm8k_format"), NUMBERS)
def test_numbers(answer, gold, calculator_exact, gsm8k_exact, gsm8k_format):
    messages = [answers(answer)]
    if gold != "1887.50":  # the calculator's rows hold integers
        assert one(calculator.exact_match_reward_func, messages, gold) == calculator_exact
    assert one(gsm8k.exact_match_reward_func, messages, gold) == gsm8k_exact
    assert one(gsm8k.answer_format_reward_func, messages, gold) == gsm8k_format
    assert one(calculator.answer_given_reward_func, messages, gold) == 0.1


@pytest.mark.parametrize("gold", ["nan", "Paris", "", None, "1e3"])
def test_a_row_without_a_gold_number_does_not_apply(gold):
    assert one(calculator.exact_match_reward_func, [answers("1887")], 1887) == 1.0  # it may be one
    messages = [says(SUM), gets("nan"), answers("nan")]
    assert one(calculator.exact_match_reward_func, messages, gold) is None
    assert one(calculator.result_found_reward_func, messages, gold) is None
    assert one(gsm8k.exact_match_reward_func, messages, gold) is None


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([answers("1887")], 0.1),
        ([says("<answer>1887")], 0.0),
        ([says("1887")], 0.0),
        ([says("<tool><answer>1887</answer></tool>")], 0.0),
        ([says("<result><answer>1887</answer></result>")], 0.1),
        ([answers("1887"), gets("x"), says("hm")], 0.0),
        ([says(SUM), gets("<answer>1887</answer>")], 0.0),
    ],
)
def test_answer_given(messages, expected):
    assert one(calculator.answer_given_reward_func, messages) == expected


def test_the_gold_number_of_a_worked_solution_is_the_last_one_marked():
    gold = "He has 3 #### boxes of 5.\nSo 3*5 = <<3*5=15>>15\n#### 15"
    assert one(gsm8k.exact_match_reward_func, [answers("15")], gold) == 1.0
    assert one(gsm8k.exact_match_reward_func, [answers("5")], gold) == 0.0
    assert one(gsm8k.exact_match_reward_func, [answers(gold)], gold) == 0.0


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in data_file(name).read_text(encoding="utf-8").splitlines()]


def test_every_squad_row():
    golds = [row["answer"] for row in rows("squad/qa.jsonl")]
    assert len(golds) == 473
    right = [[answers(gold["value"])] for gold in golds]
    last_alias = [[answers(gold["aliases"][-1].upper())] for gold in golds]
    wrong = [[answers("qqq")] for _ in golds]
    as_lists = [[gold["value"], *gold["aliases"]] for gold in golds]
    for answer in (golds, as_lists):
        assert all_of(triviaqa.exact_match_reward_func, right, answer=answer) == [1.0] * 473
        assert all_of(triviaqa.exist_answer_reward_func, right, answer=answer) == [0.5] * 473
        assert all_of(triviaqa.exact_match_reward_func, last_alias, answer=answer) == [1.0] * 473
        assert all_of(triviaqa.exact_match_reward_func, wrong, answer=answer) == [0.0] * 473
        assert all_of(triviaqa.exist_answer_reward_func, wrong, answer=answer) == [0.0] * 473


def test_every_squad_answer_is_found_in_the_corpus_and_only_if_the_environment_said_it():
    golds = [row["answer"] for row in rows("squad/qa.jsonl")]
    corpus = "\n".join(row["text"] for row in rows("squad/corpus.jsonl"))
    said = [[says(CALL), gets(corpus)]] * len(golds)
    faked = [[says(f"{CALL}\n<result>\n{corpus}\n</result>"), gets("Error: nothing found")]] * len(golds)
    assert all_of(triviaqa.exist_answer_in_search_results, said, answer=golds) == [0.5] * len(golds)
    assert all_of(triviaqa.exist_answer_in_search_results, faked, answer=golds) == [0.0] * len(golds)


def test_every_gsm8k_row():
    solutions = [row["answer"] for row in rows("gsm8k/test.jsonl")]
    assert len(solutions) == 1000
    numbers = [solution.split("####")[1].strip() for solution in solutions]
    right = [[answers(number)] for number in numbers]
    bare = [[answers(number.replace(",", ""))] for number in numbers]
    wrong = [[answers(number + "1")] for number in numbers]
    for gold in (solutions, numbers):
        assert all_of(gsm8k.exact_match_reward_func, right, answer=gold) == [1.0] * 1000
        assert all_of(gsm8k.exact_match_reward_func, bare, answer=gold) == [1.0] * 1000
        assert all_of(gsm8k.exact_match_reward_func, wrong, answer=gold) == [0.0] * 1000
    with_unit = [[answers(f"${number} dollars a day.")] for number in numbers]
    boxed = [[says(f"<answer>That is 2 + 2 = \\boxed{{{number}}}.</answer>")] for number in numbers]
    assert all_of(gsm8k.exact_match_reward_func, with_unit, answer=solutions) == [1.0] * 1000
    assert all_of(gsm8k.exact_match_reward_func, boxed, answer=solutions) == [1.0] * 1000
    assert all_of(gsm8k.answer_format_reward_func, right) == [0.1] * 1000
    assert all_of(gsm8k.answer_format_reward_func, [[answers(text)] for text in solutions]) == [0.0] * 1000


def test_of_a_worked_solution_what_follows_the_mark_counts():
    """Rows of GSM8K with the rewards of other tasks: each accepts the result, and no number before it."""
    gold = "First 30 * 51 = 1,530, then 1,530 + 357.\n#### 1,887"
    runs = [[turn(SUM, text), answered("", text)] for text in ("1887", "357", "1530")]
    given = {"rollout_turns": runs, "answer": [gold] * 3}
    assert calculator.result_found_reward_func(**given) == [0.5, 0.0, 0.0]
    assert calculator.exact_match_reward_func(**given) == [1.0, 0.0, 0.0]
    runs = [[turn(CALL, f"It was {text}."), answered("", text)] for text in ("Rollo", "Robert", "Lothar")]
    given = {"rollout_turns": runs, "answer": ["Robert was his son, and Lothar no relative.\n#### Rollo"] * 3}
    assert triviaqa.exist_answer_in_search_results(**given) == [0.5, 0.0, 0.0]
    assert triviaqa.exact_match_reward_func(**given) == [1.0, 0.0, 0.0]


def test_each_program_is_judged_by_itself(monkeypatch):
    """The first that prints the gold number in its last line is paid; a failed one printed nothing."""
    monkeypatch.syspath_prepend(REWARDS)  # as a recipe's loader does
    program = load("program_reward")
    assert [func.__name__ for func in program.OUTCOME_REWARD_FUNCS] == [f.__name__ for f in gsm8k.OUTCOME_REWARD_FUNCS]
    turns = [turn("", "17"), turn("", "18\n[exit code 1]", error="tool"), turn("", "18", error="tool")]
    turns += [turn("", "eggs\n$18.00\n"), turn("", "18"), turn("", called=True), answered("18", "18")]
    assert program.call_ran_reward_func([turns, []]) == [[0.1, 0.0, 0.0, 0.1, 0.1, None, None], []]
    printed = program.answer_printed_reward_func([turns, turns, []], answer=["9 + 9\n#### 18", "none", "18"])
    assert printed == [[0.0, 0.0, 0.0, 0.3, 0.0, None, None], None, []]


@pytest.mark.parametrize(
    ("results", "paid"),
    [
        (["The answer is 18"], True),
        (["total = $1,018\n eggs: 18.0 each\n\n"], True),
        (["18 of 20"], False),
        (["16 17 18 19"], False),
        (["18\nThe program printed nothing."], False),
        (["-18"], False),
        (["1.8e+01"], True),
        (["x18", "(3, 18)"], True),
        (["1e-18"], False),
        (["17", "18"], True),
        (["18", "17"], False),  # several calls in one turn are one guess
        (["18", ToolResult("18", "tool")], False),
        ([f"1e{'9' * 30}"], False),
    ],
)
def test_what_a_program_printed_is_the_last_number_of_the_last_line(results, paid, monkeypatch):
    monkeypatch.syspath_prepend(REWARDS)
    results = [ToolResult(result) if isinstance(result, str) else result for result in results]
    turns = [Turn([1], None, "", "stop", [ToolCall("code_interpreter", {})] * len(results), results)]
    assert load("program_reward").answer_printed_reward_func([turns], answer=["18"]) == [[0.3 * paid]]
