"""Tool formats: where a turn ends, what is read in it, and the ids behind it, on tokenizers without models."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from mt_grpo.formats import make_format
from mt_grpo.rollout import Parsed, ToolCall, ToolResult

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
ADD = '<tool>{"name": "add", "args": {"a": 2, "b": 3}}</tool>'
CALL = ToolCall("add", {"a": 2, "b": 3})


def byte_tokenizer(template, special, plain=(), eos=None):
    """One token per byte, and these control tokens: special ones, and added ones that are not special."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer.add_special_tokens({"eos_token": eos or special[0], "additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def chatml(**kwargs):
    kwargs.setdefault("special", ("<|im_end|>", "<|im_start|>", "<|endoftext|>"))
    kwargs.setdefault("plain", ("<think>", "</think>"))
    return byte_tokenizer(CHATML, **kwargs)


TOKENIZER = chatml()


def ids(text, tokenizer=TOKENIZER):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


PROMPT = ids("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")
OPENED = [*PROMPT, *ids("<think>\n")]
CLOSED = [*OPENED, *ids("\n</think>\n\n")]
END = ids("<|im_end|>")[0]


def read(text, prompt=PROMPT, fmt=None):
    return (fmt or make_format("xml", TOKENIZER)).parse(ids(text), prompt)


# --- what all formats share ------------------------------------------------------------------------------------------


def test_the_suffix_of_a_result_in_ids():
    fmt = make_format("xml", TOKENIZER)
    messages = fmt.results([CALL], [ToolResult("5")])
    assert messages == [{"role": "user", "content": "<result>\n5\n</result>"}]
    expected = ids("<|im_end|>\n<|im_start|>user\n<result>\n5\n</result><|im_end|>\n<|im_start|>assistant\n")
    assert expected[:3] == [END, ids("\n")[0], ids("<|im_start|>")[0]]
    assert fmt.suffix_ids([CALL], messages, ids(ADD)) == expected
    assert fmt.suffix_ids([CALL], messages, []) == expected
    assert fmt.suffix_ids([CALL], messages, [*ids(ADD), END]) == expected[1:]
    assert fmt.suffix_ids([CALL], messages, [END, 65]) == expected


def test_another_end_than_the_templates_takes_its_place():
    other = ids("<|endoftext|>")[0]
    messages = [{"role": "user", "content": "go on"}]
    expected = ids("<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    assert make_format("xml", TOKENIZER, extra_ends=[other]).suffix_ids([], messages, [65, other]) == expected[1:]
    assert make_format("xml", TOKENIZER).suffix_ids([], messages, [65, other]) == expected


@pytest.mark.parametrize("special", [True, False])
def test_the_templates_end_of_turn_ends_a_turn_special_or_not(special):
    eot = {"special": ("<eos>", "<|im_start|>"), "plain": ("<|im_end|>",)}
    tokenizer = chatml(eos="<eos>", **({"special": ("<eos>", "<|im_start|>", "<|im_end|>")} if special else eot))
    fmt = make_format("xml", tokenizer, extra_ends=[7])
    eos, end = tokenizer.convert_tokens_to_ids(["<eos>", "<|im_end|>"])
    assert fmt.ends == {7, eos, end}
    assert fmt.cut([65, end, 66], PROMPT) == (2, True)
    assert fmt.parse([65, end], PROMPT).text == tokenizer.decode([65])


def test_blanks_that_are_a_token_end_no_turn():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}assistant:", ["<eos>"], ["\n\n"]
    )
    assert make_format("xml", tokenizer).ends == {tokenizer.eos_token_id}


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_suffix_is_tokenised_as_behind_other_text(ending):
    """A tokenizer that puts a blank before every text does not put one into the middle of a conversation."""
    template = "{% for m in messages %}" + f"{{{{ m['content'] }}}}{ending} /END " + "{% endfor %}"
    tokenizer = byte_tokenizer(template, ["<eos>"])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    suffix = make_format("xml", tokenizer).suffix_ids([], [{"role": "user", "content": "go"}], [])
    assert tokenizer.decode(suffix) == f"{ending} /END go{ending} /END "


@pytest.mark.parametrize(
    "template, part",
    [
        (
            CHATML.replace("messages", "messages if m['role'] != 'user' or m['content'] == messages[0]['content']"),
            "leaves out a result",
        ),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] | length }}"), "is not in"),
        (CHATML + "{% if messages[1:2] %}{{ messages[1]['content'] | length }}{% endif %}", "is not the end of"),
        ("{{ raise_exception('no roles') }}", "cannot render a conversation of three messages: no roles"),
    ],
)
def test_a_template_that_loses_results_is_refused(template, part):
    tokenizer = chatml()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=part) as error:
        make_format("xml", tokenizer)
    assert "The chat template of" in str(error.value) and "Choose another tool_format" in str(error.value)


