"""Requests of agents: what the model reads is what vLLM's own endpoints would give it, and wrong ones end no run."""

import copy
import itertools
import json
import random
from contextlib import nullcontext

import httpx
import pytest
import test_anthropic
import test_responses
from test_agents import ADD, CALL as WRITTEN, TOKENIZER, run, user
from test_anthropic import no_later_systems, with_template
from test_responses import CALLED, FLAT
from vllm_prompts import VllmPrompts

import mt_grpo_trainer as mt
from mt_grpo.integrations.agents.prompts import AgentPrompts

CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1.0, "b": "\\u00e9"}'}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "2"}
BILL = "x-anthropic-billing-header: cch=1f"


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def called(arguments):
    return {**CALL, "function": {"name": "add", "arguments": arguments}}


def test_a_result_is_that_of_the_nearest_call_with_its_id():
    """A program may give each turn's call the same id, and a call another one than it was given."""
    env = mt.MultiTurnToolEnv([], None, tokenizer=TOKENIZER, tool_format="hermes")
    prompts = AgentPrompts(env.format_of(TOKENIZER), TOKENIZER)
    first, second = ({**CALL, "function": {"name": name, "arguments": "{}"}} for name in ("add", "sub"))
    messages = [user("?"), said("", tool_calls=[first]), RESULT, said("", tool_calls=[second]), RESULT]
    assert [each["name"] for each in prompts.rendered([], messages) if each["role"] == "tool"] == ["add", "sub"]
    assert prompts.rendered(messages[:2], messages[2:3])[0]["name"] == "add"
    assert prompts.rendered(messages[:2], messages[2:])[0]["name"] == "add"


def output(*texts):
    content = [{"type": "output_text", "text": text} for text in texts]
    return {"type": "message", "role": "assistant", "content": content}


def reasoned(text):
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


RETURNED = {"type": "function_call_output", "call_id": "a", "output": "2"}
REQUESTS = {
    "chat/completions": {
        "a text": {"messages": [user("a")]},
        "parts": {"messages": [{"role": "system", "content": parts("S", "T")}, user(parts("a", "b"))]},
        "parts of an answer": {"messages": [user("a"), said(parts("b", "c")), user("d")]},
        "parts of a result": {"tools": [ADD], "messages": [
            user("a"), said(None, tool_calls=[CALL]), {**RESULT, "content": parts("1", "2")}]},
        "reasoning": {"tools": [ADD], "messages": [
            user("a"), said("b", reasoning_content="Hm.", tool_calls=[CALL]), RESULT]},
        "reasoning of an earlier question": {"messages": [user("a"), said("b", reasoning="Hm."), user("c")]},
        "no reasoning": {"messages": [user("a"), said("b", reasoning_content="", tool_calls=[CALL]), RESULT]},
        "arguments that are no JSON": {"messages": [user("a"), said("b", tool_calls=[called("{broken")]), RESULT]},
        "no arguments": {"messages": [user("a"), said("b", tool_calls=[called("")]), RESULT]},
        "the name of a call": {"messages": [user("a"), said("", tool_calls=[CALL]), {**RESULT, "name": "add"}]},
        "a developer": {"messages": [{"role": "developer", "content": "D"}, user("a")]},
        "a later developer": {"messages": [
            {"role": "system", "content": "S"}, user("a"), {"role": "developer", "content": "D"}, user("b")]},
        "tools": {"messages": [user("a")], "tools": [ADD, {"type": "function", "function": {"name": "bare"}}]},
        "tools with other keys": {"messages": [user("a")], "tools": [
            {"type": "function", "function": {**ADD["function"], "strict": False, "returns": "text"}}]},
        "no calls": {"messages": [user("a")], "tools": [ADD], "tool_choice": "none"},
        "an answer at the end": {"messages": [user("a"), said("b")]},
        "an empty answer": {"messages": [user("a"), said(""), user("b")]},
        "a format": {"messages": [user("a")], "response_format": {"type": "json_object"}},
    },
    "responses": {
        **test_responses.CONVERSATIONS,
        "an empty text and another": {"input": [user("a"), output(""), output("b"), user("c")]},
        "a text behind a call": {"tools": [FLAT], "input": [user("a"), CALLED, output("b"), RETURNED]},
        "reasoning behind a text": {"tools": [FLAT], "input": [
            user("a"), output("b"), reasoned("c"), CALLED, RETURNED]},
        "no calls": {"input": "a", "tools": [FLAT], "tool_choice": "none"},
    },
    "messages": {
        **test_anthropic.CONVERSATIONS,
        "a bill": {"system": f"{BILL}\nBe brief.", "messages": [user("a")]},
    },
}  # fmt: skip
TOKENIZERS = {
    "hermes": lambda: TOKENIZER,
    "qwen3": lambda: with_template("qwen3"),
    "no later systems": no_later_systems,
}


