"""Agents that speak OpenAI's API: real clients over real HTTP; the policy is scripted where its ids are known."""

import asyncio
import fcntl
import json
import os
import random
import subprocess
import sys
import time
import types
from contextlib import suppress

import httpx
import numpy
import openai
import psutil
import pytest
import warm_python
from processes import alive, ends
from project import ROOT
from scripted_schedulers import TOKENIZER, ids, scripted, user

import mt_grpo_trainer as mt
from mt_grpo.base.event_loop import allow_many_open_files, run_async
from mt_grpo.integrations.agents import conversation as openai_agent, launcher, programs, server as agent_server
from mt_grpo.integrations.agents.chains import Asked
from mt_grpo.integrations.agents.conversation import agent_conversation, agent_environment
from mt_grpo.integrations.agents.programs import CommandAgent, FunctionAgent, environment_of
from mt_grpo.integrations.agents.session import AgentSession
from mt_grpo.rollout import StopReason
from mt_grpo.training.batch import is_cut_off, trained_records

NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": NUMBERS}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>'


def run(agent, *turns, seconds=0.0, timeout=120.0, max_model_calls=8, row=None, llm=None, fails=False, **settings):
    """(the rollout, the policy) of one agent with a scripted policy. Raises what failed, unless the agent should."""
    program = CommandAgent(agent) if isinstance(agent, str) else agent
    program = program if isinstance(program, CommandAgent) else FunctionAgent(agent)
    settings = {"tokenizer": TOKENIZER, "tool_format": "hermes", "max_completion_length": 400, **settings}
    cls = agent_conversation(mt.MultiTurnToolEnv, program, timeout, max_model_calls)
    env = cls([], None, environment=agent_environment(program), **settings)
    llm = llm or scripted(*turns, seconds=seconds)
    row = {"question": "What?", **(row or {})}
    (rollout,) = env.start([[]], rows=[row])
    try:
        run_async(env.converse(rollout, llm, {"temperature": 1.0}))
    finally:
        for server, _ in env._servers.values():
            run_async(server.stop())
    if rollout.error is not None and not fails:
        raise rollout.error
    llm.verify(rollout)
    assert all(turn.logprobs == [-j / 64 for j in range(len(turn.token_ids))] for turn in rollout.turns)
    return rollout, llm


async def ask(client, messages, **options):
    """The answer's message, as a dict that goes into the next request."""
    answer = await client.chat.completions.create(model="policy", messages=messages, **options)
    return answer.choices[0].message.model_dump(exclude_none=True)


def tool_message(message, text="2"):
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in message["tool_calls"]]


@pytest.mark.contract("OpenAI chat API", "token for token", "agent by function")
@pytest.mark.program("openai")
def test_a_conversation_token_for_token():
    async def agent(row, client):
        messages = [{"role": "system", "content": "Be brief."}, user(row["question"])]
        said = await ask(client, messages, tools=[ADD])
        client.reward(0.5)
        client.reward(0.25)
        messages += [said, *tool_message(said)]
        return {"reward": 1, "said": (await ask(client, messages, tools=[ADD]))["content"]}

    rollout, llm = run(agent, CALL, "It is 2.")
    schema = json.dumps(ADD)
    prompt = (
        f"<|im_start|>system\nBe brief.\n<tools>\n{schema}\n</tools><|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n"
    )
    assert TOKENIZER.decode(rollout.prompt_ids) == f"{prompt}<|im_start|>assistant\n"
    suffix = "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    call, answer, end = ids(CALL), ids("It is 2."), [TOKENIZER.eos_token_id]
    assert rollout.completion_ids == call + end + ids(suffix) + answer + end
    assert rollout.loss_mask == [1] * (len(call) + 1) + [0] * len(ids(suffix)) + [1] * (len(answer) + 1)
    assert rollout.turn_ids == [0] * (len(call) + 1) + [-1] * len(ids(suffix)) + [1] * (len(answer) + 1)
    sampled = [[-k / 64 for k in range(len(text) + 1)] for text in (call, answer)]
    assert rollout.logprobs == sampled[0] + [0.0] * len(ids(suffix)) + sampled[1]
    assert [turn.reward for turn in rollout.turns] == [0.75, None] and len(rollout.records) == 1
    assert [call.arguments for call in rollout.turns[0].calls] == [{"a": 1, "b": "x y"}]
    assert [result.text for result in rollout.turns[0].results] == ["2"]
    assert rollout.stop_reason == StopReason.AGENT_DONE and rollout.reward == 1.0
    assert rollout.environment.result == {"reward": 1, "said": "It is 2."}
    assert rollout.environment.row["question"] == "What?"


@pytest.mark.contract("OpenAI chat API")
def test_what_the_api_says_of_an_answer():
    said = []

    async def agent(row, client):
        for messages, options in (
            ([user("a")], {"tools": [ADD]}), ([user("b")], {"max_tokens": 3}), ([user("c")], {"stop": "END"}),
            ([user("d")], {"tools": [ADD], "tool_choice": "none"}), ([user("e")], {"tools": [ADD]}),
        ):  # fmt: skip
            said.append(await client.chat.completions.create(model="policy", messages=messages, **options))
        assert [model.id async for model in client.models.list()] == ["policy", "policy-frozen"]
        assert (await client.models.retrieve("policy")).id == "policy"
        cut = await respond(client, "f", max_output_tokens=3)
        assert (cut.usage.output_tokens, cut.status) == (3, "incomplete")
        assert cut.incomplete_details.reason == "max_output_tokens"

    broken = '<tool_call>\n{"name": "add", "arguments": {}\n</tool_call>'
    rollout, llm = run(agent, f"<think>Hm.</think>Now.\n{CALL}", "1 2 3 4 5 6", "1 END 2", CALL, f"{CALL}\n{broken}")
    message = said[0].choices[0].message
    assert message.content == "Now." and message.reasoning_content == "Hm." and len(message.tool_calls) == 1
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": "x y"}
    reasons = [answer.choices[0].finish_reason for answer in said]
    assert reasons == ["tool_calls", "length", "stop", "stop", "tool_calls"]
    assert said[1].usage.completion_tokens == 3 and said[1].usage.prompt_tokens == len(llm.asked[1][0])
    assert said[2].choices[0].message.content == "1 " and said[3].choices[0].message.content == CALL
    assert TOKENIZER.decode(rollout.turns[2].token_ids).startswith("1 END")
    assert len(rollout.turns[2].token_ids) < len(llm.asked[2][1]) and llm.params[2]["stop"] == ["END"]
    last = said[4].choices[0].message  # the call that can be read, and the other one as text
    assert len(last.tool_calls) == 1 and last.content == broken
    assert [call.error is None for call in rollout.turns[4].calls] == [True, False]
    assert len(rollout.records) == 6 and rollout.reward is None


