"""Why a conversation stops, and the budgets that it keeps."""

import random

import pytest
from scripted import (
    ADD,
    ANSWER,
    CHATML,
    CHATML_TOKENIZER,
    END,
    OF_AGENTS,
    OF_ENVIRONMENTS,
    PROMPT_LENGTH,
    QWEN3_TOKENIZER,
    TALK,
    Scripted,
    call,
    converse,
    echo,
    ids,
    make_env,
    make_tokenizer,
    result,
    verify,
)
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from mt_grpo.conversation.formats.control_tokens import cut_to_tokens
from mt_grpo.rollout import StopReason
from mt_grpo_trainer import MultiTurnToolEnv

ENVELOPE = 40  # between two turns, around a result


@pytest.mark.parametrize(
    "turns, limits, expected, num_turns",
    [
        ([ANSWER], {}, "answered", 1), ([ADD, ANSWER], {}, "answered", 2),
        (["I do not know.<|im_end|>"], {}, "no_tool_call", 1), (["</answer>"], {}, "no_tool_call", 1),
        ([[]], {}, "no_tool_call", 1), ([[END]], {}, "no_tool_call", 1),
        ([ADD, "Five.<|im_end|>"], {}, "no_tool_call", 2), ([ADD, ADD, ADD], {}, "max_turns", 3),
        ([ADD], {"max_steps": 0}, "max_turns", 1), (["</tool>", "</tool>"], {"max_steps": 1}, "max_turns", 2),
        ([ANSWER], {"max_steps": 0}, "answered", 1), ([TALK], {"max_completion_length": 1024}, "max_tokens", 1),
        ([TALK], {"max_turn_tokens": 10}, "max_tokens", 1),
        ([ADD, TALK], {"max_completion_length": 1024}, "max_tokens", 2),
        ([ADD], {"max_completion_length": 60}, "max_tokens", 1),
        (["<answer>5"], {"max_completion_length": 8}, "max_tokens", 1),
        ([TALK], {"max_model_len": 100}, "context_length", 1), ([ADD], {"max_model_len": 100}, "context_length", 1),
        ([], {"max_model_len": 23}, "context_length", 0), ([], {"max_model_len": 5}, "context_length", 0),
        ([ANSWER], {"max_model_len": 41}, "answered", 1), ([ANSWER], {"max_completion_length": 18}, "answered", 1),
        ([ADD], {"max_completion_length": 54}, "max_tokens", 1),
    ],
)  # fmt: skip
def test_stop_reasons(turns, limits, expected, num_turns):
    rollout, _ = converse(*turns, **limits)
    assert len(rollout.prompt_ids) == PROMPT_LENGTH
    assert rollout.stop_reason == expected
    assert len(rollout.turns) == num_turns


@pytest.mark.contract("MultiTurnToolEnv.generate")
def test_max_steps_counts_observations_and_leaves_a_turn_to_answer():
    rollout, backend = converse(ADD, "</tool>", ADD, ANSWER, max_steps=3)
    assert [turn.error for turn in rollout.turns] == [None, "call", None, None]
    assert rollout.stop_reason == StopReason.ANSWERED and len(backend.requests) == 4
    rollout, _ = converse("</tool>", ADD, ADD, ANSWER, max_steps=2)  # a mistaken call counts as well
    assert rollout.stop_reason == StopReason.MAX_TURNS and len(rollout.turns) == 3
    calls = []

    def count() -> str:
        """Counts."""
        calls.append(1)
        return "ok"

    rollout, _ = converse(*[call("count")] * 3, tools=[count], max_steps=2)
    assert rollout.stop_reason == StopReason.MAX_TURNS
    assert len(calls) == 2  # the last call is not run: nobody would read its result
    assert rollout.turns[2].tool_call.name == "count" and rollout.turns[2].observation is None


@pytest.mark.contract("MultiTurnToolEnv.generate")
def test_max_steps_is_the_recipes_max_env_steps():
    assert MultiTurnToolEnv().max_steps == 2
    env = MultiTurnToolEnv([], "Answer.", 3)
    assert (env.max_steps, env.max_env_steps, env.system_prompt) == (3, 3, "Answer.")
    env.max_steps = 5  # as an argument of this name may be set later
    assert (env.max_steps, env.max_env_steps) == (5, 5)


