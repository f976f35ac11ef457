"""Whole rollouts between a scripted model and its tools: ids, masks, texts, and what reward functions get."""

import pytest
from scripted import (
    ADD,
    ANSWER,
    CHATML_TOKENIZER,
    QWEN3_TOKENIZER,
    SPECIAL,
    THINKING,
    Scripted,
    add,
    call,
    converse,
    ids,
    make_env,
    result,
    run_many,
    verify,
)

from mt_grpo.rollout import Context, Record, Rollout, StopReason, ToolCall, ToolResult, Turn


def test_completions_have_calls_and_results_in_trls_shape():
    """In xml as in the other formats; the log, and what the model reads, stay as they are."""
    broken, unknown = "<tool>{no</tool>", call("nothing", x=1)
    scripts = [[call("add", a=2, b=3), ANSWER], [broken, unknown, ANSWER], [ANSWER]]
    rollouts = run_many([add], scripts)
    called, wrong, answered = (rollout.completion for rollout in rollouts)
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert called == [
        {"role": "assistant", "content": scripts[0][0], "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "<answer>5</answer>"},
    ]
    assert rollouts[0].messages == [
        {"role": "assistant", "content": scripts[0][0]},
        {"role": "user", "content": "<result>\n5\n</result>"},
        {"role": "assistant", "content": "<answer>5</answer>"},
    ]
    assert [message["role"] for message in wrong] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert "tool_calls" not in wrong[0] and wrong[1]["name"] == "unknown"  # a call that cannot be read is text
    assert wrong[2]["tool_calls"][0]["function"] == {"name": "nothing", "arguments": {"x": 1}}
    assert answered == [{"role": "assistant", "content": "<answer>5</answer>"}]


def test_a_turn_that_goes_on_is_one_message_with_all_its_calls():
    first = Turn([1], None, "a", "stop", [ToolCall("f", {"x": 1}), ToolCall(None, {}, "broken")], continuation="b")
    second = Turn([2], None, "c", "stop", [ToolCall("g", {})], [ToolResult("7")])
    second.messages = [{"role": "tool", "name": "g", "tool_call_id": "call00000", "content": "7"},
                       {"role": "user", "content": "On."}]  # fmt: skip
    last = Turn([3], None, "d", "stop")
    assert Rollout([], [], turns=[first, second, last]).completion == [
        {"role": "assistant", "content": "abc", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
            {"type": "function", "function": {"name": "g", "arguments": {}}}]},
        {"role": "tool", "name": "g", "tool_call_id": "call00000", "content": "7"},
        {"role": "user", "content": "On."},
        {"role": "assistant", "content": "d"},
    ]  # fmt: skip
    first.calls = []
    (call,) = second.tool_calls
    message = Rollout([], [], turns=[first, second]).completion[0]
    assert message == {"role": "assistant", "content": "abc", "tool_calls": [call]}


def test_what_a_turn_shows_of_its_results_and_which_rollouts_failed():
    """Each call's text with the first call's error, or else the messages; None where nothing was read."""
    turn = Turn([1], None, "", "stop")
    assert turn.observation is turn.error is turn.tool_call is None
    assert not turn.has_observation and turn.tool_seconds == 0
    turn.messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [1]}]
    assert (turn.observation, turn.has_observation) == ("a\n[1]", True)
    turn.results = [ToolResult("5", seconds=1.5), ToolResult("no", "tool", 2.0), ToolResult("late", "timeout")]
    assert (turn.observation, turn.error, turn.tool_seconds) == ("5\nno\nlate", "tool", 3.5)
    turn.calls = [ToolCall("a", {"x": 1}), ToolCall("b", {}, "no argument x"), ToolCall(None, {}, "no JSON")]
    assert turn.tool_calls == [{"type": "function", "function": {"name": "a", "arguments": {"x": 1}}}]
    assert turn.tool_call == turn.calls[0]
    for change in ({"went_on": True}, {"results": turn.results}, {"messages": turn.messages}, {"continuation": "So"}):
        assert Turn([1], None, "", "stop", **change).has_observation
    failed = {StopReason.ENVIRONMENT_ERROR, StopReason.AGENT_ERROR}
    turn = Turn([1], None, "", "stop")
    for reason in StopReason:
        assert Rollout([], [], turns=[turn], stop_reason=reason).failed == (reason in failed)
        assert Rollout([], [], stop_reason=reason).failed == (reason in {*failed, StopReason.CONTEXT_LENGTH})