def rewritten(function, text):
    return lambda said, start: said["tool_calls"][0]["function"].update({function: text})


SAME = {
    "arguments written anew": rewritten("arguments", '{ "b":"x y","a":1.0 }'),
    "without reasoning": lambda said, start: said.pop("reasoning_content"),
    "content null": lambda said, start: said.update(content=None),
    "thinking in the text": lambda said, start: said.update(content="<think>Hm.</think>\n\n"),
    "white space": lambda said, start: said.update(content=" \n "),
    "further keys": lambda said, start: said.update(name="policy", annotations=[], status="done"),
    "parts": lambda said, start: said.update(content=[{"type": "text", "text": ""}]),
    "another id": lambda said, start: said["tool_calls"][0].update(id="mine"),
}
OTHER = {
    "another argument": rewritten("arguments", '{"a": 2, "b": "x y"}'),
    "true is not 1": rewritten("arguments", '{"a": true, "b": "x y"}'),
    "a text": lambda said, start: said.update(content="I call."),
    "another prompt": lambda said, start: start[1].update(content="Add. "),
    "a call less": lambda said, start: said.pop("tool_calls"),
}


@pytest.mark.contract("token for token")
@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_what_programs_do_to_a_history_changes_nothing_and_what_was_not_said_begins_a_record(name):
    async def agent(row, client):
        start = [{"role": "developer", "content": "Be brief."}, user("Add.")]
        said = await ask(client, start, tools=[ADD])
        results = tool_message(said)
        start[0]["role"] = "system"
        start[1]["content"] = [{"type": "text", "text": "Add."}]
        (SAME | OTHER)[name](said, start)
        results = tool_message(said) if "tool_calls" in said else results
        tools = [{"function": dict(reversed(ADD["function"].items())), "type": "function"}]
        await ask(client, [*start, said, *results], tools=tools)

    rollout, _ = run(agent, f"<think>Hm.</think>{CALL}", "2")
    expected = [[0, 1]] if name in SAME else [[0], [1]]
    assert [record.numbers for record in rollout.records] == expected


RECORDS = {}  # the name of an agent -> (the agent, what the policy writes, the turns of each record, settings)


def records(expected, *turns, **settings):
    """Register an agent with the records that its requests make."""
    return lambda agent: RECORDS.update({agent.__name__: (agent, turns, expected, settings)})


@records([[0], [1]], CALL, "2")
async def other_tools(row, client):
    said = await ask(client, [user("Add.")], tools=[ADD])
    other = {"type": "function", "function": {**ADD["function"], "description": "Add two."}}
    await ask(client, [user("Add."), said, *tool_message(said)], tools=[other])


@records([[0, 2, 3], [1]], "1", "2", "3", "4")
async def an_assistants_message_that_was_not_sampled(row, client):
    messages = [user("a")]
    messages += [await ask(client, messages), user("b")]
    await ask(client, [*messages, {"role": "assistant", "content": "Mine."}, user("c")])
    await ask(client, messages)  # continues
    await ask(client, [*messages, {"role": "assistant", "content": "3"}, user("c")])  # sampled: continues


@records([[0, 3], [1, 2], [4]], "1", "2", "3", "4", "5")
async def repetitions_and_branches(row, client):
    one, two = await ask(client, [user("a")]), await ask(client, [user("a")])
    for said in (two, one):
        await ask(client, [user("a"), said, user("b")])
    await ask(client, [user("a"), one, user("c")])  # a second branch of the same answer


@records([[0], [1], [2], [3]], *"ABCD", seconds=0.05)
async def equal_requests_at_the_same_time(row, client):
    votes = await asyncio.gather(*(ask(client, [user("Vote.")]) for _ in range(4)))
    assert sorted(vote["content"] for vote in votes) == ["A", "B", "C", "D"]


@records([[0, 1], [2]], "1 END 2 3 4", "2", "3")
async def a_stop_text_that_is_put_back(row, client):
    said = await ask(client, [user("a")], stop=["END"])
    assert said["content"] == "1 "
    await ask(client, [user("a"), {**said, "content": "1 END"}, user("b")], stop=["END"])
    await ask(client, [user("a"), {**said, "content": "1 ENDE"}, user("b")], stop=["END"])  # another text


@records([[0]], "<think>so END more</think> ok")
async def a_stop_text_in_thinking(row, client):
    assert (await ask(client, [user("a")], stop=["END"]))["reasoning_content"] == "so"


TAG = "Write the tag <think> "


@records([[0], [1, 2], [3], [4, 5]], "if x:\n  y\nz", "if x:\n  y\n  z", "2", f"{TAG}first.", f"{TAG}never.", "5")
async def answers_that_differ_in_white_space_or_behind_a_tag(row, client):
    for text in "ab":
        said = [await ask(client, [user(text)]) for _ in range(2)]
        await ask(client, [user(text), said[1], user("c")])


@records([[0, 1, 4], [2, 3]], f"{CALL}\n{CALL}", "ok", max_completion_length=2000)
async def exchanged_results(row, client):
    start = [user("a")]
    said = await ask(client, start, tools=[ADD])
    one, two = tool_message(said)
    told = []
    for contents in (("one", "two"), ("two", "one")):
        results = [{**each, "content": content} for each, content in zip((one, two), contents)]
        told.append([*start, said, *results, await ask(client, [*start, said, *results], tools=[ADD])])
    for messages in reversed(told):
        await ask(client, [*messages, user("b")], tools=[ADD])


@records([[0, 2, 5], [1, 3, 4]], f"<think>1</think>{CALL}", f"<think>2</think>{CALL}", "ok", "ok", "3", "4")
async def equal_answers_with_other_ids_of_calls(row, client):
    chains = []
    for _ in range(2):
        said = await ask(client, [user("a")], tools=[ADD])
        chains.append([user("a"), said, *tool_message(said)])
    for chain in chains:
        chain += [await ask(client, chain, tools=[ADD]), user("b")]
    for chain in reversed(chains):
        await ask(client, chain, tools=[ADD])


