"""Tool formats: where a turn ends, what is read in it, and the ids behind it, on tokenizers without models."""

import contextlib
import functools
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from mt_grpo.conversation.formats.base import SEVERAL_CALLS
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.rollout import Origin, Parsed, ToolCall, ToolResult

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
ADD = '<tool>{"name": "add", "args": {"a": 2, "b": 3}}</tool>'
CALL = ToolCall("add", {"a": 2, "b": 3})


def byte_tokenizer(template, special, plain=(), eos=None, merges=False):
    """One token per byte, or some more, and these control tokens: special ones, and added ones that are not."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    if merges:
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        bpe.train_from_iterator([template], trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer.add_special_tokens({"eos_token": eos or special[0], "additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


# These end a turn of GLM 4 or Gemma 4, and open the next message.
HEADERS = ("<|user|>", "<|observation|>", "<|tool_response>")


@functools.cache
def formats_of_trl(tool_format):
    """Name -> format for each chat template of TRL's that takes conversations; `<|other_end|>` ends a turn, too."""
    formats = {}
    for path in sorted(TEMPLATES.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        found = dict.fromkeys(re.findall(r"<[|｜][^<>{}'\"\s]+?[|｜]>|<\|?[a-z_]+\|?>|\[/?[A-Z_]{2,}\]", template))
        plain = [t for t in found if any(name in t for name in ("think", "arg_", "tool_call>", "response>"))]
        special = [*(t for t in found if t not in plain), "</s>", "<|other_end|>"]
        tokenizer = byte_tokenizer(template, special, plain, eos="</s>")
        with contextlib.suppress(ValueError):  # has no tools, or takes pictures alone
            ends = tokenizer.convert_tokens_to_ids(["<|other_end|>"])
            formats[path.stem] = TOOL_FORMATS[tool_format](tokenizer, extra_ends=ends)
    return formats


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
ASKED = {"role": "user", "content": "?"}
XML_FORMAT = TOOL_FORMATS["xml"](TOKENIZER)


@pytest.mark.contract("xml")
def test_the_suffix_of_a_result_in_ids():
    messages = XML_FORMAT.results([CALL], [ToolResult("5")])
    assert messages == [{"role": "user", "content": "<result>\n5\n</result>"}]
    expected = ids("<|im_end|>\n<|im_start|>user\n<result>\n5\n</result><|im_end|>\n<|im_start|>assistant\n")
    assert expected[:3] == [END, ids("\n")[0], ids("<|im_start|>")[0]]
    for sampled, there in ((ids(ADD), 0), ([], 0), ([*ids(ADD), END], 1), ([END, 65], 0)):
        assert XML_FORMAT.suffix_ids([CALL], messages, sampled) == expected[there:]


@pytest.mark.parametrize("special", [True, False])
def test_the_templates_end_of_turn_ends_a_turn_special_or_not(special):
    eot = {"special": ("<eos>", "<|im_start|>"), "plain": ("<|im_end|>",)}
    tokenizer = chatml(eos="<eos>", **({"special": ("<eos>", "<|im_start|>", "<|im_end|>")} if special else eot))
    fmt = TOOL_FORMATS["xml"](tokenizer, extra_ends=[7])
    eos, end = tokenizer.convert_tokens_to_ids(["<eos>", "<|im_end|>"])
    assert fmt.ends == {7, eos, end}
    assert fmt.cut([65, end, 66], PROMPT) == (2, True)
    assert fmt.parse([65, end], PROMPT).text == tokenizer.decode([65])


def test_blanks_end_no_turn_and_thinking_needs_no_token():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}assistant:", ["<eos>"], ["\n\n"]
    )
    assert TOOL_FORMATS["xml"](tokenizer).ends == {tokenizer.eos_token_id}
    tokenizer = chatml(plain=())
    fmt = TOOL_FORMATS["xml"](tokenizer, {"opening": "<think>\n"})
    prompt = ids("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n<think>\n", tokenizer)
    assert fmt.parse(ids("<answer>5</answer>", tokenizer), prompt).open_thinking
    assert fmt.parse(ids("</think><answer>5</answer>", tokenizer), prompt).answer == "5"


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_suffix_is_tokenised_as_behind_other_text(ending):
    """A tokenizer that puts a blank before every text does not put one into the middle of a conversation."""
    template = "{% for m in messages %}" + f"{{{{ m['content'] }}}}{ending} /END " + "{% endfor %}"
    tokenizer = byte_tokenizer(template, ["<eos>"])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    suffix = TOOL_FORMATS["xml"](tokenizer).suffix_ids([], [{"role": "user", "content": "go"}], [])
    assert tokenizer.decode(suffix) == f"{ending} /END go{ending} /END "


