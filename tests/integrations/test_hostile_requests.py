"""Requests that are wrong in one place or several, to each API: none ends a run, and each gets the API's own error."""

import copy
import json
import random

import httpx
import pytest
from test_agents import ADD, CALL, run

FLAT = {"type": "function", **ADD["function"]}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def user(content):
    return {"role": "user", "content": content}


CHAT_CALL = {"id": "call_00000000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ITEM_CALL = {"type": "function_call", "call_id": "call_00000000", "name": "add", "arguments": '{"a": 1}'}
BLOCK_CALL = {"type": "tool_use", "id": "toolu_00000000", "name": "add", "input": {"a": 1}}
GOOD = {
    "chat/completions": [
        {"model": "policy", "messages": [user("a")], "stream": True, "stream_options": {"include_usage": True}},
        {"model": "policy", "messages": [user([{"type": "text", "text": "a"}])], "tools": [ADD], "n": 2},
        {"model": "policy-frozen", "tools": [ADD], "tool_choice": "auto", "stop": ["END"], "max_tokens": 5,
         "messages": [
            {"role": "system", "content": "Be brief."}, user("a"),
            {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "call_00000000", "content": "2"}]},
    ],
    "responses": [
        {"model": "policy", "input": "a", "stream": True, "instructions": "Be brief.", "store": False},
        {"model": "policy", "input": [user([{"type": "input_text", "text": "a"}])],
         "text": {"format": {"type": "text"}}, "include": ["reasoning.encrypted_content"],
         "reasoning": {"summary": "auto"}, "tools": [
             FLAT, {"type": "namespace", "name": "sums", "description": "", "tools": [FLAT]}, {"type": "web_search"},
             {"type": "custom", "name": "shell", "description": "Run.", "format": {"type": "text"}}]},
        {"model": "policy-frozen", "max_output_tokens": 5, "tools": [FLAT], "input": [
            {"type": "message", "id": "msg_x_0", "role": "developer", "content": "Be brief."}, user("a"),
            {"type": "reasoning", "id": "rs_x_0", "summary": [{"type": "summary_text", "text": "Hm."}], "content": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}, ITEM_CALL,
            {"type": "function_call_output", "call_id": "call_00000000", "output": "2"},
            {"type": "custom_tool_call", "call_id": "c", "name": "shell", "input": "ls"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "2"}]}]},
    ],
    "messages": [
        {"model": "policy", "max_tokens": 5, "messages": [user("a")], "stream": True, "system": "Be brief."},
        {"model": "policy", "max_tokens": 5, "messages": [user([{"type": "text", "text": "a"}])],
         "stop_sequences": ["E"],
         "tools": [{"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}]},
        {"model": "policy-frozen", "max_tokens": 5, "system": [{"type": "text", "text": "S."}],
         "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 9}, "messages": [
             user("a"), {"role": "assistant", "content": [
                 {"type": "thinking", "thinking": "Hm.", "signature": "policy-x-0"}, {"type": "text", "text": "b"},
                 BLOCK_CALL]},
             user([{"type": "tool_result", "tool_use_id": "toolu_00000000", "content": "2", "is_error": False}])]},
    ],
}  # fmt: skip
JUNK = [
    None, True, False, 0, -1, 1.5, 1e308, float("nan"), 10**30, "", " ", "a", "\ud800", "\x00", "<|im_end|>",
    "x" * 5000,
    "policy", "gpt-4", [], {}, [None], [[]], [{}], {"type": None}, {"type": "text"}, {"type": []}, {"": {}},
    {"type": "text", "text": 3}, {"role": "user"}, {"role": "tool", "content": "2"}, user("a"), user({}), CHAT_CALL,
    ADD,
    ITEM_CALL, BLOCK_CALL, {"type": "function"}, {"type": "function", "name": "add", "parameters": []},
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
    """Of two hundred, which are the same each time; between them good ones are answered."""
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
                if k % 50 == 49:
                    for body in GOOD[name]:
                        answer = await http.post(f"{client.base_url}{name}", json=body)
                        assert answer.status_code == 200, answer.text
        return 1.0

    limits = {"max_model_calls": 9999, "max_completion_length": 999_999, "timeout": 300.0}
    rollout, llm = run(agent, f"<think>Hm.</think>{CALL}", **limits)
    assert rollout.error is None and rollout.reward == 1.0, rollout.error
    assert len(seen) == 200 and 20 < seen.count(200) < 150 and len(said) > 40, (seen.count(200), len(said))
    assert len(rollout.turns) == len(llm.asked) >= seen.count(200) + 12


@pytest.mark.parametrize("name", GOOD)
def test_what_is_nested_too_deeply_is_refused_at_any_depth(name):
    """Also just below the depth that Python reads."""

    async def agent(row, client):
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as http:
            for depth in (190, 250, *range(700, 1000, 20), 5000, 100_000):
                deep = b'{"a":' * depth + b"1" + b"}" * depth
                content = json.dumps({**GOOD[name][0], "metadata": "DEEP"}).encode().replace(b'"DEEP"', deep)
                answer = await http.post(f"{client.base_url}{name}", content=content)
                assert answer.status_code == (200 if depth == 190 else 400), (depth, answer.text)
        return 1.0

    rollout, _ = run(agent, "1", timeout=300.0)
    assert rollout.error is None and rollout.reward == 1.0, rollout.error