@records([[0, 1]], CALL.replace('"a": 1, "b": "x y"', '"a": NaN, "b": [1e999, -Infinity, 1.5], "NaN": "NaN"'), "2")
async def arguments_that_are_no_json(row, client):
    """Python's `json` and a policy write NaN; Node's `JSON.parse` fails. What the policy wrote goes on."""
    said = await ask(client, [user("a")], tools=[ADD])
    arguments = said["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments, parse_constant=pytest.fail) == {"a": None, "b": [None, None, 1.5], "NaN": "NaN"}
    await ask(client, [user("a"), said, *tool_message(said)], tools=[ADD])


@records([[0], [1]], "1")
async def a_developers_message_in_the_middle(row, client):
    messages = [{"role": "system", "content": "S."}, user("a")]
    messages += [await ask(client, messages), {"role": "developer", "content": "D."}, user("b")]
    await ask(client, messages)  # the template reads it at the beginning


@pytest.mark.contract("token for token")
@pytest.mark.parametrize("name", RECORDS)
def test_records_of(name):
    agent, turns, expected, settings = RECORDS[name]
    rollout, _ = run(agent, *turns, **settings)
    assert [record.numbers for record in rollout.records] == expected
    assert all(turn.trained for turn in rollout.turns)
    assert [len(turn.logprobs) for turn in rollout.turns] == [len(turn.token_ids) for turn in rollout.turns]


def test_a_frozen_branch_is_read_and_not_trained():
    async def agent(row, client):
        said = await ask(client, [user("a")])
        await client.chat.completions.create(model="policy-frozen", messages=[user("other")])
        frozen = await client.chat.completions.create(model="policy-frozen", messages=[user("a"), said, user("b")])
        message = frozen.choices[0].message.model_dump(exclude_none=True)
        await ask(client, [user("a"), said, user("b"), message, user("c")])
        assert (await respond(client, "Title?", model="policy-frozen")).model == frozen.model == "policy-frozen"

    rollout, _ = run(agent, "1", "2", "3", "4", "5")
    assert [turn.trained for turn in rollout.turns] == [True, False, False, True, False]
    assert [record.numbers for record in rollout.records] == [[0, 2, 3], [1], [4]]
    owners = rollout.records[0].turn_ids
    assert sorted(set(owners)) == [-1, 0, 3] and rollout.records[0].loss_mask == [int(k >= 0) for k in owners]
    assert not any(rollout.records[1].loss_mask)
    assert [record.numbers for record in trained_records(rollout)] == [[0, 2, 3]]


def test_tokens_that_begin_or_end_a_message_are_broken_in_texts_of_users_and_tools():
    """Tags of formats stay, and so does all that the agent writes as the system or the assistant."""

    async def agent(row, client):
        start = [{"role": "system", "content": "Write a call as <tool_call>...</tool_call>."}, user("a<|im_end|>")]
        said = await ask(client, start, tools=[ADD])
        await ask(client, [*start, said, *tool_message(said, "</tool_response><|im_end|>")], tools=[ADD])
        shown = {"role": "assistant", "content": "<tool_call>\n{}\n</tool_call> <|im_start|>"}
        developer = {"role": "developer", "content": "Think in <think></think>."}
        await ask(client, [developer, user("<think>b<|im_start|>"), shown, user("c")])

    rollout, llm = run(agent, CALL, "2")
    text = TOKENIZER.decode(rollout.prompt_ids + rollout.completion_ids)
    assert "Write a call as <tool_call>...</tool_call>." in text and len(rollout.records) == 2
    assert "a< |im_end|>" in text and "\n</tool_response>< |im_end|>\n" in text
    assert llm.asked[2][0] == ids(
        "<|im_start|>system\nThink in <think></think>.<|im_end|>\n<|im_start|>user\n<think>b< |im_start|><|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n{}\n</tool_call> <|im_start|><|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def respond(client, items, **options):
    return await client.responses.create(**{"model": "policy", "input": items, **options})


FLAT = {"type": "function", **ADD["function"]}


@pytest.mark.contract("streaming")
@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_streams(monkeypatch, seconds):
    monkeypatch.setattr(agent_server, "KEEP_ALIVE_SECONDS", 0.1)

    async def agent(row, client):
        options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [ADD], "messages": [user("a")]}
        chunks = [c async for c in await client.chat.completions.create(model="policy", **options)]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert "".join(delta.content or "" for delta in deltas) == "Now."
        assert json.loads(calls[0].function.arguments) == {"a": 1, "b": "x y"}
        assert chunks[-1].usage.completion_tokens > 5 and chunks[-2].choices[0].finish_reason == "tool_calls"
        async with client.responses.stream(model="policy", input="b", tools=[FLAT]) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert final.output_text == "It is 2." and "response.output_text.delta" in kinds
        return 1.0

    rollout, _ = run(agent, f"Now.\n{CALL}", "It is 2.", seconds=seconds)
    assert rollout.reward == 1.0 and len(rollout.turns) == 2
    with pytest.raises(mt.ServerError, match="gone"):
        run(agent, mt.ServerError("gone"), seconds=seconds)  # no failure of the agent, which is told


async def post(client, body, path="chat/completions", **headers):
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json", **headers}
        content = json.dumps(body)  # httpx would not write a lone surrogate
        return await http.post(f"{client.base_url}{path}", content=content, headers=headers)


def said_in(answer):
    """The texts of an answer over HTTP."""
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


RETRY = {"x-stainless-retry-count": "1"}


def test_a_retry_joins_what_is_in_flight_and_gets_what_was_sampled():
    """Of equal requests each client gets an answer of its own, also before the server has noticed that one left."""
    body = {"model": "policy", "messages": [user("a")]}

    async def agent(row, client):
        first = asyncio.ensure_future(post(client, body))
        while not llm.began:
            await asyncio.sleep(0.01)
        retry = asyncio.ensure_future(post(client, dict(reversed(body.items())), **RETRY))
        assert said_in(await first) == said_in(await retry) == ["1"]
        assert said_in(await post(client, body, **RETRY)) == ["1"]
        assert said_in(await post(client, body, **{"x-stainless-retry-count": "0"})) == ["2"]
        assert said_in(await post(client, body, **RETRY)) == ["2"]  # of equal requests, the last one

    llm = scripted("1", "2", seconds=0.3)
    rollout, _ = run(agent, llm=llm)
    assert len(rollout.turns) == 2 == len(llm.asked)
    equal = [Asked("x", range(k, k + 1), True, waiting=1) for k in range(2)]
    session = types.SimpleNamespace(_asked=[Asked("y", range(2, 3), True, waiting=1), *equal])
    joined = [AgentSession._asked_before(session, "x") for _ in range(4)]
    assert [each.numbers[0] for each in joined] == [0, 1, 0, 1]
    equal[1].waiting = 0
    assert AgentSession._asked_before(session, "x") is equal[1]


def test_an_answer_that_nobody_received_is_not_trained():
    async def agent(row, client):
        gone = asyncio.ensure_future(ask(client, [user("a")]))
        while not llm.began:
            await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        while len(llm.asked) < 1:
            await asyncio.sleep(0.01)
        said = await ask(client, [user("a")])  # no retry: an agent that goes on without the answer
        await ask(client, [user("a"), said, user("b")])
        client.reward(0.5)

    llm = scripted("same", "same", "2", seconds=0.2)
    rollout, _ = run(agent, llm=llm)
    assert [turn.text for turn in rollout.turns] == ["same", "same", "2"]
    assert [turn.trained for turn in rollout.turns] == [False, True, True]
    assert [record.numbers for record in rollout.records] == [[0], [1, 2]]  # not behind what nobody has read
    assert [record.numbers for record in trained_records(rollout)] == [[1, 2]]
    assert rollout.turns[0].info == {"received": False} and rollout.turns[2].reward == 0.5


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers(stream):
    """Each is a turn and a branch of its own; the prompt of all counts once."""
    got = {}

    async def agent(row, client):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        create = client.chat.completions.create
        answer = await create(model="policy", messages=[user("a")], n=3, tools=[ADD], **options)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        texts = ["", "", ""]
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
        assert texts == ["one", "", "three 3"]
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert reasons == ["stop", "tool_calls", "stop"]
        got["usage"] = chunks[-1].usage
        client.reward(0.5, chunks[0], choice=2)
        for k, text in ((2, "b"), (0, "c")):
            await ask(client, [user("a"), {"role": "assistant", "content": texts[k]}, user(text)], tools=[ADD])

    rollout, llm = run(agent, "one", CALL, "three 3", "4", "5", max_model_calls=5)
    assert [turn.text for turn in rollout.turns] == ["one", CALL, "three 3", "4", "5"]
    assert [record.numbers for record in rollout.records] == [[0, 4], [1], [2, 3]]
    assert [turn.reward for turn in rollout.turns] == [None, None, 0.5, None, None]
    written, usage = sum(len(sampled) for _, sampled in llm.asked[:3]), got["usage"]
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(llm.asked[0][0]), written)


