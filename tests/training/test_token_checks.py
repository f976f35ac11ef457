"""Whether training reads the tokens of inference: each fault is found by the check that is meant for it."""

import dataclasses

import pytest
from scripted import CHATML, END, QWEN3_TOKENIZER, Scripted, call, echo, ids, make_tokenizer
from test_formats import EVERY_FAMILY, FAMILIES, ids as ids_of, tokenizer_of

import mt_grpo_trainer as mt
from mt_grpo.generation.in_process import InProcessBackend
from mt_grpo.generation.samples import BadAnswer, read_completion
from mt_grpo.recipe.plugins import load_conversation
from mt_grpo.rollout import Context, hash_of_ids
from mt_grpo.training import token_checks
from mt_grpo.training.token_checks import check_batch

TOKENIZER = make_tokenizer(CHATML, merges=("ab",))  # "ab" is one token, and can be sampled as two
THOUGHT = "<think>so</think>"


def conversation(cls=mt.MultiTurnToolEnv, turns=None, tokenizer=TOKENIZER, **settings):
    """(rollouts, environment) of one conversation: a call with a thought before it, and an answer in two tokens."""
    turns = turns or [THOUGHT + call("echo", text="hi"), [*ids("<answer>ab</answer>")]]
    env = cls([echo], None, len(turns), tokenizer=tokenizer, **settings)
    backend = Scripted([turns], tokenizer=tokenizer)
    return env.generate(["?"], backend)["rollouts"], env


def found_in(rollouts, env, mode="strict"):
    (of_ids,), (of_text,) = check_batch(rollouts, env, mode)
    return of_ids + of_text


class Retokenised(mt.MultiTurnToolEnv):
    """A turn is tokenised again."""

    async def sample_turn(self, *args):
        turn = await super().sample_turn(*args)
        turn.token_ids = self.tokenizer(turn.text, add_special_tokens=False)["input_ids"]
        turn.logprobs = None  # of other tokens: the rollout would end as altered, whatever the check finds
        return turn


class WithoutThinking(mt.MultiTurnToolEnv):
    """What the model reads next is without the thinking that its messages have."""

    def append(self, rollout, turn, *args):
        super().append(rollout, turn, *args)
        kept = turn.token_ids[len(ids(THOUGHT)) :]
        rollout.edited = Context(rollout.history, rollout.prompt_ids + kept + turn.observation_ids)


def behind_turns(change):
    """The ids behind a turn are changed."""

    class Changed(mt.MultiTurnToolEnv):
        def append(self, rollout, turn, *args):
            super().append(rollout, turn, *args)
            turn.observation_ids = change(turn.observation_ids)

    return Changed


def without_line(read):
    """Without the end of line behind the first end of turn."""
    k = read.index(END)
    return read[: k + 1] + read[k + 2 :]


class Unread(mt.MultiTurnToolEnv):
    """The first of two messages after a turn was never read."""

    def append(self, rollout, turn, *args):
        super().append(rollout, turn, *args)
        turn.messages = [{"role": "user", "content": "Nobody read this."}, *turn.messages]