@pytest.mark.parametrize("turns, limits, asked, reason", [
    # The call, its result "5", 30 tokens to answer.
    ([ADD, "x" * 31], {"max_completion_length": 125}, [125, 30], StopReason.MAX_TOKENS),
    ([ADD, ADD, TALK], {"max_turn_tokens": 60, "max_completion_length": 2 * 95 + 25}, [60, 60, 25],
     StopReason.MAX_TOKENS),
    ([ADD, TALK], {"max_model_len": PROMPT_LENGTH + 95 + 20}, [115, 20], StopReason.CONTEXT_LENGTH),
])  # fmt: skip
def test_limits_count_tool_results_and_bound_every_request(turns, limits, asked, reason):
    assert len(ADD) + ENVELOPE + 1 == 95
    rollout, backend = converse(*turns, **limits)
    assert [request.max_tokens for request in backend.requests] == asked and rollout.stop_reason == reason
    assert len(rollout.completion_ids) == sum(asked[-1:]) + 95 * (len(turns) - 1)


@pytest.mark.parametrize("limits", [{"max_completion_length": 65}, {"max_model_len": PROMPT_LENGTH + 65}])
def test_results_that_nobody_read_are_cut_as_others_are(limits):
    """Else a reward that looks into them would pay for what the model would not have read."""

    def find(word: str) -> str:
        """Find a word.

        Args:
            word: It.
        """
        return "x" * 50 + "gold"

    call = '<tool>{"name": "find", "args": {"word": "gold"}}</tool>'
    rollout, _ = converse(call, TALK, tools=[find], max_tool_response_tokens=40, **limits)
    assert len(rollout.turns) == 1 and rollout.stop_reason in (StopReason.MAX_TOKENS, StopReason.CONTEXT_LENGTH)
    (result,) = rollout.turns[0].results
    assert result.text.startswith("xxx") and len(ids(result.text)) <= 40 and "gold" not in result.text
    assert rollout.turns[0].messages == [] and rollout.completion_ids == ids(call)


def long_text() -> str:
    """Return a text that no budget here has room for."""
    return "0123456789" * 1000


@pytest.mark.parametrize("limit, expected", [(None, 200), (100, 100), (700, 400)])
def test_a_result_has_at_most_its_share_of_the_budget(limit, expected):
    """A quarter where nothing else is said, and half at most: a token is a character here."""
    limits = {"max_completion_length": 800, "max_tool_response_tokens": limit}
    rollout, _ = converse(call("long_text"), ANSWER, tools=[long_text], **limits)
    assert len(rollout.turns[0].observation) == expected


@pytest.mark.parametrize(
    "bound, expected",
    [
        ({"max_completion_length": 800}, [800, 514, 228, 100]),  # 46 of a call, 200 of a result with 40 around it
        ({"max_model_len": PROMPT_LENGTH + 800}, [800, 100]),
    ],
)
def test_an_eighth_of_the_budget_is_left_for_an_answer(bound, expected):
    rollout, backend = converse(*4 * [call("long_text")], ANSWER, tools=[long_text], max_steps=8, **bound)
    assert [request.max_tokens for request in backend.requests] == expected and len(call("long_text")) == 46


@pytest.mark.parametrize("left, expected", [(540, [270]), (300, [150]), (100, [50]), (71, [16]), (64, [])])
def test_with_less_than_an_eighth_left_a_result_leaves_half(left, expected):
    """Of what a long turn left; then 16 tokens, with 40 around a result and 10 of its own, or it is the end."""
    turn = call("long_text").rjust(4000 - left)
    _, backend = converse(turn, ANSWER, tools=[long_text], max_completion_length=4000)
    assert [request.max_tokens for request in backend.requests] == [4000, *expected]


@pytest.mark.parametrize("merges", [(), ("\n\n",), ("\n<", ">\n")])
def test_there_is_room_for_an_answer_or_no_request(merges):
    """Also where a tokenizer merges what stands around a result with the result."""
    tokenizer = make_tokenizer(CHATML, merges)
    text = tokenizer(call("echo", text="abcd"))["input_ids"]
    reached = set()
    for room in range(45):
        limit = len(text) + ENVELOPE + room
        env, backend = make_env([echo], tokenizer=tokenizer, max_completion_length=limit), Scripted([[text, "?"]])
        (rollout,) = env.generate(["2+3?"], backend)["rollouts"]
        assert len(rollout.completion_ids) <= limit
        assert all(r.max_tokens >= MultiTurnToolEnv.MIN_ANSWER_TOKENS for r in backend.requests)
        reached.add(len(backend.requests))
    assert reached == {1, 2}