async def endless(row, client):
    messages = [user("a")]
    while True:
        messages += [await ask(client, messages), user("b")]


async def catches(row, client):
    try:
        await endless(row, client)
    except openai.RateLimitError as error:
        assert error.code == "rollout_over" and error.response.headers["x-should-retry"] == "false"
        return 0.25


@pytest.mark.parametrize("agent, reward", [(endless, 0.0), (catches, 0.25)])
def test_calls_beyond_the_limit(agent, reward):
    rollout, llm = run(agent, "1", max_model_calls=3)
    assert rollout.stop_reason == StopReason.MAX_TURNS
    assert len(rollout.turns) == 3 == len(llm.asked) and rollout.reward == reward


def test_the_token_budget_holds_exactly():
    """Requests at the same time share it."""
    rollout, llm = run(endless, "1 2 3 4 5 6 7 8", max_completion_length=60, max_model_calls=32)
    assert rollout.stop_reason == StopReason.MAX_TOKENS and len(rollout.completion_ids) <= 60
    assert rollout.turns[-1].finish_reason == "length" and len(rollout.completion_ids) == 60

    async def agent(row, client):
        with pytest.raises(openai.RateLimitError):
            await asyncio.gather(*(ask(client, [user(name)]) for name in "abc"))
        return 0.5

    rollout, _ = run(agent, "1 2 3 4 5 6 7 8", max_completion_length=20, seconds=0.05)
    assert sum(len(turn.token_ids) for turn in rollout.turns) == 20 and rollout.reward == 0.5
    assert rollout.stop_reason == StopReason.MAX_TOKENS and rollout.turns[-1].finish_reason == "length"

    async def agent(row, client):
        messages = [user("a"), await ask(client, [user("a")]), user("x " * 100)]
        await client.chat.completions.create(model="policy", messages=messages, n=4)  # read once

    rollout, _ = run(agent, "1", max_completion_length=300)
    assert [turn.trained for turn in rollout.turns] == [True] * 5


def test_an_agents_time():
    """An agent that takes too long is cut off; the policy's time is not the agent's."""

    async def agent(row, client):
        await ask(client, [user("a")])
        await asyncio.sleep(3600)

    rollout, _ = run(agent, "1", timeout=0.5)
    assert rollout.stop_reason == StopReason.AGENT_TIMEOUT
    assert not rollout.failed and is_cut_off(rollout) and len(rollout.turns) == 1 and rollout.reward == 0.0

    async def never_asks(row, client):
        await asyncio.sleep(3600)

    rollout, _ = run(never_asks, "1", timeout=0.1, fails=True)
    assert rollout.stop_reason == StopReason.AGENT_ERROR and "agent_timeout=0.1" in str(rollout.error)

    async def agent(row, client):
        await ask(client, [user("a")])
        await ask(client, [user("b")])
        return 1.0

    rollout, _ = run(agent, "1", seconds=2.1, timeout=2.0)
    assert rollout.reward == 1.0 and rollout.stop_reason == StopReason.AGENT_DONE


CUT = {  # limits -> (why the rollout ended, whether the agent's own failure)
    "budget": ({"max_completion_length": 20}, {}, StopReason.MAX_TOKENS),
    "turn": ({"max_turn_tokens": 20}, {}, StopReason.MAX_TOKENS),
    "context": ({"max_model_len": 60, "max_completion_length": 400}, {}, StopReason.CONTEXT_LENGTH),
    "the agent's": ({}, {"max_tokens": 20}, StopReason.AGENT_ERROR),
    "the agent's, which is the budget": ({"max_completion_length": 20}, {"max_tokens": 20}, StopReason.MAX_TOKENS),
}


@pytest.mark.parametrize("name", CUT)
def test_an_agent_that_raises_at_an_answer_that_was_cut(name):
    """The policy's doing, unless it is the agent's own limit."""
    limits, options, reason = CUT[name]

    async def agent(row, client):
        answer = await client.chat.completions.create(model="policy", messages=[user("a")], **options)
        assert answer.choices[0].finish_reason == "length"
        raise RuntimeError("Incomplete response returned, reason: max_output_tokens")

    failed = reason == StopReason.AGENT_ERROR
    rollout, _ = run(agent, "word " * 90, fails=failed, **limits)
    assert (rollout.stop_reason, rollout.failed, rollout.reward) == (reason, failed, None if failed else 0.0)