def read(bodies, endpoint, tokenizer, **settings):
    """The ids that the model reads here, by the name of the request: None where its template refuses the request."""
    served = []

    async def agent(row, client):
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as http:
            for name, body in bodies.items():
                asked = {"model": "policy", **({"max_tokens": 50} if endpoint == "messages" else {}), **body}
                answer = await http.post(f"{client.base_url}{endpoint}", json=asked)
                served.extend([name] * (answer.status_code == 200))

    limits = {"max_model_calls": 99, "max_completion_length": 9999, "timeout": 60.0}
    rollout, llm = run(agent, "1", tokenizer=tokenizer, **limits, **settings)
    return dict.fromkeys(bodies) | {name: ids for name, (ids, _) in zip(served, llm.asked, strict=True)}


@pytest.mark.parametrize("endpoint, kind", [
    *itertools.product(REQUESTS, ("hermes", "qwen3")), ("chat/completions", "no later systems"),
    ("messages", "no later systems"),
])  # fmt: skip
def test_the_ids_are_those_of_vllm(endpoint, kind):
    tokenizer = TOKENIZERS[kind]()
    theirs = VllmPrompts(tokenizer.chat_template)
    for name, ids in read(REQUESTS[endpoint], endpoint, tokenizer).items():
        expected = theirs.ids(endpoint, REQUESTS[endpoint][name])
        assert tokenizer.decode(ids) == tokenizer.decode(expected), name
        assert ids == expected, name


@pytest.mark.parametrize(
    "template", "qwen2_5 qwen3_5_think qwen3_6 llama3_1 glm4moe gemma4_v5 nemotron_3_nano gptoss".split()
)
def test_the_ids_are_those_of_vllm_in_the_template_of_a_family(template):
    """With its own syntax of calls; what one refuses the other one refuses.

    Not compared: an empty answer and a system prompt of parts, which are other ids in some of these templates.
    """
    tokenizer, bodies = with_template(template), dict(REQUESTS["chat/completions"])
    del bodies["an empty answer"], bodies["parts"]
    theirs, found = (
        VllmPrompts(tokenizer.chat_template),
        read(bodies, "chat/completions", tokenizer, tool_format="native"),
    )
    for name, ids in found.items():
        with pytest.raises(Exception, match="") if ids is None else nullcontext():
            assert theirs.ids("chat/completions", bodies[name]) == ids, name
    assert list(found.values()).count(None) < 4