def test_what_is_in_a_record_and_in_its_masks():
    turns = [
        Turn([1, 2], [-0.1, -0.2], "", "stop", observation_ids=[3]),
        Turn([4], [-0.3], "", "stop", trained=False),
        Turn([5, 6], [-0.4, -0.5], "", "stop", mask=[0, 1]),
    ]
    rollout, record = Rollout([], [9], turns=turns), Record([9], turns[1:], [1, 2])
    assert (rollout.owners, record.owners) == ([0, -1, 2], [-1, 2])
    assert (rollout.completion_ids, record.completion_ids) == ([1, 2, 3, 4, 5, 6], [4, 5, 6])
    assert (rollout.loss_mask, record.loss_mask) == ([1, 1, 0, 0, 0, 1], [0, 0, 1])
    assert (rollout.turn_ids, record.turn_ids) == ([0, 0, -1, -1, -1, 2], [-1, -1, 2])
    assert rollout.logprobs == [-0.1, -0.2, 0.0, -0.3, -0.4, -0.5]
    turns[0].logprobs = None
    assert rollout.logprobs is None and record.logprobs == [-0.3, -0.4, -0.5]
    rollout = Rollout([], [9], turns=[Turn([k], None, "", "stop") for k in range(6)])
    rollout.turns[0].context = Context([], [0])  # the first turn reads the prompt
    rollout.turns[2].context = Context([], [8])
    rollout.turns[3].after = 1
    rollout.turns[4].after = 2
    assert [(record.prompt_ids, record.completion_ids, record.owners) for record in rollout.records] == [
        ([9], [0, 1, 3], [0, 1, 3]), ([8], [2, 4, 5], [2, 4, 5])
    ]  # fmt: skip
    assert Rollout([], [9]).records == [Record([9], [], [])]


def test_the_history_is_what_the_model_reads_next():
    """Since the last edit; an assistant's message goes on where a turn says so, at the end of a prompt it does not."""

    def said(messages):
        return [(message["role"], message["content"]) for message in messages]

    user = {"role": "user", "content": "more"}
    rollout = Rollout([{"role": "user", "content": "?"}, {"role": "assistant", "content": "So"}], [1, 2])
    rollout.turns = [
        Turn([3], None, "a", "stop", messages=[user], observation_ids=[4, 5]),
        Turn([6], None, "b", "stop"),
    ]
    before = [("user", "?"), ("assistant", "So"), ("assistant", "a"), ("user", "more"), ("assistant", "b")]
    assert said(rollout.history) == before and rollout.history_ids == [1, 2, 3, 4, 5, 6] and rollout.new_tokens == 4
    rollout.turns[1].continuation = "c"
    rollout.turns.append(Turn([8], None, "d", "stop", observation_ids=[9]))
    assert said(rollout.history)[-2:] == [("user", "more"), ("assistant", "bcd")] and rollout.prefill == ""
    rollout.turns[1].context = Context([{"role": "system", "content": "short"}], [7, 7], new_tokens=2)
    assert said(rollout.history) == [("system", "short"), ("assistant", "bcd")]
    rollout.turns[2].context = Context([user, {"role": "assistant", "content": "I"}], [7], new_tokens=1)
    assert said(rollout.history) == [("user", "more"), ("assistant", "Id")] and rollout.history_ids == [7, 8, 9]
    assert rollout.new_tokens == 6 + 2 + 1
    rollout.edited = Context([user], [0, 0, 0], new_tokens=3)
    assert said(rollout.history) == [("user", "more")] and rollout.history_ids == [0, 0, 0]
    assert rollout.new_tokens == 6 + 2 + 1 + 3


@pytest.mark.contract("MultiTurnToolEnv.generate", "xml")
def test_two_turns_in_numbers():
    """Every id of a short conversation, written out."""
    rollout, backend = converse(call("echo", text="A"), "<answer>B</answer><|im_end|>", prompt="2?")
    prompt = [257, 117, 115, 101, 114, 10, 50, 63, 258, 10, 257, 97, 115, 115, 105, 115, 116, 97, 110, 116, 10]
    turn_0 = [
        60, 116, 111, 111, 108, 62,  # <tool>
        123, 34, 110, 97, 109, 101, 34, 58, 32, 34, 101, 99, 104, 111, 34, 44, 32,  # {"name": "echo",
        34, 97, 114, 103, 115, 34, 58, 32, 123, 34, 116, 101, 120, 116, 34, 58, 32, 34, 65, 34, 125, 125,
        60, 47, 116, 111, 111, 108, 62,  # </tool>
    ]  # fmt: skip
    observation = [
        258, 10,  # the end of the model's turn
        257, 117, 115, 101, 114, 10,
        60, 114, 101, 115, 117, 108, 116, 62, 10, 65, 10, 60, 47, 114, 101, 115, 117, 108, 116, 62,  # <result>A
        258, 10,
        257, 97, 115, 115, 105, 115, 116, 97, 110, 116, 10,
    ]  # fmt: skip
    turn_1 = [60, 97, 110, 115, 119, 101, 114, 62, 66, 60, 47, 97, 110, 115, 119, 101, 114, 62]
    assert rollout.prompt_ids == prompt
    assert rollout.completion_ids == turn_0 + observation + turn_1
    assert rollout.loss_mask == [1] * 52 + [0] * 41 + [1] * 18
    assert rollout.turn_ids == [0] * 52 + [-1] * 41 + [1] * 18
    assert rollout.logprobs == ([-j / 8 for j in range(1, 53)] + [0.0] * 41 + [-j / 8 for j in range(1, 19)])
    assert [r.prompt for r in backend.requests] == [prompt, prompt + turn_0 + observation]
    assert [r.max_tokens for r in backend.requests] == [4096, 4096 - 52 - 41]
    assert rollout.stop_reason == StopReason.ANSWERED