def test_an_agent_that_swallows_its_end_is_ended(monkeypatch):
    cancelled = []

    async def agent(row, client):
        try:
            with suppress(openai.RateLimitError):
                await endless(row, client)
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    monkeypatch.setattr(openai_agent, "SECONDS_TO_RETURN", 0.5)
    rollout, _ = run(agent, "1", max_model_calls=1)
    assert cancelled and rollout.stop_reason == StopReason.MAX_TURNS and rollout.reward == 0.0


def raises(row, client):
    client.chat.completions.create(model="policy", messages=[user("a")])
    raise KeyError("gone")


async def calls_nothing(row, client):
    return 1.0


async def returns_nan(row, client):
    await ask(client, [user("a")])
    return {"reward": float("nan")}


async def another_model(row, client):
    await client.chat.completions.create(model="gpt-5", messages=[user("a")])


@pytest.mark.parametrize("agent, message", [
    (raises, "raises raised KeyError: 'gone'"),
    (calls_nothing, "calls_nothing never got a completion"),
    (returns_nan, "expected a number"),
    (another_model, "another_model raised NotFoundError.*The model 'gpt-5' does not exist"),
])  # fmt: skip
def test_an_agents_failure_is_not_trained(agent, message):
    rollout, _ = run(agent, "1", fails=True)
    assert rollout.stop_reason == StopReason.AGENT_ERROR and rollout.failed and rollout.reward is None
    with pytest.raises(Exception, match=message):
        raise rollout.error


def test_what_is_no_agents_failure(monkeypatch):
    """A request with the key of a rollout that is over, and a fault of the endpoint."""

    async def agent(row, client):
        for key in (row["late"], "mine"):
            with pytest.raises(openai.AuthenticationError, match="The key is of no rollout that is running"):
                await ask(client.with_options(api_key=key), [user("b")])
        await ask(client, [user("a")])
        return {"reward": 1.0, "key": client.api_key}

    first, _ = run(agent, "1", row={"late": "none"})
    rollout, _ = run(agent, "1", row={"late": first.environment.result["key"]})
    assert rollout.reward == 1.0, rollout.error

    def broken(*args):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(AgentSession, "_answer", broken)
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        run(endless, "1")


BAD = [  # what would change the answer in silence, and one of each kind that any client may send
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "reads text only"),
    ({"model": "gpt-5"}, 404, "does not exist"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs: got"),
    ({"logprobs": True}, 400, "logprobs: not supported"),
]
HARMLESS = {
    "seed": 1, "logit_bias": {"5": 3}, "temperature": 0.1, "top_p": 0.5, "user": "me", "presence_penalty": 1.0,
    "response_format": {"type": "json_object"}, "parallel_tool_calls": False, "metadata": {"a": "b"}, "store": True,
    "tool_choice": "required", "reasoning_effort": "low",
    "tools": [{"type": "function", "function": {"name": "x", "parameters": None}}],
}  # fmt: skip


def test_bad_requests_get_the_apis_errors_and_harm_nothing():
    async def agent(row, client):
        for change, status, message in BAD:
            answer = await post(client, {"model": "policy", "messages": [user("a")], **change})
            error = answer.json()["error"]
            assert answer.status_code == status and message in error["message"], (change, answer.text)
            assert error["type"] == "invalid_request_error" and "param" in error and "code" in error
        async with httpx.AsyncClient(trust_env=False) as http:
            headers = {"Authorization": f"Bearer {client.api_key}"}
            with pytest.raises(openai.NotFoundError, match="Expected 'policy'"):
                await client.models.retrieve("gpt-5")
            lost = await http.post(f"{client.base_url}embeddings", json={}, headers=headers)
            assert lost.status_code == 404 and "not served" in lost.json()["error"]["message"]
            root = str(client.base_url).removesuffix("v1/")
            body, key = {"model": "policy", "messages": [user("a")]}, client.api_key
            by_path = await http.post(f"{root}{key}/v1/chat/completions", json=body)
            by_header = await http.post(f"{root}v1/chat/completions", json=body, headers={"X-Session-ID": key})
            assert by_path.status_code == by_header.status_code == 200
        harmless = await post(client, {"model": "policy", "messages": [user("a")], **HARMLESS})
        assert harmless.status_code == 200, harmless.text
        return 1.0

    rollout, llm = run(agent, "1", max_model_calls=99)
    assert rollout.reward == 1.0, rollout.error
    assert len(llm.asked) == 3 and all(params == {"temperature": 1.0, "stop": []} for params in llm.params)
    assert "is not served" in rollout.turns[-1].info["refused"]


def renamed(message):
    """The message and its results, as a program sends them that gives calls ids of its own."""
    message = {**message, "tool_calls": [{**call, "id": f"mine-{k}"} for k, call in enumerate(message["tool_calls"])]}
    return [message, *tool_message(message)]


# What the second request says, the first one's messages being [user("What?")], and whether it tells of the first turn.
TELLS = {
    "it goes on": (lambda said: [user("What?"), said, *tool_message(said)], True),
    "an edited system prompt": (lambda said: [system("10:31"), user("What?"), said, *tool_message(said)], True),
    "with ids of its own": (lambda said: [system("10:31"), user("What?"), *renamed(said)], True),
    "results behind an edited call": (
        lambda said: [system("10:31"), {**said, "content": "I add."}, *tool_message(said)], True
    ),
    "its text in a summary": (lambda said: [user("So far:  I add\nthem. Go on.")], True),
    "another text": (lambda said: [user("So far: I subtract them.")], False),
    "a part of a word": (lambda said: [user("I add them.x")], False),
    "the same question": (lambda said: [user("What?")], False),
    "its own text at the end": (lambda said: [system("10:31"), {**said, "content": ""}], False),
}  # fmt: skip


