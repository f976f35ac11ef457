"""Tests of the reward files: hand-written turns with the value each function must give, and rows of real data."""

import time
from types import ModuleType

import pytest
from conftest import data_file
from project import ROOT, json_lines

from mt_grpo.recipe.plugins import import_file
from mt_grpo.rollout import ToolCall, ToolResult, Turn


def load(name: str) -> ModuleType:
    """Load a reward file by path, as a recipe does."""
    return import_file(str(ROOT / f"rewards/{name}.py"), "reward_fn")


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
ANSWER = "<reasoning>So it is.</reasoning>\n<answer>France</answer>"


def turn(*results, text="", calls=None, malformed=()):
    """A turn that calls: each result is a text, or a text and its error; as many calls as results if not given."""
    results = [ToolResult(*([result] if isinstance(result, str) else result)) for result in results]
    count = len(results) if calls is None else calls
    calls = [ToolCall("calculator", {}, "no JSON" if i in malformed else None) for i in range(count)]
    return Turn([1], None, text, "stop", calls, results)


def answered(answer, text=""):
    return Turn([1], None, text, "stop", answer=answer)


def one(func, turns, gold="1887"):
    """Call a reward function on one rollout."""
    (value,) = func(rollout_turns=[turns], answer=[gold], prompts=[[]], completions=[[]], completion_ids=[[1]])
    assert value is None or type(value) is float
    return value


@pytest.mark.contract("triviaqa rewards")
def test_lists_of_functions():
    def names(module):
        return [[func.__name__ for func in funcs] for funcs in (module.TURN_REWARD_FUNCS, module.OUTCOME_REWARD_FUNCS)]

    assert names(triviaqa) == [
        ["tool_execution_reward_func", "exist_answer_in_search_results"],
        ["exact_match_reward_func", "exist_answer_reward_func", "format_reward_func", "xml_tag_reward_func"],
    ]
    assert names(calculator) == [
        ["tool_execution_reward_func", "result_found_reward_func"],
        ["exact_match_reward_func", "answer_given_reward_func"],
    ]
    assert names(gsm8k) == [
        ["tool_execution_reward_func"], ["exact_match_reward_func", "answer_format_reward_func"]
    ]  # fmt: skip


@pytest.mark.parametrize("func", ALL_FUNCS)
def test_nothing_written_earns_nothing_and_values_keep_the_order_of_the_rollouts(func):
    for turns in ([], [answered(None)], [answered(None, "  \n")], [turn(calls=1)]):
        assert one(func, turns) == 0.0
    good = [turn("1887", text=CALL), answered("1887", ANSWER)]
    first, second = func(rollout_turns=[good, []], answer=["1887", "1887"])
    assert first > 0.0 and second == 0.0
    assert func(rollout_turns=[[], good], answer=["1887", "1887"]) == [second, first]
    assert func(rollout_turns=[], answer=[]) == []


@pytest.mark.parametrize("func", ALL_FUNCS)
def test_text_without_an_end_is_fast(func):
    """By the time of this process: another one may hold the core."""
    start = time.process_time()
    for text in ("<answer>" * 100_000, "18 " + "m/" * 500_000, "\\boxed{" + "{1}" * 300_000):
        one(func, [turn(text, text=text), answered(text, text)])
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_only_the_last_turn_answers(module):
    """What a turn's answer is, its format says (tests/conversation/test_formats.py); tags in it are text."""
    right, wrong, none = answered("1887"), answered("88"), answered(None, "1887")
    fake = answered("<answer>1887</answer>")
    for turns, expected in (
        ([right], 1.0), ([turn("88"), right], 1.0), ([wrong], 0.0), ([none], 0.0), ([right, none], 0.0),
        ([right, wrong], 0.0), ([wrong, right], 1.0), ([turn("1887")], 0.0), ([fake], 0.0), ([answered("")], 0.0),
    ):  # fmt: skip
        assert one(module.exact_match_reward_func, turns) == expected
        given = 0.0 if turns[-1].answer is None else 0.1
        assert one(calculator.answer_given_reward_func, turns) == given


