"""Requests that are wrong in one place or several, to each API: none ends a run, and each gets the API's own error."""

import copy
import json
import random

import httpx
import pytest
from test_agent_prompts import CALL as CHAT_CALL, REQUESTS
from test_agents import ADD, CALL, run, user
from test_anthropic import call
from test_responses import CALLED

IMAGE = "data:image/png;base64,iVBORw0KGgo="


GOOD = {
    name: [{"model": "policy", "max_tokens": 5, **body} for body in bodies.values()]
    for name, bodies in REQUESTS.items()
}
JUNK = [
    None, True, False, 0, -1, 1.5, 1e308, float("nan"), 10**30, "", " ", "a", "\ud800", "\x00", "<|im_end|>", "x" * 99,
    "policy", "gpt-4", [], {}, [None], [[]], [{}], {"type": None}, {"type": "text"}, {"type": []}, {"": {}},
    {"type": "text", "text": 3}, {"role": "user"}, {"role": "tool", "content": "2"}, user("a"), user({}), CHAT_CALL,
    ADD, CALLED, call(a=1), {"type": "function"}, {"type": "function", "name": "add", "parameters": []},
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
    rollout, llm = run(agent, f"<think>Hm.</think>{CALL}", **limits)
    assert rollout.error is None and rollout.reward == 1.0, rollout.error
    assert len(seen) == 200 and 20 < seen.count(200) < 150 and len(said) > 40, (seen.count(200), len(said))
    assert len(rollout.turns) == len(llm.asked) >= seen.count(200) + 10