def test_unknown_formats_are_refused():
    with pytest.raises(ValueError, match="tool_format='json', expected one of xml"):
        make_format("json", TOKENIZER)


# --- thinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, text, calls, answer, open_thinking",
    [
        (PROMPT, "<think>The format is <answer>x</answer>", [], None, True),
        (PROMPT, "<think>The format is <answer>x</answer></think>", [], None, False),
        (PROMPT, "<think><answer>x</answer></think><answer>5</answer>", [], "5", False),
        (PROMPT, f"\n<think>\n{ADD}</think>\n{ADD}", [CALL], None, False),
        (PROMPT, f"<think>a<think>b</think>{ADD}", [CALL], None, False),  # the first </think> closes
        (PROMPT, "I <think> so: <answer>5</answer>", [], "5", False),  # anywhere else it is text
        (OPENED, f"hm {ADD}", [], None, True),
        (OPENED, f"hm {ADD}</think><answer>5</answer>", [], "5", False),
        (OPENED, "<think>hm</think><answer>5</answer>", [], "5", False),
        (CLOSED, "<answer>5</answer>", [], "5", False),
        (CLOSED, "<think><answer>5</answer>", [], None, True),
        ([*PROMPT, *ids("I said")], "<think><answer>5</answer>", [], "5", False),  # a turn that goes on
        ([*PROMPT, *ids("<think>no")], "<answer>5</answer>", [], None, True),
        (ids("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n"), "<answer>5</answer>", [], "5", False),
    ],
)
def test_tags_inside_thinking_mean_nothing(prompt, text, calls, answer, open_thinking):
    assert read(text, prompt) == Parsed(text, calls, answer, open_thinking)


def test_thinking_without_tokens_of_its_own():
    tokenizer = chatml(plain=())
    fmt = make_format("xml", tokenizer, {"opening": "<think>\n"})
    prompt = ids("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n<think>\n", tokenizer)
    assert fmt.parse(ids("<answer>5</answer>", tokenizer), prompt).open_thinking
    assert fmt.parse(ids("</think><answer>5</answer>", tokenizer), prompt).answer == "5"


def test_a_turn_ends_at_its_first_closing_tag_outside_thinking():
    fmt = make_format("xml", TOKENIZER)
    thought = f"<think>{ADD}</think>"
    assert fmt.cut(ids(f"{thought}{ADD}{ADD}"), PROMPT) == (len(ids(f"{thought}{ADD}")), True)
    assert fmt.cut(ids(f"{ADD}</think>{ADD}"), OPENED) == (len(ids(f"{ADD}</think>{ADD}")), True)
    assert fmt.cut(ids(f"<think>{ADD}"), PROMPT) == (len(ids(f"<think>{ADD}")), False)
    assert fmt.cut(ids(f"<think>{ADD}<|im_end|>{ADD}"), PROMPT) == (len(ids(f"<think>{ADD}")) + 1, True)
    assert fmt.cut([], PROMPT) == (0, False)


def test_after_a_stop_inside_thinking_only_its_close_stops():
    fmt = make_format("xml", TOKENIZER)
    stops = ("</tool>", "</answer>")
    for ids_so_far, stopped_early, next_stops in [
        ([], False, stops),
        (ids(f"<think>{ADD}"), True, ("</think>",)),
        (ids(f"<think>{ADD} hm</think>"), True, stops),
        (ids(f"<think>{ADD} hm</think>5"), False, stops),  # something else stopped it
        (ids(f"<think>{ADD} hm</think>{ADD}"), False, stops),
        (ids(f"<think>{ADD}<|im_end|>"), False, ("</think>",)),
        (ids(ADD), False, stops),
    ]:
        assert fmt.stopped_early(ids_so_far, PROMPT) == stopped_early
        assert fmt.next_stops(ids_so_far, PROMPT) == next_stops
    assert fmt.next_stops([], OPENED) == stops and fmt.next_stops(ids("a"), OPENED) == ("</think>",)


# --- xml -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", Parsed("")),
        ("5", Parsed("5")),
        (ADD, Parsed(ADD, [CALL])),
        ("<answer> 5\n</answer>", Parsed("<answer> 5\n</answer>", [], "5")),
        ("<answer></answer>", Parsed("<answer></answer>", [], "")),
        (f"<reasoning><tool></reasoning>{ADD}", Parsed(f"<reasoning><tool></reasoning>{ADD}", [CALL])),
        ("5<|im_end|>", Parsed("5")),
        ("5<|endoftext|>", Parsed("5")),
        ("</tool>", Parsed("</tool>", [ToolCall(None, {}, "</tool> without <tool> before it")])),
        ("<tool>{", Parsed("<tool>{", [ToolCall(None, {}, "the call is not closed by </tool>")])),
    ],
)  # fmt: skip
def test_xml(text, expected):
    assert read(text) == expected
