"""Conversations in notebooks and step by step, and errors of the backend."""

import asyncio

import pytest
from scripted import (
    ADD,
    ANSWER,
    CHATML_TOKENIZER,
    PROMPT_LENGTH,
    QWEN3_TOKENIZER,
    TALK,
    THINKING,
    Scripted,
    call,
    ids,
    make_env,
    result,
    verify,
    within,
)

import mt_grpo_trainer as mt
from mt_grpo.base.event_loop import run_async
from mt_grpo.rollout import StopReason


def test_generate_and_step_work_inside_a_running_loop():
    env = make_env()

    async def cell():
        out = env.generate(["2+3?"], Scripted([[ADD, ANSWER]]))
        states, backend = env.start(["2+3?"]), Scripted([[ADD, ANSWER]])
        while any(state.stop_reason is None for state in states):
            env.step(states, backend)
        return out, states

    out, states = within(lambda: asyncio.run(cell()))
    assert out["ids"] == [states[0].completion_ids] == [ids(ADD + result("5") + ANSWER)]


@pytest.mark.contract("MultiTurnToolEnv.step")
def test_step_by_step_is_generate():
    scripts = [
        [ADD, f"{THINKING}{call('echo', text='é')}", ANSWER],
        [ANSWER],
        ["<tool>{<|im_end|>", "nothing<|im_end|>"],
        [ADD, ADD, ADD],
        [TALK],
    ]
    prompts = ["a", "b", "c", "d", "e"]
    env = make_env(tokenizer=QWEN3_TOKENIZER, max_completion_length=500)
    whole_backend, step_backend = Scripted(scripts), Scripted(scripts)
    whole = env.generate(prompts, whole_backend, {"temperature": 0.3})
    states = env.start(prompts)
    open_counts = []
    while any(state.stop_reason is None for state in states):
        open_counts.append(sum(state.stop_reason is None for state in states))
        assert env.step(states, step_backend, {"temperature": 0.3}) is states
    assert open_counts == [5, 3, 2]
    verify(env, whole["rollouts"], whole_backend)
    verify(env, states, step_backend)
    for a, b in zip(whole["rollouts"], states, strict=True):
        assert (a.prompt_ids, a.completion_ids, a.loss_mask, a.turn_ids, a.logprobs, a.messages, a.stop_reason) == (
            b.prompt_ids, b.completion_ids, b.loss_mask, b.turn_ids, b.logprobs, b.messages, b.stop_reason,
        )  # fmt: skip
    assert env.step(states, Scripted([])) is states  # nothing left to do


MESSAGES = [{"role": "user", "content": "5?"}]


@pytest.mark.parametrize(
    "prompts, said", [("2+3?", "is '2"), (MESSAGES, "contains {"), ([["2+3?"]], r"contains \['2")]
)
def test_prompts_that_are_no_list_of_conversations_are_refused(prompts, said):
    env, client = make_env(), mt.VLLMServerClient("127.0.0.1", 1, CHATML_TOKENIZER)
    for use, name in ((env.start, "prompts"), (client.chat, "messages_list")):
        with pytest.raises(ValueError, match=f"^{name} {said}"):
            use(prompts)


def test_unknown_sampling_parameters_are_refused():
    env, backend = make_env(), Scripted([[ANSWER]])
    client, states = mt.VLLMServerClient("127.0.0.1", 1, CHATML_TOKENIZER), env.start(["2+3?"])
    for use in (
        lambda params: env.generate(["2+3?"], backend, params),
        lambda params: env.step(states, backend, params),
        lambda params: run_async(client.generate([1], 4, params)),
        lambda params: client.chat([MESSAGES], params),
    ):
        with pytest.raises(ValueError, match="^sampling_params: unknown key 'temprature'. Did you mean 'temperature'"):
            use({"top_p": 0.5, "temprature": 1})
    with pytest.raises(ValueError, match="'stop' is set per turn"):
        env.generate(["2+3?"], backend, {"stop": ["5"]})
    assert backend.requests == []


def test_the_context_is_the_backends_where_the_environment_has_none():
    """A notebook gives none: the second turn would be asked for more than the server has."""
    for limits in ({}, {"max_model_len": PROMPT_LENGTH + 95 + 20}):
        env, backend = make_env(**limits), Scripted([[ADD, TALK]])
        backend.max_model_len = PROMPT_LENGTH + 95 + (500 if limits else 20)
        (rollout,) = env.generate(["2+3?"], backend)["rollouts"]
        assert [r.max_tokens for r in backend.requests] == [115, 20]
        assert rollout.stop_reason == StopReason.CONTEXT_LENGTH