@pytest.mark.contract("MultiTurnToolEnv.generate")
def test_system_prompt_and_the_lists_of_generate():
    env = make_env([add], "Tools:\n{tool_descriptions}\nWrite {{}}.")
    backend = Scripted([[ADD, ANSWER], [ANSWER]], tokenizer=CHATML_TOKENIZER)
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "5?"}]
    out = env.generate(["2+3?", own], backend, {"temperature": 0.5})
    verify(env, out["rollouts"], backend)
    system = "Tools:\nadd(a: int, b: int) -> str\nAdds.\nWrite {}."
    assert out["prompt_ids"][0] == ids(
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert out["prompt_ids"][1] == ids(
        "<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user\n5?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [len(m) for m in out["messages"]] == [5, 3]
    assert out["messages"][1][-1] == {"role": "assistant", "content": ANSWER}
    assert out["ids"][1] == ids(ANSWER) and out["mask"][1] == [1] * 18 and out["turn_ids"][1] == [0] * 18
    assert out["logprobs"][1] == [-j / 8 for j in range(1, 19)]
    assert out["stop_reasons"] == ["answered", "answered"]
    params = {"temperature": 0.5, "stop_token_ids": [SPECIAL["<|im_end|>"]], "stop": ["</tool>", "</answer>"]}
    assert all(request.params == params for request in backend.requests)


def test_the_backends_tokenizer_is_used_where_the_environment_has_none():
    """And unknown logprobs stay unknown."""
    env = make_env(tokenizer=None)
    out = env.generate(["2+3?"], Scripted([[ANSWER]], tokenizer=CHATML_TOKENIZER))
    assert out["ids"] == [ids(ANSWER)]
    with pytest.raises(ValueError, match="No tokenizer"):
        env.generate(["2+3?"], Scripted([[ANSWER]]))
    env, backend = make_env(), Scripted([[ADD, ANSWER]], logprobs=False)
    out = env.generate(["2+3?"], backend)
    verify(env, out["rollouts"], backend)
    assert out["logprobs"] == [None]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}])
def test_qwen3_thinking_stays_in_the_history(kwargs):
    turns = [THINKING + ADD, "<think>\ndone\n</think>\n\n" + ANSWER]
    rollout, backend = converse(*turns, tokenizer=QWEN3_TOKENIZER, chat_template_kwargs=kwargs)
    prompt = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    history = prompt + turns[0] + result("5")
    assert [r.prompt for r in backend.requests] == [ids(prompt), ids(history)]
    assert rollout.prompt_ids + rollout.completion_ids == ids(history + turns[1])
    assert rollout.loss_mask == [1] * len(ids(turns[0])) + [0] * len(ids(result("5"))) + [1] * len(ids(turns[1]))
    assert rollout.stop_reason == StopReason.ANSWERED

    # What rendering the messages again would have given: the thinking of turn 0 is gone.
    messages = rollout.prompt_messages + rollout.messages[:2]
    again = QWEN3_TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    assert again == prompt + ADD + result("5")
    assert "add them" in QWEN3_TOKENIZER.decode(backend.requests[1].prompt) and "add them" not in again


def test_qwen3_without_thinking():
    """The empty think block is part of every generation prompt, and stays in the history too."""
    kwargs = {"enable_thinking": False}
    rollout, backend = converse(ADD, ANSWER, tokenizer=QWEN3_TOKENIZER, chat_template_kwargs=kwargs)
    empty = "<think>\n\n</think>\n\n"
    prompt = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n" + empty
    assert [r.prompt for r in backend.requests] == [ids(prompt), ids(prompt + ADD + result("5") + empty)]
    assert rollout.completion_ids == ids(ADD + result("5") + empty + ANSWER)
    assert rollout.loss_mask == [1] * len(ids(ADD)) + [0] * len(ids(result("5") + empty)) + [1] * len(ids(ANSWER))

    messages = rollout.prompt_messages + rollout.messages[:2]
    again = QWEN3_TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    assert again == "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n" + ADD + result("5") + empty