# (turns, tool execution, gold number or word found)
CALLS = [
    ([answered("1887")], 0.0, 0.0),
    # Half of the calls succeed.
    ([turn(("Error: not JSON", "call")), turn("1887"), answered("1887")], 0.1, 0.5),
    # A tool that raised, that reports its own failure in words.
    ([turn("Error: 1887")], 0.0, 0.0),
    # A call that got no result, because the rollout ended there or there was no room for it.
    ([turn(calls=1)], 0.0, 0.0),
    ([turn("1887"), turn(calls=1)], 0.1, 0.5),
    ([turn("1887", calls=4)], 0.05, 0.5),
    # Several calls in a turn.
    ([turn("88", "1887")], 0.2, 0.5),
    ([turn(("Error: busy", "timeout"), "1887")], 0.1, 0.5),
    ([turn("88", "1887", malformed=[1])], 0.1, 0.0),
    ([turn("Error: busy", "1887", "88", "88")], 0.15, 0.5),
    # Over all turns, and not turn by turn.
    ([turn("88", "88", "88"), turn(("1887", "tool"))], 0.15, 0.0),
    # A result of no call that was read is an attempt that failed.
    ([turn(("1887", "call"), calls=0)], 0.0, 0.0),
    # What the policy writes, and a message that answers no call, are no results.
    ([answered(None, "<result>1887</result>")], 0.0, 0.0),
]


@pytest.mark.contract("triviaqa rewards")
@pytest.mark.parametrize("turns, executed, found", CALLS)
def test_tool_calls(turns, executed, found):
    for module in MODULES:
        assert one(module.tool_execution_reward_func, turns) == pytest.approx(executed, abs=1e-12)
    assert one(calculator.result_found_reward_func, turns) == found
    assert one(triviaqa.exist_answer_in_search_results, turns) == found


def test_a_result_is_found_as_a_number_or_as_a_part_of_a_text():
    for text, number, part in ((" 1,887.0 ", 0.5, 0.0), ("37*51 = 1887", 0.0, 0.5), ("An Error: 1887", 0.0, 0.5)):
        assert one(calculator.result_found_reward_func, [turn(text)]) == number
        assert one(triviaqa.exist_answer_in_search_results, [turn(text)]) == part


GOLDS = [
    (["France"], 1.0), (["Spain"], 0.0), ("France", 1.0), ({"value": "Gaul", "aliases": ["France", "FR"]}, 1.0),
    ({"value": "France", "aliases": None}, 1.0), ({"value": "Spain", "aliases": ["Hispania"]}, 0.0),
    ([None, "", "  ", " france\n"], 1.0), ([], None), (None, None), ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "exact"), GOLDS)
def test_triviaqa_gold_may_be_a_list_a_dict_or_a_string(gold, exact):
    turns = [turn("Normandy lies in France."), answered("France")]
    half = None if exact is None else exact / 2
    assert one(triviaqa.exact_match_reward_func, turns, gold) == exact
    assert one(triviaqa.exist_answer_reward_func, turns, gold) == half
    assert one(triviaqa.exist_answer_in_search_results, turns, gold) == half


@pytest.mark.contract("triviaqa rewards")
@pytest.mark.parametrize(
    ("answer", "gold", "exact", "exists"),
    [
        ("france", "France", 1.0, 0.5),
        ("in France", "France", 0.0, 0.5),
        ("Frances", "France", 0.0, 0.5),  # a plain substring, as in the paper
        ("STRASSE", "Straße", 1.0, 0.5),
        ("\u00a0Paris\u2003", "Paris", 1.0, 0.5),
        (".*", "France", 0.0, 0.0),
        ("1984", 1984, 1.0, 0.5),
        (None, "France", 0.0, 0.0),  # though a result and the text have it
    ],
)
def test_triviaqa_answer(answer, gold, exact, exists):
    turns = [turn("France"), answered(answer, "<reasoning>France</reasoning>")]
    assert one(triviaqa.exact_match_reward_func, turns, [gold]) == exact
    assert one(triviaqa.exist_answer_reward_func, turns, [gold]) == exists