FAULTS = {
    "a turn that was tokenised again": (Retokenised, "ids", "sampled", "turn 1, token 8"),
    "a dropped think block": (WithoutThinking, "text", "text", "in the prompt"),
    "a doubled end of turn": (behind_turns(lambda read: [END] + read), "text", "text", "after turn 0"),
    "a lost end of line": (behind_turns(without_line), "text", "white space", "after turn 0"),
    "a lost observation": (behind_turns(lambda read: []), "text", "text", "after turn 0"),
    "a lost end of turn": (behind_turns(lambda read: read[1:]), "text", "text", "after turn 0"),
    "an unread message": (Unread, "text", "text", "after turn 0"),
    "a lost end of the prompt": (behind_turns(lambda read: read[:-1]), "text", "white space", "after turn 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_check(name):
    cls, *expected = FAULTS[name]
    (found,) = found_in(*conversation(cls))
    assert [*found[:3]] == expected


@pytest.mark.contract("delta tokenization")
def test_a_conversation_without_a_fault_is_not_told():
    """Sampled ids need not be the tokenizer's own for their text. The generation prompt stands behind it: it is no
    beginning of the first turn, in the history neither."""
    (rollout,), env = conversation()
    assert rollout.turns[1].token_ids != TOKENIZER(rollout.turns[1].text, add_special_tokens=False)["input_ids"]
    assert found_in([rollout], env) == []
    env = mt.MultiTurnToolEnv([echo], None, 1, tokenizer=TOKENIZER)
    prompt = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So."}]
    turns = [call("echo", text="hi"), "<answer>a</answer>"]
    (rollout,) = env.generate([prompt], Scripted([turns], tokenizer=TOKENIZER))["rollouts"]
    assert found_in([rollout], env) == []
    assert [message["role"] for message in rollout.history] == ["user", "assistant", "assistant", "user", "assistant"]


@pytest.mark.contract("delta tokenization")
def test_what_may_differ_is_the_recipes(monkeypatch, caplog):
    """verl's modes: every character, none but white space, no comparison. A kind is logged once."""
    monkeypatch.setattr(token_checks, "reported", set())
    rollouts, env = conversation(FAULTS["a lost end of line"][0])
    for mode, differ in (("strict", 1.0), ("strict", 1.0), ("ignore_strippable", 0.0), ("off", None)):
        args = mt.MTGRPOConfig(output_dir="x", use_cpu=True, bf16=False, tokenization_sanity_check_mode=mode)
        expected = {} if differ is None else {"tokens/ids_differ": 0.0, "tokens/text_differ": differ}
        assert token_checks.check_rollouts(rollouts, env, args) == expected
    (record,) = caplog.records
    assert "check text): white space, after turn 0" in record.message
    other = conversation(FAULTS["a doubled end of turn"][0])
    assert [found.kind for found in found_in(*other, "ignore_strippable")] == ["text"]


@EVERY_FAMILY
def test_what_a_template_does_itself_is_not_told(name):
    """Thoughts, calls, results and an answer in each format of calls that TRL ships."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    thought = family.thinking % "well" if "%s" in family.thinking else family.thinking
    answer = "<|channel|>final<|message|>It is 5." if name == "gptoss" else "It is 5."
    turns = [thought + family.around % family.first, answer]
    closing = min((text for text in family.ends if text in family.suffix), key=family.suffix.index)
    last = "<turn|>" if "<turn|>" in family.ends else closing
    scripts = [ids_of(turns[0] + closing, tokenizer), ids_of(turns[1] + last, tokenizer)]

    def add(a: int, b: str = "") -> str:
        """Add."""
        return "5"

    prompt = "{tool_descriptions}" if name == "deepseekv3" else None  # its template leaves tools out
    env = mt.MultiTurnToolEnv([add], prompt, 2, tokenizer=tokenizer, tool_format="native")
    rollouts = env.generate(["2 + 3?"], Scripted([scripts], tokenizer=tokenizer))["rollouts"]
    assert len(rollouts[0].turns) == 2, rollouts[0].stop_reason
    of_ids, of_text = check_batch(rollouts, env, "strict")
    rewritten = ("deepseekv3", "nemotron_3_ultra", "nemotron_3_5_lightning")
    assert of_ids == [[]] and of_text == ([] if name in rewritten else [[]])


@pytest.mark.contract("delta tokenization")
def test_a_turn_that_the_template_rewrites_is_not_compared():
    """Qwen3's template drops the thinking of an earlier turn; a fault after a turn without any is found."""
    doubled, answer = FAULTS["a doubled end of turn"][0], "<answer>ab</answer>"
    for thought, cls, of_text in (
        (THOUGHT, mt.MultiTurnToolEnv, []), (THOUGHT, doubled, []), ("", mt.MultiTurnToolEnv, [[]]),
        ("", doubled, [["text"]]),
    ):  # fmt: skip
        rollouts, env = conversation(cls, [thought + call("echo", text="hi"), answer], QWEN3_TOKENIZER)
        assert [[found.kind for found in each] for each in check_batch(rollouts, env, "strict")[1]] == of_text


def test_backends_give_an_account_and_a_turn_that_read_other_ids_is_found():
    """The backend says that it read another prompt than the record has. Of the ids that they read: the server in its
    answer, TRL's generation by what it is called with."""
    rollouts, env = conversation()
    (generation,) = rollouts[0].turns[1].generations
    rollouts[0].turns[1].generations[0] = dataclasses.replace(generation, saw=hash_of_ids([1, 2, 3]))
    (found,) = found_in(rollouts, env)
    assert found[:3] == ("ids", "read", "before turn 1")
    choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
    answer = {"choices": [{**choice, "prompt_token_ids": [1, 2]}], "usage": {"prompt_tokens": 2}}
    assert read_completion(answer, 2, 8).saw == hash_of_ids([1, 2])
    assert read_completion({**answer, "choices": [choice]}, 2, 8).saw is None
    backend = InProcessBackend(lambda prompts, most: ([[7]] * len(prompts), None), lambda token: True)
    (generation,) = backend.serve([backend.generate([1, 2, 3], 4)])
    assert generation.saw == hash_of_ids([1, 2, 3])


@pytest.mark.parametrize(
    "ids", [[400], [-1], [2**70], ["a"], [1.0], [True], [None], "a", {0: 1}, [[5]], [5, 6, 7]], ids=str
)
def test_ids_that_a_server_cannot_have_sampled_are_no_answer(ids):
    """Beyond the vocabulary of 400, no integers, or more than the two that were asked for."""
    logprobs = [-0.5] * len(ids)
    answer = {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop"}],
              "usage": {"prompt_tokens": 2}}  # fmt: skip
    with pytest.raises(BadAnswer):
        read_completion(answer, 2, 2, 400)
    answer["choices"][0]["token_ids"] = [399] * len(ids)
    if len(ids) <= 2:
        assert read_completion(answer, 2, 2, 400).token_ids == [399] * len(ids)
    answer["choices"][0]["prompt_token_ids"] = ["a"]
    with pytest.raises(BadAnswer):
        read_completion(answer, 2, 2, 400)


def rendered_conversation(**settings):
    script_args = mt.recipe_classes()[0](**{"use_inference_chat_template": True, **settings})
    args = mt.MTGRPOConfig(output_dir="x", use_cpu=True, bf16=False)
    return load_conversation(script_args, args, mt.MultiTurnToolEnv)[0]


@pytest.mark.contract("use_inference_chat_template")
def test_the_history_is_rendered_anew_before_each_turn():
    """Qwen3's template leaves out the thinking of earlier turns; each turn is a record, with what was sampled."""
    turns = [f"<think>{word}</think>\n\n" + call("echo", text="hi") for word in ("one", "two")]
    turns.append("<answer>5</answer>")
    rollouts, env = conversation(rendered_conversation(), turns, QWEN3_TOKENIZER)
    (rollout,) = rollouts
    user, opened = "<|im_start|>user\n?<|im_end|>\n", "<|im_start|>assistant\n"
    said = opened + call("echo", text="hi") + "<|im_end|>\n"
    read = "<|im_start|>user\n<result>\nhi\n</result><|im_end|>\n"
    before = [user + opened, user + said + read + opened, user + said + read + said + read + opened]
    assert [QWEN3_TOKENIZER.decode(record.prompt_ids) for record in rollout.records] == before
    assert [record.completion_ids for record in rollout.records] == [ids(turn) for turn in turns]
    assert all(set(record.loss_mask) == {1} for record in rollout.records)
    assert found_in(rollouts, env) == []
    assert rollout.new_tokens == sum(len(ids(turn)) for turn in turns) + 2 * len(ids(END_OF_TURN + read + opened))


END_OF_TURN = "<|im_end|>\n"


def test_who_brings_its_own_messages_renders_none_anew(monkeypatch):
    agents = type("Agents", (), {"renders_all": False})
    monkeypatch.setattr("mt_grpo.recipe.plugins.load_environment", lambda *args: (agents, None))
    with pytest.raises(ValueError, match="use_inference_chat_template has no effect if an agent"):
        rendered_conversation()
