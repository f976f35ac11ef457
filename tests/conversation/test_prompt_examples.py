"""`prompt_examples`: conversations before the question, as the model reads them, never trained; what is none."""

import json

import pytest
from datasets import Dataset
from scripted import ANSWER, CHATML_TOKENIZER, Scripted
from test_formats import EVERY_FAMILY, RESULTS, TOOLS, TWO, native
from test_trainer import settings

from mt_grpo.conversation.formats.choose import make_format
from mt_grpo.conversation.prompt_examples import read_prompt_examples, written_examples
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
IN_TEXT = [user("Double 4 km."), assistant(f"I ask.\n{CALL}"),
           tool("8 km"), assistant("<answer>8 km</answer>")]  # fmt: skip
PLAIN = [user("Hello"), assistant("<answer>Hello!</answer>")]

READ = """<|im_start|>system
Be short.<|im_end|>
<|im_start|>user
Double 4 km.<|im_end|>
<|im_start|>assistant
I ask.
<tool>{"name": "double", "args": {"number": 4, "unit": "km"}}</tool><|im_end|>
<|im_start|>user
<result>
8 km
</result><|im_end|>
<|im_start|>assistant
<answer>8 km</answer><|im_end|>
<|im_start|>user
Hello<|im_end|>
<|im_start|>assistant
<answer>Hello!</answer><|im_end|>
<|im_start|>user
Double 5.<|im_end|>
<|im_start|>assistant
"""


def make_env(*examples, system="Be short.", tools=(double,), **kwargs):
    return MultiTurnToolEnv(list(tools), system, tokenizer=CHATML_TOKENIZER, prompt_examples=list(examples), **kwargs)


@pytest.mark.parametrize("example", [STRUCTURED, IN_TEXT], ids=["tool_calls", "text"])
def test_examples_stand_behind_the_system_prompt_as_a_conversation_has_them(example):
    env = make_env(example, PLAIN)
    (rollout,) = env.start([[user("Double 5.")]])
    assert CHATML_TOKENIZER.decode(rollout.prompt_ids) == READ


def test_a_rows_own_system_message_stays_in_front():
    env = make_env(PLAIN)
    own = {"role": "system", "content": "Mine."}
    (rollout,) = env.start([[own, user("Double 5.")]])
    assert [m["content"] for m in rollout.prompt_messages] == [
        "Mine.",
        "Hello",
        "<answer>Hello!</answer>",
        "Double 5.",
    ]
    (rollout,) = make_env(PLAIN, system=None).start([[user("Double 5.")]])
    assert [m["role"] for m in rollout.prompt_messages] == ["user", "assistant", "user"]


def test_examples_stand_before_what_an_environment_says_first():
    class Game:
        def reset(self, **row):
            return "Your move."

        def respond(self, rollout, turn):
            return None

    env = make_env(PLAIN, tools=[], environment=Game)
    (rollout,) = env.generate([""], Scripted([[ANSWER]]), rows=[{}])["rollouts"]
    assert [m["content"] for m in rollout.prompt_messages[1:]] == ["Hello", "<answer>Hello!</answer>", "Your move."]
    assert CHATML_TOKENIZER.decode(rollout.prompt_ids).count("<answer>Hello!</answer>") == 1


def test_nobody_can_change_the_examples_for_others():
    env = make_env(PLAIN)
    (rollout,) = env.start([[user("Double 5.")]])
    rollout.prompt_messages[1]["content"] = "Changed"
    (other,) = env.start([[user("Double 6.")]])
    assert other.prompt_messages[1]["content"] == "Hello" and PLAIN[0]["content"] == "Hello"


@EVERY_FAMILY
def test_examples_read_as_lived_conversations_or_are_refused(name):
    """Two examples, one of two rounds. DeepSeek V3's template writes later calls of a prompt otherwise."""
    fmt = native(name)
    call = {"name": TWO[0].name, "arguments": TWO[0].arguments}
    calling = {"role": "assistant", "tool_calls": [call]}
    one = [user("Add."), calling, tool("R1"), assistant("It is 5.")]
    two = [user("Add twice."), calling, tool("R2"), calling, tool("R3"), assistant("It is 7.")]
    if name == "deepseekv3":
        with pytest.raises(ValueError, match="example 2: .*writes these results differently"):
            written_examples(read_prompt_examples([one, two]), fmt, TOOLS, True)
        return
    messages = written_examples(read_prompt_examples([one, two]), fmt, TOOLS, True)
    asked = [{"role": "system", "content": "Use add."}, *messages, user("And now?")]
    rendered = fmt.tokenizer.apply_chat_template(**{**fmt.prompt(asked, TOOLS), "tokenize": False})
    for number, text in enumerate(("R1", "R2", "R3")):
        lived = fmt.suffix(TWO[:1], fmt.results(TWO[:1], [type(RESULTS[0])(text)]))
        assert rendered.count(lived[: lived.rindex(text) + 2]) == 1, number


