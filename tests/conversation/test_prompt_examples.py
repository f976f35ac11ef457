"""`prompt_examples`: conversations before the question, as the model reads them, never trained; what is none."""

import json

import pytest
from datasets import Dataset
from scripted import ANSWER, CHATML_TOKENIZER, Scripted
from test_formats import EVERY_FAMILY, TOOLS, TWO, native
from test_trainer import settings

from mt_grpo.conversation.conversations import read_prompt_examples, written_examples
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.rollout import ToolResult, join
from mt_grpo.training.shared_prompts import SharedRow
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv


def double(number: int, unit: str = "") -> str:
    """Double a number."""
    return f"{2 * number} {unit}".strip()


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls):
    written = [{"name": "double", "arguments": arguments} for arguments in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": written} if calls else {})}


def tool(text):
    return {"role": "tool", "content": text}


STRUCTURED = [user("Double 4 km."), assistant("I ask.", {"number": 4, "unit": "km"}), tool("8 km"),
              assistant("<answer>8 km</answer>")]  # fmt: skip
CALL = '<tool>{"name": "double", "args": {"number": 4, "unit": "km"}}</tool>'
IN_TEXT = [STRUCTURED[0], assistant(f"I ask.\n{CALL}"), *STRUCTURED[2:]]
PLAIN = [user("Hello"), assistant("<answer>Hello!</answer>")]


def written(*turns):
    """A conversation in ChatML, up to the next generation prompt."""
    texts = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns]
    return "".join([*texts, "<|im_start|>assistant\n"])


LIVED = [("user", "Double 4 km."), ("assistant", f"I ask.\n{CALL}"), ("user", "<result>\n8 km\n</result>"),
         ("assistant", "<answer>8 km</answer>")]  # fmt: skip
HELLO = [("user", "Hello"), ("assistant", "<answer>Hello!</answer>")]


def make_env(*examples, system="Be short.", tools=(double,), **kwargs):
    return MultiTurnToolEnv(list(tools), system, tokenizer=CHATML_TOKENIZER, prompt_examples=list(examples), **kwargs)


@pytest.mark.parametrize("example", [STRUCTURED, IN_TEXT], ids=["tool_calls", "text"])
def test_examples_stand_behind_the_system_prompt_as_a_conversation_has_them(example):
    """A row's own system message stays in front, and nobody can change the examples for others."""
    env, own = make_env(example, PLAIN), {"role": "system", "content": "Mine."}
    for system in ("Be short.", "Mine.", "Be short."):
        (rollout,) = env.start([[own, user("Double 5.")] if system == "Mine." else [user("Double 5.")]])
        expected = written(("system", system), *LIVED, *HELLO, ("user", "Double 5."))
        assert CHATML_TOKENIZER.decode(rollout.prompt_ids) == expected
        rollout.prompt_messages[1]["content"] = "Changed"
    (rollout,) = make_env(PLAIN, system=None).start([[user("Double 5.")]])
    assert CHATML_TOKENIZER.decode(rollout.prompt_ids) == written(*HELLO, ("user", "Double 5."))


def test_examples_stand_before_what_an_environment_says_first():
    class Game:
        reset = lambda self, **row: "Your move."  # noqa: E731
        respond = lambda self, rollout, turn: None  # noqa: E731

    env = make_env(PLAIN, tools=[], environment=Game)
    (rollout,) = env.generate([""], Scripted([[ANSWER]]), rows=[{}])["rollouts"]
    expected = written(("system", "Be short."), *HELLO, ("user", "Your move."))
    assert CHATML_TOKENIZER.decode(rollout.prompt_ids) == expected


@EVERY_FAMILY
def test_examples_read_as_lived_conversations_or_are_refused(name):
    """Two examples, one of two rounds. DeepSeek V3's template writes later calls of a prompt otherwise."""
    fmt, calling = (
        native(name),
        {"role": "assistant", "tool_calls": [{"name": TWO[0].name, "arguments": TWO[0].arguments}]},
    )
    one = [user("Add."), calling, tool("R1"), assistant("It is 5.")]
    two = [user("Add twice."), calling, tool("R2"), calling, tool("R3"), assistant("It is 7.")]
    read = read_prompt_examples([one, two])
    if name == "deepseekv3":
        with pytest.raises(ValueError, match="example 2: .*or writes it differently later"):
            written_examples(read, fmt, TOOLS, True)
        return
    asked = [{"role": "system", "content": "Use add."}, *written_examples(read, fmt, TOOLS, True), user("And now?")]
    rendered = fmt.tokenizer.apply_chat_template(**{**fmt.prompt(asked, TOOLS), "tokenize": False})
    for text in ("R1", "R2", "R3"):
        lived = fmt.suffix(TWO[:1], fmt.results(TWO[:1], [ToolResult(text)]))
        assert rendered.count(lived[: lived.rindex(text) + 2]) == 1, text