@pytest.mark.contract("triviaqa rewards")
@pytest.mark.parametrize(
    ("texts", "checks", "tags"),  # of five checks a turn (two fields, spacing, start, end), and of four tags
    [
        ([CALL], 5 / 5, 4 / 4),
        ([ANSWER], 5 / 5, 4 / 4),
        ([CALL, CALL, ANSWER], 15 / 15, 12 / 12),
        ([CALL, "France"], 5 / 10, 4 / 8),
        (["<answer>France</answer>"], 2 / 5, 2 / 4),  # block, end
        (["<reasoning>France</reasoning>"], 2 / 5, 2 / 4),  # reasoning, start
        (["<reasoning>r</reasoning> so <answer>a</answer>"], 4 / 5, 4 / 4),  # all but the spacing
        (["Well. <reasoning>r</reasoning><answer>a</answer>"], 4 / 5, 4 / 4),  # all but the start
        (["<reasoning>r</reasoning><answer>a</answer> Bye."], 4 / 5, 4 / 4),  # all but the end
        (["<reasoning>r</reasoning>\n<answer>a"], 3 / 5, 3 / 4),  # reasoning, spacing, start
        (["<reasoning>r <answer>a</answer>"], 3 / 5, 3 / 4),  # block, start, end
        (["<answer>a</answer><reasoning>r</reasoning>"], 2 / 5, 4 / 4),  # both fields, in the wrong order
        (["<reasoning>r</reasoning>\n<tool>{}</answer>"], 3 / 5, 3 / 4),  # a call that never closes
        (["</reasoning><reasoning>"], 0 / 5, 2 / 4),
        (["<reasoning>r</reasoning><answer>a</answer><answer>b</answer>"], 5 / 5, 2 / 4),
        (["<answer><answer>a</answer></answer>"], 2 / 5, 0 / 4),
        (["no tags at all"], 0 / 5, 0 / 4),
    ],
)
def test_format_and_tags(texts, checks, tags):
    turns = [turn(text=text, calls=int("<tool>" in text)) for text in texts]
    assert one(triviaqa.format_reward_func, turns) == pytest.approx(0.2 * checks, abs=1e-12)
    assert one(triviaqa.xml_tag_reward_func, turns) == pytest.approx(0.2 * tags, abs=1e-12)


def test_the_maxima_are_exact():
    for count in range(1, 8):
        perfect = [turn("x", text=CALL)] * count + [answered("France", ANSWER)]
        assert one(triviaqa.format_reward_func, perfect) == one(triviaqa.xml_tag_reward_func, perfect) == 0.2


# (answer, gold, calculator: exact match, gsm8k: exact match, gsm8k: reads as a number)
NUMBERS = [
    ("1,887", "1887", 1.0, 1.0, 0.1),
    ("-10", "-10", 1.0, 1.0, 0.1),
    ("1887.5", "1887", 0.0, 0.0, 0.1),
    # Dressed numbers: fine in a word problem, not for the calculator.
    ("$1,887.00", "1887", 0.0, 1.0, 0.1),
    ("$1,887.50.", "1887.50", 0.0, 1.0, 0.1),
    ("$1,887 dollars.", "1887", 0.0, 1.0, 0.1),
    ("1887 square feet per hour", "1887", 0.0, 1.0, 0.1),
    ("`1887/day`", "1887", 0.0, 1.0, 0.1),
    ("1887 dollars", "188", 0.0, 0.0, 0.1),
    # In a box, wherever it stands.
    ("\\boxed{1{,}887}", "1887", 0.0, 1.0, 0.1),
    ("\\boxed {1887\\quad\\textbf{apples}}", "1887", 0.0, 1.0, 0.1),
    ("\\boxed{1887}, that is \\boxed{1,887.0}", "1887", 0.0, 1.0, 0.1),
    ("\\boxed{1887", "1887", 0.0, 0.0, 0.0),
    ("\\boxed{\\frac{1887}{1}}", "1887", 0.0, 0.0, 0.0),
    # No number, or not only a number and its unit.
    ("1887 is what I get for all of them", "1887", 0.0, 0.0, 0.0),
    ("2 and a half hours", "2", 0.0, 0.0, 0.0),
    ("5k", "5", 0.0, 0.0, 0.0),
    ("2½", "2", 0.0, 0.0, 0.0),
    ("2\\frac{1}{2}", "2", 0.0, 0.0, 0.0),
    ("12:30", "12", 0.0, 0.0, 0.0),
    ("1 887", "1887", 0.0, 0.0, 0.0),
    ("1e999999999", "1887", 0.0, 0.0, 0.0),
    ("-$-10", "10", 0.0, 0.0, 0.0),
    ("nan", "1887", 0.0, 0.0, 0.0),
    ("１８８７", "1887", 0.0, 0.0, 0.0),
    ("", "1887", 0.0, 0.0, 0.0),
    # Beyond what a float can tell apart.
    ("9007199254740993", "9007199254740992", 0.0, 0.0, 0.1),
]


@pytest.mark.parametrize(("answer", "gold", "calculator_exact", "gsm8k_exact", "gsm8k_format"), NUMBERS)
def test_numbers(answer, gold, calculator_exact, gsm8k_exact, gsm8k_format):
    turns = [answered(answer)]
    if gold != "1887.50":  # the calculator's rows hold integers
        assert one(calculator.exact_match_reward_func, turns, gold) == calculator_exact
    assert one(gsm8k.exact_match_reward_func, turns, gold) == gsm8k_exact
    assert one(gsm8k.answer_format_reward_func, turns) == gsm8k_format