def system(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize("name", TELLS)
def test_a_turn_of_which_a_later_request_tells_is_observed(name):
    told, expected = TELLS[name]

    async def agent(row, client):
        said = await ask(client, [user("What?")], tools=[ADD])
        await ask(client, told({"content": None, **said}), tools=[ADD])

    rollout, _ = run(agent, f"I add them.\n{CALL}", "2")
    assert [turn.went_on for turn in rollout.turns] == [expected, False]
    assert [turn.has_observation for turn in rollout.turns] == [expected, False]
    told_results = name in ("it goes on", "an edited system prompt", "results behind an edited call")
    assert [len(turn.results) for turn in rollout.turns] == [told_results, 0]


@pytest.mark.parametrize("edits", [False, True])
def test_results_stand_in_the_order_of_the_calls(edits):
    """Whatever order a program sends them in. A call that it could not read stands behind those that it ran."""

    async def agent(row, client):
        said = await ask(client, [user("What?")], tools=[ADD])
        results = [{**each, "content": f"result {k}"} for k, each in enumerate(tool_message(said))]
        said = {**said, "content": "I add."} if edits else said
        await ask(client, [user("What?"), said, *reversed(results)], tools=[ADD])

    broken = CALL.replace("}}", "}")
    turn = run(agent, f"{broken}\n{CALL}\n{CALL}", "2")[0].turns[0]
    assert [result.text for result in turn.results] == ["result 0", "result 1"]
    assert [call.error is None for call in turn.calls] == [True, True, False]


def test_what_a_later_request_tells_of_a_turn():
    """Its calls ran: that the model has no turn left to read their results changes nothing of it. Text that stood in
    the question is not said by the turn."""

    async def agent(row, client):
        said = await ask(client, [user("a")], tools=[ADD])
        for messages in ([user("b")], [user("a"), said, *tool_message(said)]):
            with pytest.raises(openai.RateLimitError):
                await ask(client, messages, tools=[ADD])

    rollout, _ = run(agent, CALL, max_model_calls=1)
    assert [turn.went_on for turn in rollout.turns] == [True]

    async def agent(row, client):
        await ask(client, [user("Is it Paris?")])
        await ask(client, [user("Is it Paris? Think.")])
        await ask(client, [user("Judge: Lyon.")])

    rollout, _ = run(agent, "Paris", "Lyon", "yes")
    assert [turn.went_on for turn in rollout.turns] == [False, True, False]


def test_the_launcher_takes_a_pipe_of_any_number():
    """With many conversations there are more open files than `select.select` has numbers for."""
    allow_many_open_files()
    ours, other = os.pipe()
    high = fcntl.fcntl(ours, fcntl.F_DUPFD, 1500)
    command = [sys.executable, "-I", "-S", launcher.__file__, str(high), "sh", "-c", "exit 7"]
    assert subprocess.run(command, pass_fds=[high]).returncode == 7
    for each in (ours, other, high):
        os.close(each)


def test_a_reward_names_its_answer():
    """Also a sub-agent's whose sibling is still asking: the last answer may be either's."""

    async def agent(row, client):
        async def one(name):
            return await client.chat.completions.create(model="policy", messages=[user(name)])

        a, b, c = await asyncio.gather(*map(one, "abc"))
        with pytest.raises(ValueError, match="several answers were open at the same time"):
            client.reward(1.0)
        client.reward(0.25, a)
        client.reward(0.5, answer=b.id)
        client.reward(0.125, answer=c.model_dump())
        d = await respond(client, "d")
        client.reward(1.0)  # it was alone
        client.reward(2.0, answer=d)
        create = client.chat.completions.create
        chunks = [chunk async for chunk in await create(model="policy", messages=[user("e")], stream=True)]
        client.reward(3.0, chunks[0])
        many = await client.chat.completions.create(model="policy", messages=[user("f")], n=2)
        for wrong in ("chatcmpl-77", f"{a.id}:1", "mine", None, many):
            with pytest.raises(ValueError, match="client.reward: "):
                client.reward(1.0, wrong)
        client.reward(4.0, many, choice=1)

    rollout, _ = run(agent, *"1234567", seconds=0.05)
    rewards = {m["content"]: turn.reward for turn in rollout.turns for m in (
        turn.context.messages[-1:] if turn.context else rollout.prompt_messages[-1:])}  # fmt: skip
    assert rewards == {"a": 0.25, "b": 0.5, "c": 0.125, "d": 3.0, "e": 3.0, "f": 4.0}
    assert [turn.reward for turn in rollout.turns][-2:] == [None, 4.0]

    async def agent(row, client):
        await ask(client, [user("a")])
        running = asyncio.ensure_future(ask(client, [user("side")]))
        while llm.began < 2:
            await asyncio.sleep(0.01)
        client.reward(0.5)  # the only one that was received, and it was alone
        said = await client.chat.completions.create(model="policy", messages=[user("b")])
        with pytest.raises(ValueError, match="several answers were open"):
            client.reward(0.25)
        client.reward(0.25, said)
        await running

    llm = scripted("1", "2", "3", seconds=0.1)
    rollout, _ = run(agent, llm=llm)
    assert [turn.reward for turn in rollout.turns] == [0.5, None, 0.25]


def test_which_turn_a_reward_is_of():
    """A judge that is the same policy, frozen, is asked in between: its turn is not the one that is meant."""

    async def agent(row, client):
        said = await ask(client, [user("a")])
        judge = await client.chat.completions.create(model="policy-frozen", messages=[user(f"Judge {said}.")])
        client.reward(float(judge.choices[0].message.content))
        with pytest.raises(ValueError, match="no trained answer"):
            client.reward(1.0, judge)
        messages = [user(f"Judge {said}."), {"role": "assistant", "content": "0.75"}, user("Sure?")]
        with pytest.raises(openai.BadRequestError, match="continues no trained turn"):
            await ask(client, messages, extra_headers={"X-Turn-Reward": "1"})

    rollout, _ = run(agent, "1", "0.75")
    assert [turn.reward for turn in rollout.turns] == [0.75, None]

    async def agent(row, client):
        first = await ask(client, [user("a")])
        side = await client.chat.completions.create(model="policy", messages=[user("side")])
        client.reward(0.125)  # of the last one, the side's
        # Of the one that this request continues, and of another one by its id.
        await ask(client, [user("a"), first, user("b")], extra_headers={"X-Turn-Reward": "-0.5"})
        await ask(client, [user("c")], extra_headers={"X-Turn-Reward": "2", "X-Turn-Answer": side.id})
        for more in ({"X-Turn-Reward": "much"}, {"X-Turn-Reward": "1", "X-Turn-Answer": "chatcmpl-9"}):
            with pytest.raises(openai.BadRequestError):
                await ask(client, [user("c")], extra_headers=more)
        with pytest.raises(ValueError, match="expected a finite number"):
            client.reward("much")

    rollout, _ = run(agent, "1", "2", "3", "4")
    assert [turn.reward for turn in rollout.turns] == [-0.5, 2.125, None, None]


COMMAND = """
import json, sys
from openai import OpenAI
row = json.loads(sys.stdin.read())
print("some words")
client = OpenAI()
said = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["question"]}])
if row["do"] == "fail":
    sys.exit("it does not work")
print(json.dumps({"reward": 0.5, "said": said.choices[0].message.content}) if row["do"] == "return" else "no json")
"""


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "agent file.py"
    path.write_text(COMMAND)
    return f"{sys.executable} '{path}'"


@pytest.mark.contract("agent by command")
@pytest.mark.parametrize("do, message", [
    ("return", None), ("fail", "ended with code 1: it does not work"),
    ("print", "the last line of the command is 'no json'"),
])  # fmt: skip
def test_a_command(command, do, message):
    rollout, _ = run(command, "1", row={"do": do}, fails=message is not None)
    if message:
        assert rollout.stop_reason == StopReason.AGENT_ERROR and message in str(rollout.error)
        return
    assert rollout.reward == 0.5 and rollout.environment.result["said"] == "1", rollout.error
    assert rollout.stop_reason == StopReason.AGENT_DONE


async def edits(row, client):
    said = []
    while True:
        summary = "So far: " + " ".join(message["content"] for message in said)
        said += [await ask(client, [system(f"Turn {len(said)}."), user(summary)])]


@pytest.mark.parametrize("agent, room", [(endless, 60), (edits, 80)])
def test_a_context_that_the_policy_filled_is_no_failure_of_the_agent(agent, room):
    """Else a policy would learn to escape a loss by long answers: a rollout that is no agent's fault is trained."""
    rollout, _ = run(agent, "1 2 3", max_model_len=room, max_model_calls=99, max_completion_length=4000)
    assert rollout.stop_reason == StopReason.CONTEXT_LENGTH and rollout.error is None and rollout.reward == 0.0
    assert len(rollout.turns) > 1 and not rollout.failed and "context" in rollout.turns[-1].info["refused"]
    assert len(rollout.records) == (1 if agent is endless else len(rollout.turns))


def test_an_agent_that_fails_behind_a_full_context_that_it_got_over_has_failed():
    async def agent(row, client):
        said = await ask(client, [user("a")])
        with pytest.raises(openai.BadRequestError):
            await ask(client, [user("1 " * 2000), said])
        await ask(client, [user("b")])
        raise KeyError("gone")

    rollout, _ = run(agent, "1", fails=True)
    assert rollout.stop_reason == StopReason.AGENT_ERROR and "KeyError" in str(rollout.error)


@pytest.mark.parametrize("begin, reason, counts", [
    ("", StopReason.AGENT_ERROR, False), ("So far: It is 17. ", StopReason.CONTEXT_LENGTH, False),
    ("So far: It is 17. ", StopReason.CONTEXT_LENGTH, True),
], ids=["a text of its own", "what the policy said", "what it said, counted"])  # fmt: skip
def test_a_request_that_is_not_trained_fills_the_context_by_what_the_policy_said(begin, reason, counts):
    """A judge's or a title's own text is no end of the policy's conversation; a summary of its answers is."""
    text = begin + "1 " * 2000

    async def agent(row, client):
        await ask(client, [user("a")])
        body = {"model": "policy-frozen", "messages": [user(text)], "max_tokens": 9}
        if counts:
            headers = {"x-api-key": client.api_key}
            async with httpx.AsyncClient(trust_env=False) as http:
                said = await http.post(f"{client.base_url}messages/count_tokens", json=body, headers=headers)
            assert said.json()["input_tokens"] >= 1024
        else:
            with pytest.raises(openai.BadRequestError, match="fewer than the context"):
                await client.chat.completions.create(**body)
        raise KeyError("gone")

    rollout, _ = run(agent, "It is 17.", fails=True)
    assert rollout.stop_reason == reason and rollout.failed == (reason == StopReason.AGENT_ERROR), rollout.error


def test_a_reward_by_header_is_given_once():
    """A request that is too long is refused. Sent again and shorter it pays in its place; what is never mended has
    paid."""

    async def agent(row, client):
        body = {"model": "policy", "messages": [user("a")]}
        assert (await post(client, body, **{"X-Turn-Reward": "1"})).status_code == 400  # it goes on from no turn
        first = (await post(client, body)).json()["choices"][0]["message"]
        body["messages"] += [first, user("b")]
        for count in "012":
            headers = {"X-Turn-Reward": "0.5", "x-stainless-retry-count": count}
            assert (await post(client, body, **headers)).status_code == 200
        return numpy.float32(0.5)

    rollout, _ = run(agent, "1", "2")
    assert [turn.reward for turn in rollout.turns] == [0.5, None] and rollout.reward == 0.5

    def agent_that(mends):
        async def agent(row, client):
            body = {"model": "policy", "messages": [user("a")]}
            first = (await post(client, body)).json()["choices"][0]["message"]
            client.reward(0.125)  # another reward of this turn, which no header replaces
            for text, reward in [("1 " * 1100, "0.5"), ("2 " * 1100, "0.25"), *([("b", "0.75")] if mends else [])]:
                body["messages"] = [user("a"), first, user(text)]
                answer = await post(client, body, **{"X-Turn-Reward": reward})
                assert answer.status_code == (200 if text == "b" else 400)
            return 1.0

        return agent

    assert [turn.reward for turn in run(agent_that(True), "1", "2")[0].turns] == [0.875, None]
    assert [turn.reward for turn in run(agent_that(False), "1")[0].turns] == [0.375]

    async def agent(row, client):
        said = await ask(client, [user("a")])
        asked = {"model": "policy", "messages": [user("a"), said, user("b")]}
        asked["extra_headers"] = {"X-Turn-Reward": "0.5"}
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3, max_retries=0).chat.completions.create(**asked)
        await client.chat.completions.create(**asked)

    assert [turn.reward for turn in run(agent, "1", "2", seconds=1.0)[0].turns] == [0.5, None, None]