def test_examples_are_never_trained(random_model, tmp_path, monkeypatch):
    """No token of an example is in a completion; the loss reads the prompt of two groups once, examples included."""
    rows = [{"prompt": [user(f"Double {n}.")], "answer": str(2 * n)} for n in (3, 4)]
    env = MultiTurnToolEnv([double], "Be short.", prompt_examples=[STRUCTURED, PLAIN])
    args = settings(tmp_path, per_device_train_batch_size=8, num_generations=4, max_completion_length=12, max_steps=1)
    laid_out, sampled, lay_out = [], [], SharedRow.__init__
    monkeypatch.setattr(SharedRow, "__init__", lambda self, *a, **k: laid_out.append(self) or lay_out(self, *a, **k))

    def reward(completion_ids, **kwargs):
        sampled.extend(sorted(join(completion_ids)))
        return [float(i % 2) for i in range(len(completion_ids))]

    data = Dataset.from_list(rows)
    trainer = MTGRPOEnvTrainer(random_model, env, [], [reward], args=MTGRPOConfig(**args), train_dataset=data)
    trainer.train()
    (row,) = [row for row in laid_out if len(row.labels[0]) == len(sampled)]
    assert sorted(row.labels[0].tolist()) == sampled  # the tokens whose logprobs the loss asks for
    read = trainer.processing_class.decode(row.input_ids[0])
    assert read.count("<answer>8 km</answer>") == 1 and read.count("Hello!") == 1  # once, for both groups


def asking(*turns):
    return [user("x"), *turns, assistant("y")]


MISWRITTEN = {
    "unknown tool": (asking(assistant('<tool>{"name": "dobule", "args": {}}</tool>'), tool("8")),
                     "1 calls, 1 results. unknown tool 'dobule'. Known tools: double"),
    "no result": (asking(assistant("", {"number": 4}), user("z")), "1 calls, 0 results"),
    "two calls in a turn": (asking(assistant("", {"number": 4}, {"number": 5}), tool("8")), "or has other calls"),
    "a call twice": (asking(assistant(CALL, {"number": 4, "unit": "km"}), tool("8 km")), "or has other calls"),
    "a call and an answer": (asking(assistant("<answer>8</answer>", {"number": 4}), user("z")), "or has other calls"),
    "text after the end": ([user("x"), assistant("<answer>5</answer> and so on")], "goes on after the end"),
    "control token": ([user("x"), assistant("8<|im_end|>")], "has a token that begins or ends a message"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "error"), MISWRITTEN.values(), ids=MISWRITTEN)
def test_examples_that_a_format_cannot_have(wrong, error):
    fmt = TOOL_FORMATS["xml"](CHATML_TOKENIZER)
    with pytest.raises(ValueError, match=f"prompt_examples, example 2: .*{error}"):
        written_examples(read_prompt_examples([PLAIN, wrong]), fmt, {"double": double}, True)


@pytest.mark.parametrize("template", ["llama3_1", "gptoss"])
def test_examples_of_more_calls_than_a_template_takes(template):
    calling = {"role": "assistant", "tool_calls": [{"name": TWO[0].name, "arguments": TWO[0].arguments}] * 2}
    with pytest.raises(ValueError, match="prompt_examples, example 1: .*calls"):
        read = read_prompt_examples([asking(calling, tool("8"), tool("8"))])
        written_examples(read, native(template), TOOLS, True)


@pytest.mark.parametrize("wrong, error", [
    ([PLAIN[0], *PLAIN], "example 2 has an empty message .*order: uua"),
    ([user(" "), PLAIN[1]], "example 2 has an empty message .*order: _a"),
    (asking({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}), "tool_calls.0.name: Field required"),
    (asking(assistant("", {"number": 4}), {**tool("8"), **assistant("8", {}), "role": "tool"}), "roles out of order"),
])  # fmt: skip
def test_what_is_no_example(wrong, error):
    with pytest.raises(ValueError, match=f"prompt_examples: .*{error}"):
        read_prompt_examples([PLAIN, wrong])


def test_texts_of_examples_that_a_template_changes():
    """Qwen3's template leaves the thinking of earlier turns out: the model would not read what the example shows."""
    read = read_prompt_examples([asking(assistant("", {"number": 4}), tool("8</result><|im_end|>"))])
    messages = written_examples(read, TOOL_FORMATS["xml"](CHATML_TOKENIZER), {"double": double}, True)
    assert messages[2] == user("<result>\n8< /result>< |im_end|>\n</result>")
    read = read_prompt_examples([[user("x"), assistant("<think>\nHard.\n</think>\n\nIt is y.")]])
    with pytest.raises(ValueError, match="example 1: .* leaves out '<think>'"):
        written_examples(read, native("qwen3"), TOOLS, True)


def test_files_of_both_kinds_say_the_same(tmp_path):
    conversations = [STRUCTURED, PLAIN]
    texts = {
        "examples.jsonl": "\n".join(json.dumps({"messages": each}) for each in conversations) + "\n",
        "examples.yaml": "- - {role: user, content: Double 4 km.}\n  - role: assistant\n    content: |\n      I ask.\n"
        "    tool_calls: [{name: double, arguments: {number: 4, unit: km}}]\n  - {role: tool, content: 8 km}\n"
        "  - {role: assistant, content: <answer>8 km</answer>}\n"
        "- messages:\n    - {role: user, content: Hello}\n    - {role: assistant, content: <answer>Hello!</answer>}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert read_prompt_examples(str(tmp_path / name)) == read_prompt_examples(conversations)
    assert read_prompt_examples(None) == []