FIRST_USER = "messages if m['role'] != 'user' or m['content'] == messages[0]['content']"


@pytest.mark.parametrize(
    "template, part",
    [
        (CHATML.replace("messages", FIRST_USER), "leaves out a result"),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] | length }}"), "is not in"),
        (CHATML + "{% if messages[1:2] %}{{ messages[1]['content'] | length }}{% endif %}", "is not the end of"),
        ("{{ raise_exception('no roles') }}", "does not work with this tool_format: no roles"),
    ],
)
def test_a_template_that_loses_results_is_refused(template, part):
    tokenizer = chatml()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=rf"The chat template of .*{part}.*Use another tool_format"):
        TOOL_FORMATS["xml"](tokenizer)


@pytest.mark.parametrize("name", ["xml", "native"])
def test_arguments_that_a_chat_template_does_not_read_are_warned_of(name, caplog):
    tokenizer = tokenizer_of("qwen3")
    TOOL_FORMATS[name](tokenizer, {"enable_thinking": False, "continue_final_message": False})
    assert not caplog.records
    for _ in range(2):
        TOOL_FORMATS[name](tokenizer, {f"{name}_thinking": False})
    assert [record.getMessage().count(f"'{name}_thinking'") for record in caplog.records] == [1]


@pytest.mark.contract("xml")
@pytest.mark.parametrize(
    "prompt, text, calls, answer, open_thinking",
    [
        (PROMPT, "5", [], None, False),
        (PROMPT, "<answer> 5\n</answer>", [], "5", False),
        (PROMPT, "<answer></answer>", [], "", False),
        (PROMPT, f"<reasoning><tool></reasoning>{ADD}", [CALL], None, False),
        (PROMPT, f"<reasoning><answer></reasoning>{ADD}", [CALL], None, False),
        (PROMPT, "<think>by <tool></think>I do not know", [], None, False),
        (PROMPT, "<answer>5</answer></tool>", [], "5", False),
        (PROMPT, "5</answer><answer>", [], None, False),
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
def test_xml(prompt, text, calls, answer, open_thinking):
    """Tags inside thinking mean nothing, and the token that ended the turn is not in its text."""
    for end in ("", "<|im_end|>", "<|endoftext|>"):
        assert XML_FORMAT.parse(ids(text + end), prompt) == Parsed(text, calls, answer, open_thinking)


THOUGHT, STOPS = f"<think>{ADD}</think>", ("</tool>", "</answer>")


@pytest.mark.parametrize(
    "prompt, text, turn, stopped_early, next_stops",  # the turn that ends in the text, and what another request does
    [
        (PROMPT, f"{THOUGHT}{ADD}{ADD}", f"{THOUGHT}{ADD}", False, STOPS),
        (OPENED, f"{ADD}</think>{ADD}", f"{ADD}</think>{ADD}", False, STOPS),
        (PROMPT, f"<think>{ADD}<|im_end|>{ADD}", f"<think>{ADD}<|im_end|>", False, ("</think>",)),
        (PROMPT, f"<think>{ADD}", None, True, ("</think>",)),
        (PROMPT, f"<think>{ADD} hm</think>", None, True, STOPS),
        (PROMPT, f"<think>{ADD} hm</think>5", None, False, STOPS),  # something else stopped it
        (PROMPT, f"<think>{ADD} hm</think>{ADD}", f"<think>{ADD} hm</think>{ADD}", False, STOPS),
        (PROMPT, ADD, ADD, False, STOPS),
        (PROMPT, "", None, False, STOPS),
        (OPENED, "", None, False, STOPS),
        (OPENED, "a", None, True, ("</think>",)),
    ],
)
def test_a_turn_ends_at_its_first_closing_tag_outside_thinking(prompt, text, turn, stopped_early, next_stops):
    """After a stop inside the thinking, only the end of the thinking stops the next request."""
    sampled = ids(text)
    assert XML_FORMAT.cut(sampled, prompt) == (len(sampled) if turn is None else len(ids(turn)), turn is not None)
    assert XML_FORMAT.stopped_early(sampled, prompt) == stopped_early
    assert XML_FORMAT.next_stops(sampled, prompt) == next_stops


def add(a: int, b: str = "") -> str:
    """Add things.

    Args:
        a: A number.
        b: A text.
    """


TOOLS = {"add": add}
TWO = [ToolCall("add", {"a": 2, "b": "x y"}), ToolCall("add", {"a": 3, "b": "7"})]
JSON = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n<parameter=b>\n%s\n</parameter>\n</function>"
XML += "\n</tool_call>"
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n<arg_key>b</arg_key>\n<arg_value>%s</arg_value>"
)
GLM += "\n</tool_call>"
GEMMA = '<|tool_call>call:add{a:%s,b:<|"|>%s<|"|>}<tool_call|>'
DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n%s\n```<｜tool▁call▁end｜>"
LLAMA = '{"name": "add", "parameters": %s}'
FIRST, SECOND = '{"a": 2, "b": "x y"}', '{"a": 3, "b": "7"}'
CHATML_TOKENS = (
    ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
    ("<tool_call>", "</tool_call>", "<think>", "</think>"),
)
GEMMA_TOKENS = (
    ("<eos>", "<turn|>", "<|turn>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    ('<|"|>', "<|channel>", "<channel|>"),
)
RESULTS = [ToolResult("5"), ToolResult("six\n")]
QWEN_RESULTS = "<tool_response>\n5\n</tool_response>\n<tool_response>\nsix\n\n</tool_response>"


class Family(NamedTuple):
    """What is expected of one family of models, written by hand."""

    tokens: tuple
    ends: set  # texts of the ids that end a turn
    thinking: str  # a thought, from the generation prompt on
    first: str  # the first of TWO, as the model writes it
    second: str
    broken: str
    suffix: str  # behind two results (one where a turn holds one call), the end of turn included
    around: str = "%s"  # stands around all calls of a turn
    between: str = "\n"
    several: bool = True


def qwen(first, second, broken, thinking, prompt="", results=QWEN_RESULTS):
    suffix = f"<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n{prompt}"
    return Family(CHATML_TOKENS, {"<|im_end|>"}, thinking, first, second, broken, suffix)


FAMILIES = {
    **dict.fromkeys(
        ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"),
        qwen(JSON % FIRST, JSON % SECOND, JSON % '{"a": ', "<think>\nhm %s\n</think>\n\n"),
    ),
    **dict.fromkeys(
        ("qwen3_5_think", "qwen3_6", "qwen3_8"),
        qwen(XML % (2, "x y"), XML % (3, "7"), "<tool_call>\nadd(2)\n</tool_call>", "hm %s\n</think>\n\n",
             "<think>\n", QWEN_RESULTS.replace("six\n\n", "six\n")),
    ),
    **dict.fromkeys(
        ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"),
        qwen(XML % (2, "x y"), XML % (3, "7"), "<tool_call>\n<function=add>2</function>\n</tool_call>",
             "hm %s\n</think>\n", "<think>\n", QWEN_RESULTS + "\n"),
    ),
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), Family(
        GEMMA_TOKENS, {"<eos>", "<turn|>", "<|tool_response>"},
        "<|channel>thought\nhm %s\n<channel|>", GEMMA % (2, "x y"), GEMMA % (3, "7"),
        "<|tool_call>call:add{a:}<tool_call|>",
        '<|tool_response>response:add{value:<|"|>5<|"|>}<tool_response|>'
        '<|tool_response>response:add{value:<|"|>six\n<|"|>}<tool_response|>',
        between="",
    )),
    **dict.fromkeys(("llama3_1", "llama3_2"), Family(
        (("<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"), ()), {"<|eot_id|>"}, "",
        LLAMA % FIRST, "<|python_tag|>" + LLAMA % SECOND, LLAMA % '{"a": ',
        '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"5"'
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", between="; ", several=False,
    )),
    "glm4moe": Family(
        (("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"), ("<think>", "</think>")),
        {"<|endoftext|>", "<|user|>", "<|observation|>"}, "\n<think>hm %s</think>\n",
        GLM % (2, "x y"), GLM % (3, "7"), "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>",
        f"<|observation|>\n{QWEN_RESULTS}<|assistant|>",
    ),
    "deepseekv3": Family(
        (("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"), ("<｜tool▁call▁begin｜>",)),
        {"<｜end▁of▁sentence｜>"}, "hm %s\n</think>\n\n", DEEPSEEK % FIRST, DEEPSEEK % SECOND, DEEPSEEK % '{"a": ',
        "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>5<｜tool▁output▁end｜>"
        "<｜tool▁output▁begin｜>six\n<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        around="<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>",
    ),
    "gptoss": Family(
        (("<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"), ()),
        {"<|return|>", "<|call|>"}, "<|channel|>analysis<|message|>hm %s<|end|><|start|>assistant",
        " to=functions.add<|channel|>commentary json<|message|>" + FIRST,
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>" + SECOND,
        " to=functions.add<|channel|>commentary json<|message|>{",
        '<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|><|start|>assistant',
        between="<|end|><|start|>assistant", several=False,
    ),
}  # fmt: skip
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


@functools.cache
def tokenizer_of(template):
    """A tokenizer with merges, as GPT-2's: what stands beside a text decides how it is cut."""
    family = FAMILIES[template]
    return byte_tokenizer((TEMPLATES / f"{template}.jinja").read_text(), *family.tokens, merges=True)


@functools.cache
def native(template, **kwargs):
    return TOOL_FORMATS["native"](tokenizer_of(template), kwargs)


def prompt_of(fmt):
    return fmt.tokenizer.apply_chat_template(**fmt.prompt([{"role": "user", "content": "2 + 'x y' in add?"}], TOOLS))


def parse(fmt, text):
    return fmt.parse(ids(text, fmt.tokenizer), prompt_of(fmt), TOOLS)


@pytest.mark.parametrize("name, template, text", [
    ("xml", "qwen2_5", "< |im_end|>"), ("hermes", "qwen2_5", "< |im_end|>"), ("xml", "deepseekv3", "<|im_end|>")
])  # fmt: skip
def test_arguments_as_text_are_written_once(name, template, text):
    """As OpenAI's API has them, whatever the template takes; a control token does not hide behind an escape."""
    special = CHATML_TOKENS[0] if template == "qwen2_5" else ("<eos>",)
    fmt = TOOL_FORMATS[name](byte_tokenizer((TEMPLATES / f"{template}.jinja").read_text(), special))
    for arguments in ('{"a": 2, "b": "\\u003c|im_end|>"}', {"a": 2, "b": "<|im_end|>"}):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        read = fmt.clean([{"role": "assistant", "content": "", "tool_calls": [call]}], Origin.OUTSIDE)
        assert f'{{"a": 2, "b": "{text}"}}' in fmt._render([ASKED, *read])


@pytest.mark.contract("native")
@EVERY_FAMILY
def test_the_suffix_of_results_of_a_family(name):
    family, fmt = FAMILIES[name], native(name)
    assert set(fmt.tokenizer.convert_ids_to_tokens(sorted(fmt.ends))) == family.ends
    number = 2 if family.several else 1
    messages = fmt.results(TWO[:number], RESULTS[:number])
    suffix = fmt.suffix_ids(TWO[:number], messages, ids("x", fmt.tokenizer))
    expected = ids(family.suffix, fmt.tokenizer)
    if name.startswith("nemotron"):  # its template ends a line before the end of turn
        expected = ids("\n" + family.suffix, fmt.tokenizer)
    assert suffix == expected
    whole = fmt._render([ASKED, fmt.turn_message(TWO[:number]), *messages], tools=[tool_schema("add", add)])
    assert ids(whole, fmt.tokenizer)[-len(suffix) :] == suffix


@pytest.mark.parametrize("tool_format", ["native", "xml"])
def test_an_end_of_turn_that_opens_the_next_message_stands_after_another_end(tool_format):
    """For every template of TRL's: the header of the next message is there once, whatever ended the turn."""
    tried, other = 0, "<|other_end|>"
    for name, fmt in formats_of_trl(tool_format).items():
        for calls in ([], TWO[:1]) if tool_format == "native" else ([],):
            messages = fmt.results(calls, RESULTS[:1]) if calls else [{"role": "user", "content": "go on"}]
            whole = fmt.suffix(calls, messages)
            closing = re.match(r"\s*(<[^<>]+>)?", whole)
            for end in (closing[1] or other, other):
                sampled = fmt.tokenizer.convert_tokens_to_ids([end])
                if not fmt.ends.issuperset(sampled):
                    continue  # ends the thinking, too
                stands = closing[1] in HEADERS and end != closing[1]
                expected = whole if stands or not closing[1] else whole[closing.end() :]
                assert fmt.tokenizer.decode(fmt.suffix_ids(calls, messages, sampled)) == expected, (name, end)
                tried += 1
    assert tried > 60


def squeezed(text):
    return "".join(text.split())


@pytest.mark.parametrize("tool_format", ["native", "xml"])
def test_thinking_of_a_history_is_written_in_its_tags_or_left_out(tool_format):
    """For every template of TRL's: a turn as it was sampled, in a history that is rendered again."""
    tried = 0
    for name, fmt in formats_of_trl(tool_format).items():
        opening, closing = fmt.thinking
        assert (closing == "<channel|>") == name.startswith(("gemma4", "diffusion_gemma")), name
        opened = fmt._render([ASKED]).rstrip().endswith(opening.strip())
        written = fmt._render([ASKED, {"role": "assistant", "content": "Then."}])
        final = (
            "<|start|>assistant<|channel|>final<|message|>" if (tool_format, closing) == ("native", "<|end|>") else ""
        )
        for following in ([], [ASKED], fmt.results(TWO[:1], RESULTS[:1])):
            turn = f"{final}Then."
            if following and following[0]["role"] == "tool":
                called = fmt._render([ASKED, fmt.turn_message(TWO[:1])], add_generation_prompt=False)
                turn = re.search(f"(?:{fmt.begins}).*?(?:{fmt.closes})", called, re.DOTALL)[0].strip()
            turn = {"role": "assistant", "content": f"{'' if opened else opening}T-one{closing}{turn}"}
            shown = {**fmt.prompt([ASKED, turn, *following], {}), "add_generation_prompt": False, "tokenize": False}
            rendered = squeezed(fmt.tokenizer.apply_chat_template(**shown))
            assert rendered.count(squeezed(f"{opening}T-one{closing}")) == ("T-one" in rendered), (name, rendered)
            assert "T-one" not in rendered or squeezed(opening + closing) not in rendered, (name, rendered)
            assert rendered.count(closing) - squeezed(written).count(closing) < 2 or "gptoss" in name
            tried += 1
    assert tried > 60


@EVERY_FAMILY
def test_values_of_a_family_are_read_as_the_template_writes_them(name):
    for text in (r"C:\new\table", r"\d+\b", "a\\\nb", "C:\\"):
        call, fmt = ToolCall("add", {"a": 2, "b": text}), native(name)
        written = fmt._render([ASKED, fmt.turn_message([call])])
        assert fmt.syntax.split(written, TOOLS)[0] == [call], written


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_keys_of_a_call_of_llama_in_any_order(name):
    fmt = native(name)
    for text in (
        '{"type": "function", "name": "add", "parameters": {"a": 2}}',
        '{"parameters": {"a": 2}, "name": "add"}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 2}, "type": "function"}',
    ):
        parsed = parse(fmt, text)
        assert parsed.calls == [ToolCall("add", {"a": 2})] and parsed.answer is None
    answers = ('{"name": "Ada", "age": 36}', '{"type": "person", "name": "Ada"}', '{"parameters": {}, "result": 5}',
               '{"body": {"parameters": {"q": 1}}, "name": "x"}', 'Say {"arguments": {"lr": 1}}.')  # fmt: skip
    for text in answers:
        assert parse(fmt, text).calls == [] and parse(fmt, text).answer == text


@pytest.mark.contract("native")
@EVERY_FAMILY
def test_calls_of_a_family(name):
    family, fmt = FAMILIES[name], native(name)
    opened = "\n</think>\n" if "</think>" in family.thinking and "<think>" not in family.thinking else ""
    end = sorted(fmt.ends)[0]

    def calls(*texts, before=""):
        turn = opened + before + family.around % family.between.join(texts)
        sampled = [*ids(turn, fmt.tokenizer), end]
        assert fmt.cut(sampled + [65], prompt_of(fmt)) == (len(sampled), True)
        parsed = fmt.parse(sampled, prompt_of(fmt), TOOLS)
        assert parsed.text == turn and parsed.answer is None and not parsed.open_thinking
        return parsed.calls

    assert calls(family.first) == TWO[:1] and calls(family.second) == TWO[1:]
    assert calls(family.first, before="I add.\n" if name != "gptoss" else "") == TWO[:1]
    (broken,) = calls(family.broken)
    assert broken.error and broken.name in (None, "add")
    if family.several:
        assert calls(family.first, family.second) == TWO
        assert calls(family.first, family.broken, family.second) == [TWO[0], broken, TWO[1]]
        assert [call.error for call in calls(*[family.first] * 33)] == [SEVERAL_CALLS]  # a repetition
    else:
        assert [call.error for call in calls(family.first, family.second)] == [SEVERAL_CALLS]


@EVERY_FAMILY
def test_thinking_of_a_family(name):
    family, fmt = FAMILIES[name], native(name)
    if not family.thinking:
        return
    call = family.around % family.first
    thought = family.thinking % call
    assert parse(fmt, thought + call).calls == TWO[:1]
    final = "<|channel|>final<|message|>" if name == "gptoss" else ""
    assert parse(fmt, f"{thought}{final}It is 5.") == Parsed(f"{thought}{final}It is 5.", [], "It is 5.")
    assert parse(fmt, f"{thought}{final}So <answer> 5 </answer>!").answer == "5"
    assert parse(fmt, f"{thought}{final}").answer is None
    unclosed = thought[: thought.index(call)] + call
    assert parse(fmt, unclosed) == Parsed(unclosed, [], None, True)
    assert fmt.next_stops(ids(unclosed, fmt.tokenizer), prompt_of(fmt)) == ()
    assert not fmt.stopped_early(ids(unclosed, fmt.tokenizer), prompt_of(fmt))


@EVERY_FAMILY
def test_an_edited_history_of_a_family_keeps_its_results(name):
    """Its turns are text. Where the template loses results behind calls in a text, it gets the calls as calls."""
    family, fmt = FAMILIES[name], native(name)
    calls, texts = TWO[: 1 + family.several], [family.first, family.second][: 1 + family.several]

    def rendered(text, *results):
        turn = {"role": "assistant", "content": family.around % text} if isinstance(text, str) else text
        messages = [ASKED, turn, *fmt.results(calls, [ToolResult(each) for each in results])]
        return fmt.tokenizer.apply_chat_template(**{**fmt.prompt(messages, TOOLS), "tokenize": False})

    written = rendered(family.between.join(texts), "result-0", "result-1")
    assert all(part in written for k in range(len(calls)) for part in (f"result-{k}", ("x y", "7")[k]))
    if not fmt.keeps_results:
        assert written == rendered(fmt.turn_message(calls), "result-0", "result-1")
        assert "cannot be read" in rendered(family.broken, "it cannot be read")
        # A call that was only thought is not that of a result.
        thought = family.thinking % (family.around % family.first) + family.around % family.second
        history = [ASKED, {"role": "assistant", "content": thought}, *fmt.results(TWO[1:], RESULTS[:1])]
        (call,) = fmt.with_calls(history, TOOLS)[1]["tool_calls"]
        assert fmt._with_arguments(call)["function"]["arguments"] == fmt.arguments(TWO[1].arguments)


IN_TAGS = {
    "gptoss": "<|channel|>analysis<|message|>a <answer>1</answer><|end|><|start|>assistant<|channel|>final<|message|>",
    "gemma4": "<|channel>thought\na <answer>1</answer>\n<channel|>",
    "qwen3": "<think>a <answer>1</answer></think>",
}


@pytest.mark.parametrize("name, thought", IN_TAGS.items())
def test_thinking_of_a_family_in_the_papers_tags(name, thought):
    fmt, text = TOOL_FORMATS["xml"](tokenizer_of(name)), f"{thought}<answer>5</answer>"
    prompt = fmt.tokenizer.apply_chat_template(**fmt.prompt([{"role": "user", "content": "?"}], {}))
    assert fmt.parse(ids(text, fmt.tokenizer), prompt).answer == "5"
    assert fmt.cut(ids(text + " more", fmt.tokenizer), prompt) == (len(ids(text, fmt.tokenizer)), True)
    stopped = ids(text[: text.index("</answer>") + 9], fmt.tokenizer)
    assert fmt.stopped_early(stopped, prompt) and fmt.parse(stopped, prompt).open_thinking


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@EVERY_FAMILY
def test_a_family_with_thinking_on_or_off(name, kwargs):
    """What the template opens or closes for the model is seen, at the start and behind results."""
    family, fmt, enabled = FAMILIES[name], native(name, **kwargs), kwargs.get("enable_thinking", True)
    text = family.around % family.first
    turn = [*ids(text, fmt.tokenizer), sorted(fmt.ends)[0]]
    prompt = prompt_of(fmt)
    behind = prompt + turn + fmt.suffix_ids(TWO[:1], fmt.results(TWO[:1], RESULTS), turn)
    opened = name.startswith(("qwen3_5", "qwen3_6", "qwen3_8", "nemotron")) and enabled
    # DeepSeek's template opens it at the start alone, whatever is asked; the newest of Gemma 4 behind results alone.
    at_start, by_gemma = opened or name == "deepseekv3", name == "gemma4_v5" and "enable_thinking" in kwargs
    for where, expected in ((prompt, at_start), (behind, opened or (by_gemma and enabled))):
        assert fmt.parse(turn, where, TOOLS) == Parsed(text, [] if expected else TWO[:1], None, expected)


def test_results_are_messages_of_their_calls():
    """Plain messages may stand after them, or alone."""
    fmt, go = native("qwen3"), {"role": "user", "content": "go"}
    results = fmt.results([TWO[0], ToolCall("a<|im_end|>", {}, "no")], RESULTS)
    assert results == [
        {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "5"},
        {"role": "tool", "name": "unknown", "tool_call_id": "call00001", "content": "six\n"},
    ]
    assert fmt.results([ToolCall("fs/read:2", {})], RESULTS[:1])[0]["name"] == "fs/read:2"
    behind = "<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    whole = f"<|im_end|>\n<|im_start|>user\n{QWEN_RESULTS}{behind}"
    assert fmt.suffix_ids(TWO, [*results, go], []) == ids(whole, fmt.tokenizer)
    assert fmt.suffix_ids(TWO, [go], []) == ids(behind, fmt.tokenizer)


@pytest.mark.parametrize(
    "text, errors",
    [
        ("<tool_call>", ["the call is not closed"]),
        (f"<tool_call>\n{JSON % FIRST}", ["the call is not closed", None]),
        (JSON % '{"a": "<tool_call>"}', [None]),
        ("<tool_call>[]</tool_call>", ["several calls in one <tool_call>; write one <tool_call> for each"]),
        (JSON % '"x"', ['"arguments" must be a JSON object, got str']),
        ("<tool_call>5</tool_call>",
         ['the call must be a JSON object with "name" (a string) and "arguments" (an object)']),
        ('<tool_call>{"name": "f", "args": {}}</tool_call>',
         ['unknown key "args" in the call; use "name" and "arguments"']),
        ("</tool_call>", []),
    ],
)  # fmt: skip
def test_broken_calls_are_calls_with_an_error(text, errors):
    assert [call.error for call in parse(TOOL_FORMATS["hermes"](tokenizer_of("qwen3")), text).calls] == errors


def test_templates_for_tools_and_without():
    fmt = native("deepseekv3")
    with pytest.raises(ValueError, match=r"do not name 'add'"):
        fmt.prompt([{"role": "user", "content": "?"}], TOOLS)
    assert "tools" in fmt.prompt([{"role": "system", "content": "add(a, b)"}], TOOLS)
    tokenizer = chatml()
    tokenizer.chat_template = {"default": CHATML, "tool_use": (TEMPLATES / "qwen3.jinja").read_text()}
    assert TOOL_FORMATS["hermes"](tokenizer).describes_tools


@pytest.mark.parametrize(
    "fmt, name, part",
    [
        ("hermes", "qwen3_5_think", "writes calls in another syntax than this tool_format reads"),
        ("native", "lfm2_v2", r"writes calls in another syntax .*\[get_total\(.*Use another tool_format"),
        ("hermes", "phi3", "has no tool support: it leaves calls out"),
        ("native", "idefics3", "cannot render calls"),
    ],
)
def test_templates_without_a_known_syntax_are_refused(fmt, name, part):
    tokenizer = byte_tokenizer((TEMPLATES / f"{name}.jinja").read_text(), ["<eos>"])
    tokenizer.bos_token = "<eos>"
    with pytest.raises(ValueError, match=part):
        TOOL_FORMATS[fmt](tokenizer)


@pytest.mark.parametrize("fmt, name", [("xml", "qwen3"), ("hermes", "qwen3"), *(("native", n) for n in FAMILIES)])
def test_no_text_of_a_model_raises(fmt, name):
    """Texts of parts that the syntax is made of, cut and mixed."""
    fmt, family, rng = TOOL_FORMATS[fmt](tokenizer_of(name)), FAMILIES[name], random.Random(0)
    prompt = prompt_of(native(name))
    whole = f"{family.thinking}{family.around % family.first}{family.second}{family.broken}<answer>5</answer>{ADD}"
    parts = re.findall(r"\w+|\s+|.", whole, re.DOTALL) + [*fmt.tokenizer.get_added_vocab(), "[" * 300, "9" * 5000]
    for _ in range(40):
        a, b = sorted(rng.choices(range(len(whole)), k=2))
        text = whole[a:b] if rng.random() < 0.3 else "".join(rng.choices(parts, k=rng.randrange(40)))
        sampled = ids(text, fmt.tokenizer)
        parsed = fmt.parse(sampled, prompt, TOOLS)
        assert all(call.error or call.name in (*TOOLS, *re.findall(r"\w+", text)) for call in parsed.calls)
        length, ended = fmt.cut(sampled, prompt)
        assert 0 <= length <= len(sampled) and (ended or length == len(sampled))
        for prefix in ([], sampled[: len(sampled) // 2]):
            assert isinstance(fmt.stopped_early(prefix, prompt), bool) and fmt.next_stops(prefix, prompt) is not None