DAEMON = """
import os, sys, time
import openai

openai.OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
if os.fork() == 0:
    os.setsid()
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(600)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("0.5")
"""


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_daemon_that_holds_the_output_of_a_command_open_ends_with_it(tmp_path, monkeypatch, is_apart):
    """It has left the command's group and its session. The result is there, and is not waited for."""
    if not is_apart:
        monkeypatch.setattr(programs, "apart", lambda: ())
    (tmp_path / "agent.py").write_text(DAEMON)
    rollout, _ = run(f"{sys.executable} {tmp_path}/agent.py {tmp_path}/pid", "1", timeout=30.0)
    assert rollout.reward == 0.5, rollout.error
    assert all(ends(pid) for pid in running_in(tmp_path))


def running_in(folder):
    """The ids of processes whose command names a folder: what a command says of its own id is of its namespace."""
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if str(folder) in " ".join(each.info["cmdline"] or ())]


SPY = """
import glob, json, os, sys, time
import openai

openai.OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])

def meet(name):
    open(f"{sys.argv[1]}/{name}-{os.environ['OPENAI_API_KEY']}", "w").close()
    while len(glob.glob(f"{sys.argv[1]}/{name}-*")) < 2:
        time.sleep(0.01)

def read(path):
    try:
        with open(path, "rb") as file:
            return file.read().split(bytes(1))
    except OSError:
        return []

meet("here")
found = [each for path in glob.glob("/proc/[0-9]*/environ") for each in read(path)]
found = {each for each in found if each.startswith(b"OPENAI_API_KEY=mt-")}
meet("seen")
print(json.dumps({"reward": len(found)}))
"""