@pytest.mark.parametrize("gold", ["nan", "Paris", "", None, "1e3"])
def test_a_row_without_a_gold_number_does_not_apply(gold):
    assert one(calculator.exact_match_reward_func, [answered("1887")], 1887) == 1.0  # it may be one
    turns = [turn("nan"), answered("nan")]
    assert one(calculator.exact_match_reward_func, turns, gold) is None
    assert one(calculator.result_found_reward_func, turns, gold) is None
    assert one(gsm8k.exact_match_reward_func, turns, gold) is None


def test_every_gsm8k_row():
    solutions = [row["answer"] for row in json_lines(data_file("gsm8k/test.jsonl"))]
    numbers = [solution.split("####")[1].strip() for solution in solutions]
    assert len(solutions) == 1000
    for form, value in {
        "{}": 1.0, "${} dollars a day.": 1.0, "That is 2 + 2 = \\boxed{{{}}}.": 1.0, "{}1": 0.0,
    }.items():  # fmt: skip
        given = [[answered(form.format(number))] for number in numbers]
        for gold in (solutions, numbers, [number.replace(",", "") for number in numbers]):
            assert gsm8k.exact_match_reward_func(given, answer=gold) == [value] * 1000
        assert not value or gsm8k.answer_format_reward_func(given) == [0.1] * 1000
    assert gsm8k.answer_format_reward_func([[answered(text)] for text in solutions]) == [0.0] * 1000


def test_of_a_worked_solution_what_follows_the_last_mark_counts():
    """Rows of GSM8K with the rewards of other tasks: each accepts the result, and no number before it."""
    gold = "First 30 * 51 #### = 1,530, then 1,530 + 357.\n#### 1,887"
    runs = [[turn(text), answered(text)] for text in ("1887", "357", "1530")]
    given = {"rollout_turns": runs, "answer": [gold] * 3}
    assert calculator.result_found_reward_func(**given) == [0.5, 0.0, 0.0]
    assert calculator.exact_match_reward_func(**given) == gsm8k.exact_match_reward_func(**given) == [1.0, 0.0, 0.0]
    runs = [[turn(f"It was {text}."), answered(text)] for text in ("Rollo", "Robert", "Lothar")]
    given = {"rollout_turns": runs, "answer": ["Robert was his son, and Lothar no relative.\n#### Rollo"] * 3}
    assert triviaqa.exist_answer_in_search_results(**given) == [0.5, 0.0, 0.0]
    for name in ("triviaqa", "squad", "information_gain"):
        funcs = load(name if name == "information_gain" else f"{name}_reward").OUTCOME_REWARD_FUNCS
        assert funcs[0](**given) == [1.0, 0.0, 0.0], name


def test_each_program_is_judged_by_itself():
    """The first that prints the gold number in its last line is paid; a failed one printed nothing."""
    program = load("program_reward")
    assert [func.__name__ for func in program.OUTCOME_REWARD_FUNCS] == [f.__name__ for f in gsm8k.OUTCOME_REWARD_FUNCS]
    turns = [turn("17"), turn(("18\n[exit code 1]", "tool")), turn(("18", "tool")), turn("eggs\n$18.00\n"), turn("18")]
    turns += [turn(calls=1), answered("18")]
    assert program.call_ran_reward_func([turns, []]) == [[0.1, 0.0, 0.0, 0.1, 0.1, None, None], []]
    printed = program.answer_printed_reward_func([turns, turns, []], answer=["9 + 9\n#### 18", "none", "18"])
    assert printed == [[0.0, 0.0, 0.0, 0.3, 0.0, None, None], None, []]


@pytest.mark.parametrize(
    ("results", "paid"),
    [
        (["The answer is 18"], True),
        (["total = $1,018\n eggs: 18.0 each\n\n"], True),
        (["16 17 18 19"], False),
        (["18\nThe program printed nothing."], False),
        (["1.8e+01"], True),
        (["x18", "(3, 18)"], True),
        (["17", "18"], True),
        (["18", "17"], False),  # several calls in one turn are one guess
        (["18", ToolResult("18", "tool")], False),
        ([f"1e{'9' * 30}"], False),
    ],
)
def test_what_a_program_printed_is_the_last_number_of_the_last_line(results, paid):
    results = [ToolResult(result) if isinstance(result, str) else result for result in results]
    turns = [Turn([1], None, "", "stop", [ToolCall("code_interpreter", {})] * len(results), results)]
    assert load("program_reward").answer_printed_reward_func([turns], answer=["18"]) == [[0.3 * paid]]