IMAGE = "data:image/png;base64,iVBORw0KGgo="
GOOD = {
    name: [{"model": "policy", "max_tokens": 5, **body} for body in bodies.values()]
    for name, bodies in REQUESTS.items()
}
JUNK = [
    None, True, False, 0, -1, 1.5, 1e308, float("nan"), 10**30, "", " ", "a", "\ud800", "\x00", "<|im_end|>", "x" * 99,
    "policy", "gpt-4", [], {}, [None], [[]], [{}], {"type": None}, {"type": "text"}, {"type": []}, {"": {}},
    {"type": "text", "text": 3}, {"role": "user"}, {"role": "tool", "content": "2"}, user("a"), user({}), CALL,
    ADD, CALLED, test_anthropic.call(a=1), {"type": "function"}, {"type": "function", "name": "add", "parameters": []},
    {"type": "function", "function": {"name": "add", "parameters": {"properties": []}}}, {"type": "namespace"},
    {"type": "item_reference", "id": "msg_0123abcd_0"}, {"type": "item_reference"}, {"id": "rs_0123abcd_0"},
    {"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "input_image", "image_url": IMAGE},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}},
    {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/x.png"}}, {"type": "input_audio"},
    {"type": "tool_result"}, {"type": "reasoning"}, {"type": "web_search_call", "id": "ws_1"}, {"type": "custom"},
    {"$ref": "#/a"}, {"type": "object", "properties": {"a": {"type": "no"}}}, {"properties": {"a": {"$ref": "#"}}},
]  # fmt: skip
FURTHER = [
    "logprobs", "previous_response_id", "conversation", "background", "n", "stop", "tool_choice", "system", "tools",
    "chat_template_kwargs", "response_format", "thinking", "mcp_servers", "text", "include", "metadata", "max_tokens",
    "stream",
]  # fmt: skip


def places(value, found=None):
    """(container, key) of everything in a JSON value."""
    found = [] if found is None else found
    for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        found.append((value, key))
        if isinstance(each, (dict, list)):
            places(each, found)
    return found


def broken(rng, name):
    """The bytes of a good request with a few faults."""
    body = copy.deepcopy(rng.choice(GOOD[name]))
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(body))
        kind = rng.choice(["replace", "replace", "replace", "remove", "twice", "wrap", "further"])
        if kind == "replace":
            container[key] = copy.deepcopy(rng.choice(JUNK))
        elif kind == "wrap":
            container[key] = rng.choice([[container[key]], {"a": container[key]}])
        elif kind == "further":
            body[rng.choice(FURTHER)] = copy.deepcopy(rng.choice(JUNK))
        elif kind == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        if not body:
            break
    content = json.dumps(body).encode()
    kind = rng.random()
    if kind < 0.05:
        return content[: rng.randrange(len(content))]
    if kind < 0.08:
        return content.replace(b'"', b'"\xff', 1)
    return b'{"a":' * 4000 + content if kind < 0.1 else content


def error_of(answer, name):
    """The message of an error in the form of the API."""
    value = answer.json()
    if name == "messages":
        assert set(value) == {"type", "error"} and value["type"] == "error", value
        assert set(value["error"]) == {"type", "message"}, value
    else:
        assert set(value) == {"error"} and set(value["error"]) == {"message", "type", "param", "code"}, value
    return value["error"]["message"]


@pytest.mark.parametrize("name", GOOD)
def test_no_request_ends_a_run(name):
    """Of two hundred, which are the same each time; between them a good one is answered."""
    rng, seen, said = random.Random(name), [], set()

    async def agent(row, client):
        headers = {"Authorization": f"Bearer {client.api_key}", "anthropic-version": "2023-06-01"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as http:
            for k in range(200):
                content = broken(rng, name)
                answer = await http.post(f"{client.base_url}{name}", content=content)
                seen.append(answer.status_code)
                assert answer.status_code == 200 or 400 <= answer.status_code < 500, (answer.text, content[:2000])
                if answer.status_code != 200:
                    said.add(error_of(answer, name))
                if k % 20 == 19:
                    answer = await http.post(f"{client.base_url}{name}", json=rng.choice(GOOD[name]))
                    assert answer.status_code == 200, answer.text
        return 1.0

    limits = {"max_model_calls": 9999, "max_completion_length": 999_999, "timeout": 300.0}
    rollout, llm = run(agent, f"<think>Hm.</think>{WRITTEN}", **limits)
    assert rollout.error is None and rollout.reward == 1.0, rollout.error
    assert len(seen) == 200 and 20 < seen.count(200) < 150 and len(said) > 40, (seen.count(200), len(said))
    assert len(rollout.turns) == len(llm.asked) >= seen.count(200) + 10