def test_examples_are_never_trained(random_model, tmp_path, monkeypatch):
    """No token of an example is in a completion; the loss reads the prompt of two groups once, examples included."""
    rows = [{"prompt": [user(f"Double {n}.")], "answer": str(2 * n)} for n in (3, 4)]
    env = MultiTurnToolEnv([double], "Be short.", prompt_examples=[STRUCTURED, PLAIN])
    args = settings(tmp_path, per_device_train_batch_size=8, num_generations=4, max_completion_length=12, max_steps=1)
    laid_out, rolled_out, lay_out = [], [], SharedRow.__init__

    def noted(self, *args, **kwargs):
        lay_out(self, *args, **kwargs)
        laid_out.append(self)

    monkeypatch.setattr(SharedRow, "__init__", noted)

    class Watched(MTGRPOEnvTrainer):
        def _roll_out(self, rows):
            rolled_out.extend(super()._roll_out(rows))
            return rolled_out

    def reward(completions, **kwargs):
        return [float(i % 2) for i in range(len(completions))]

    trainer = Watched(
        random_model, env, [], [reward], args=MTGRPOConfig(**args), train_dataset=Dataset.from_list(rows)
    )
    trainer.train()
    tokenizer, ids = trainer.processing_class, [rollout.prompt_ids for rollout in rolled_out]
    assert all(tokenizer.decode(each).count("<answer>8 km</answer>") == 1 for each in ids)
    (row,) = [row for row in laid_out if len(row.labels[0]) == sum(len(r.completion_ids) for r in rolled_out)]
    sampled = sorted(token for rollout in rolled_out for token in rollout.completion_ids)
    assert sorted(row.labels[0].tolist()) == sampled  # the tokens whose logprobs the loss asks for
    read = tokenizer.decode(row.input_ids[0])
    assert read.count("<answer>8 km</answer>") == 1 and read.count("Hello!") == 1  # once, for both groups


MISWRITTEN = {
    "unknown tool": ([user("x"), assistant('<tool>{"name": "dobule", "args": {}}</tool>'), tool("8"), assistant("y")],
                     "a call that cannot run: unknown tool 'dobule'. Known tools: double"),
    "no result": ([user("x"), assistant("", {"number": 4}), user("z"), assistant("y")], "has 1 calls.* and 0 results"),
    "two calls in a turn": ([user("x"), assistant("", {"number": 4}, {"number": 5}), tool("8"), tool("10"),
                             assistant("y")], "goes on after the end of the turn, or has two calls"),
    "control token": ([user("x"), assistant("8<|im_end|>")], "has the token '<|im_end|>'"),
}  # fmt: skip


@pytest.mark.parametrize(("example", "error"), MISWRITTEN.values(), ids=MISWRITTEN)
def test_examples_that_a_format_cannot_have(example, error):
    fmt = make_format("xml", CHATML_TOKENIZER)
    with pytest.raises(ValueError, match=f"prompt_examples, example 2.*{error.replace('|', chr(92) + '|')}"):
        written_examples(read_prompt_examples([PLAIN, example]), fmt, {"double": double}, True)


@pytest.mark.parametrize("example, roles", [([PLAIN[0], *PLAIN], "uua"), ([user(" "), PLAIN[1]], "_a")])
def test_an_example_out_of_order_is_refused(example, roles):
    with pytest.raises(ValueError, match=f"example 2 has an empty message .*order: {roles}"):
        read_prompt_examples([PLAIN, example])


def test_control_tokens_of_a_result_are_broken():
    example = [user("x"), assistant("", {"number": 4}), tool("8</result><|im_end|>"), assistant("y")]
    fmt = make_format("xml", CHATML_TOKENIZER)
    messages = written_examples(read_prompt_examples([example]), fmt, {"double": double}, True)
    assert messages[2] == user("<result>\n8< /result>< |im_end|>\n</result>")


def test_a_thought_that_the_template_drops_is_an_error():
    """Qwen3's template leaves the thinking of earlier turns out: the model would not read what the example shows."""
    example = [user("x"), assistant("<think>\nHard.\n</think>\n\nIt is y.")]
    with pytest.raises(ValueError, match="example 1: .* leaves out '<think>'"):
        written_examples(read_prompt_examples([example]), native("qwen3"), TOOLS, True)


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
        read = read_prompt_examples(str(tmp_path / name))
        assert [[message.model_dump(exclude_unset=True) for message in each] for each in read] == conversations
    assert read_prompt_examples(None) == []