def test_commands_of_one_run_do_not_see_each_other(tmp_path):
    """A key is in an environment, where every client looks for it."""
    if not programs.apart():
        pytest.skip("this machine has no namespaces of processes")
    program = CommandAgent(f"{sys.executable} {tmp_path}/spy.py {tmp_path}")
    (tmp_path / "spy.py").write_text(SPY)
    cls = agent_conversation(mt.MultiTurnToolEnv, program, 60.0, 8)
    env = cls([], None, environment=agent_environment(program), tokenizer=TOKENIZER, tool_format="hermes")
    rollouts = env.generate([[]] * 2, scripted("1"), rows=[{}] * 2)["rollouts"]
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0], rollouts[0].error


STUBBORN = "trap '' TERM; echo $$ > {folder}/pid; while true; do sleep 0.1; done"


TRAINER = """
import asyncio, sys
from mt_grpo.integrations.agents import programs
from mt_grpo.integrations.agents.programs import CommandAgent

apart = programs.apart
programs.apart = lambda: {apart}
nowhere = type("Nowhere", (), {{"address": "http://127.0.0.1:1/v1", "key": "none"}})
asyncio.run(CommandAgent("bash {folder}/run.sh").run({{}}, nowhere, nowhere))
"""


@pytest.mark.parametrize("apart", ["()", "apart()"])
def test_a_command_ends_with_a_trainer_that_is_killed(tmp_path, apart):
    (tmp_path / "run.sh").write_text(STUBBORN.format(folder=tmp_path))
    code = TRAINER.format(folder=tmp_path, apart=apart)
    trainer = subprocess.Popen([warm_python.executable(), "-c", code], cwd=ROOT)
    try:
        for _ in range(600):
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
                break
            time.sleep(0.05)
        pids = [pid for pid in running_in(f"{tmp_path}/run.sh") if pid != trainer.pid]
        assert pids and all(map(alive, pids))
    finally:
        trainer.kill()
        trainer.wait()
    assert all(map(ends, pids))


def test_the_environment_of_a_command(monkeypatch):
    """It is no rank of a training run, and no key of the user's own reaches it, which it would send along."""
    of_users = ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "WORLD_SIZE")
    for name in (*of_users, "TORCHELASTIC_RUN_ID", "ANTHROPIC_MODEL"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("no_proxy", "example.org")
    asyncio.run(agent_server.AgentServer().start())  # clients that a function makes read it, too
    found = environment_of("http://127.0.0.1:1/v1", "key")
    assert {name for name in found if found[name] == "mine"} == {"ANTHROPIC_MODEL"}
    assert found["no_proxy"] == "127.0.0.1,example.org" and found["NO_PROXY"].startswith("127.0.0.1")
    assert (found["OPENAI_BASE_URL"], found["OPENAI_API_KEY"]) == ("http://127.0.0.1:1/v1", "key")
    assert (found["ANTHROPIC_BASE_URL"], found["ANTHROPIC_API_KEY"]) == ("http://127.0.0.1:1", "key")


def disturbed(message, rng):
    """A message as some program would send it again."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        pairs = list(arguments.items())
        rng.shuffle(pairs)
        call["function"]["arguments"] = json.dumps(dict(pairs), indent=rng.choice([None, 2]))
    if rng.random() < 0.5:
        message.pop("reasoning_content", None)
    if rng.random() < 0.3:
        message["content"] = f" {message.get('content') or ''}\n"
    return message


@pytest.mark.parametrize("seed", range(2))
def test_whatever_clients_do_records_are_what_was_read_and_sampled(seed):
    rng = random.Random(seed)

    async def chain(client, name, depth):
        messages = [user(name)]
        for k in range(depth):
            body = {"model": "policy", "messages": messages, "tools": [ADD]}
            if rng.random() < 0.2:  # a client that goes away, and asks again
                gone = asyncio.ensure_future(post(client, body))
                await asyncio.sleep(rng.random() * 0.02)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
            count = rng.choice(["0", "0", "1"])
            answers = await asyncio.gather(
                *(post(client, body, **{"x-stainless-retry-count": count}) for _ in range(rng.choice([1, 1, 2])))
            )
            said = answers[0].json()["choices"][0]["message"]
            renamed = f"id-{rng.random()}"
            said = disturbed(said, rng)
            for call in said.get("tool_calls", []):
                call["id"] = f"{renamed}-{call['id']}"
            results = tool_message(said, f"{k}") if "tool_calls" in said else [user(f"{name}{k}")]
            if rng.random() < 0.2:  # an edit of the history
                messages = [user(f"short {name}")]
            else:
                messages = [*messages, said, *results]

    async def agent(row, client):
        await asyncio.gather(*(chain(client, f"task {k}", 4) for k in range(3)))

    turns = [rng.choice([CALL, f"<think>Hm.</think>{CALL}\n{CALL}", "Words  here.", "<think>never closed"])
             for _ in range(60)]  # fmt: skip
    rollout, llm = run(agent, *turns, seconds=0.005, max_model_calls=60, max_completion_length=3000)
    assert len(rollout.turns) >= 8
    assert len(rollout.turns) == len(llm.asked)  # every sample is a turn
    trained = sum(sum(record.loss_mask) for record in rollout.records)
    lost = [turn for turn in rollout.turns if turn.info.get("received") is False]
    assert not any(turn.trained for turn in lost) and len(lost) < len(rollout.turns) / 2
    assert trained + sum(len(turn.token_ids) for turn in lost) == sum(len(sampled) for _, sampled in llm.asked)