@pytest.mark.parametrize("limit", [10, 20, 50])
def test_max_tool_response_tokens_with_a_visible_marker(limit):
    text = "0123456789" * 6
    rollout, _ = converse(call("echo", text=text), ANSWER, max_tool_response_tokens=limit)
    assert rollout.turns[0].observation == text[: limit - 9] + "... [cut]"
    assert rollout.turns[0].observation_ids == ids(result(text[: limit - 9] + "... [cut]"))
    rollout, _ = converse(call("echo", text=text), ANSWER, max_tool_response_tokens=60)
    assert rollout.turns[0].observation == text


@pytest.mark.parametrize(
    "text, limit, expected",
    [
        ("", 5, ""),
        ("abc", 3, "abc"),
        ("", 0, None),
        ("abc", 0, None),
        ("abc", -7, None),
        ("abcdefghijkl", 12, "abcdefghijkl"),
        ("abcdefghijklm", 12, "abc... [cut]"),
        ("abcdefghijklm", 10, "a... [cut]"),
        ("ééééééé", 12, "é... [cut]"),  # two bytes each: no half letters
        ("x" * 100_000, 11, "xx... [cut]"),
    ],
)
def test_cut_to_tokens(text, limit, expected):
    assert cut_to_tokens(text, limit, CHATML_TOKENIZER) == expected


def all_bytes() -> PreTrainedTokenizerFast:
    """The longest that text can be: a token per byte, and each blank is three, as is one before the text."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("size", [0, 1, 5, 9, 12, 16])
@pytest.mark.parametrize("character", ["a", " ", "\0", "é", "日", "ﷺ"])
def test_a_short_result_has_no_more_tokens_than_its_limit(character, size):
    """ASCII that is far shorter than the limit is not tokenised. No tokenizer here makes more of a character."""
    for tokenizer in (CHATML_TOKENIZER, all_bytes()):
        text = character * size
        whole = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        for limit in range(30, 45):  # below, a marker has no room where each of its characters is a token
            assert (cut_to_tokens(text, limit, tokenizer) == text) == (whole <= limit)


def test_a_cut_is_marked_where_one_token_holds_many_characters():
    """Real vocabularies have tokens for 128 spaces and long rulers."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_tokens(AddedToken("=" * 128, special=False, normalized=False))
    cut = cut_to_tokens("=" * 128 * 1000, 20, tokenizer)
    assert cut.endswith("... [cut]")
    assert len(tokenizer(cut)["input_ids"]) <= 20


def test_random_conversations_keep_their_budgets():
    """Whatever the model says and the limits are: no empty request, no overflow, nothing sampled is lost."""
    rng = random.Random(0)
    pieces = [ADD, ANSWER, call("echo", text="lorem ipsum " * 9), call("nothing"), "<tool>{", "</tool>", "talk ",
              "<|im_end|>", "é", "<think>", "</think>", "<answer>"]  # fmt: skip
    reasons = set()
    for _ in range(150):
        turns = [ids("".join(rng.choices(pieces, k=rng.randint(0, 4)))) for _ in range(6)]
        env = make_env(
            tokenizer=rng.choice([CHATML_TOKENIZER, QWEN3_TOKENIZER]),
            max_steps=rng.randint(0, 4),
            max_completion_length=rng.choice([1, 17, 60, 150, 300, 600]),
            max_turn_tokens=rng.choice([None, 1, 30, 100]),
            max_tool_response_tokens=rng.choice([10, 11, 40, 500]),
            max_model_len=rng.choice([None, 24, 100, 200, 400]),
            chat_template_kwargs={"enable_thinking": rng.random() < 0.5},
        )
        backend = Scripted([turns], logprobs=rng.random() < 0.5)
        rollouts = env.generate(["2+3?"], backend)["rollouts"]
        if env.chat_template_kwargs["enable_thinking"] or env.tokenizer is CHATML_TOKENIZER:
            assert len(rollouts[0].prompt_ids) == PROMPT_LENGTH
        verify(env, rollouts, backend)
        reasons.add(rollouts[0].stop_reason)
    assert reasons == set(StopReason) - OF_ENVIRONMENTS - OF_AGENTS
