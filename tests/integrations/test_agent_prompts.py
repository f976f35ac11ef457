"""What the model reads of an agent's request is what vLLM's own endpoints would give it, id for id."""

import json

import httpx
import pytest
import test_agents
import test_anthropic
import test_responses
from test_agents import ADD, TOKENIZER, run, user
from test_anthropic import no_later_systems, qwen3
from test_responses import CALLED, FLAT
from vllm_prompts import VllmPrompts

import mt_grpo_trainer as mt
from mt_grpo.integrations.agents import messages as agent_messages
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


def test_a_result_has_the_name_of_a_call_whose_id_the_program_changed(monkeypatch):
    names, rendered = [], AgentPrompts.rendered

    def noted(self, before, messages):
        found = rendered(self, before, messages)
        names.extend(each["name"] for each in found if each["role"] == "tool")
        return found

    async def agent(row, client):
        start, tools = [user("Add.")], [ADD]
        for _ in range(2):
            answer = (await client.chat.completions.create(model="policy", messages=start, tools=tools)).choices[0]
            calls = [{**call.model_dump(), "id": "mine"} for call in answer.message.tool_calls or []]
            if calls:
                start += [said(answer.message.content, tool_calls=calls), {**RESULT, "tool_call_id": "mine"}]

    monkeypatch.setattr(AgentPrompts, "rendered", noted)
    rollout, _ = run(agent, test_agents.CALL, "2")
    assert names == ["add"] and len(rollout.records) == 1


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
        "a bill": {"messages": [{"role": "system", "content": f"{BILL}\nBe brief."}, user("a")]},
        "a bill in a part": {"messages": [{"role": "system", "content": parts(BILL, "Be brief.")}, user("a")]},
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
        "a bill": {"instructions": f"{BILL}\nBe brief.", "input": [user("a")]},
        "a bill alone": {"instructions": BILL, "input": [user("a")]},
        "a bill of the system": {"input": [{"role": "system", "content": f"{BILL}\nBe brief."}, user("a")]},
        "no calls": {"input": "a", "tools": [FLAT], "tool_choice": "none"},
    },
    "messages": {
        **{name: body for name, body in test_anthropic.CONVERSATIONS.items() if name != "tokens that end a message"},
        "a bill": {"system": f"{BILL}\nBe brief.", "messages": [user("a")]},
    },
}  # fmt: skip
TOKENIZERS = {"hermes": lambda: TOKENIZER, "qwen3": qwen3, "no later systems": no_later_systems}


def read(bodies, endpoint, tokenizer, **settings):
    """The ids that the model reads here, by the name of the request."""

    async def agent(row, client):
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as http:
            for name, body in bodies.items():
                asked = {"model": "policy", **({"max_tokens": 50} if endpoint == "messages" else {}), **body}
                answer = await http.post(f"{client.base_url}{endpoint}", json=asked)
                assert answer.status_code == 200, (name, answer.text)

    limits = {"max_model_calls": 99, "max_completion_length": 9999, "timeout": 60.0}
    rollout, llm = run(agent, "1", tokenizer=tokenizer, **limits, **settings)
    assert rollout.error is None and len(llm.asked) == len(bodies), rollout.error
    return {name: ids for name, (ids, _) in zip(bodies, llm.asked)}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("endpoint", REQUESTS)
def test_the_ids_are_those_of_vllm(endpoint, kind):
    tokenizer = TOKENIZERS[kind]()
    theirs = VllmPrompts(tokenizer.chat_template)
    for name, ids in read(REQUESTS[endpoint], endpoint, tokenizer).items():
        expected = theirs.ids(endpoint, REQUESTS[endpoint][name])
        assert tokenizer.decode(ids) == tokenizer.decode(expected), name
        assert ids == expected, name


# -- sets the reasoning effort, which the recipe says --

EFFORT = {
    "chat/completions": lambda effort: {"messages": [user("a")], "reasoning_effort": effort},
    "responses": lambda effort: {"input": "a", "reasoning": {"effort": effort}},
    "messages": lambda effort: {"messages": [user("a")], "output_config": {"effort": effort}},
}
DISABLED = {"messages": [user("a")], "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
SHOWN = (
    "{%- if enable_thinking is defined %}{{ '[thinks: ' ~ enable_thinking ~ ']' }}{%- endif %}"
    "{%- if reasoning_effort is defined %}{{ '[effort: ' ~ reasoning_effort ~ ']' }}{%- endif %}"
)  # of families that show an effort to the model


def shows_efforts():
    tokenizer = qwen3()
    tokenizer.chat_template = SHOWN + tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize("endpoint, body, told", [
    ("chat/completions", EFFORT["chat/completions"]("low"), {"reasoning_effort": "low", "enable_thinking": True}),
    ("chat/completions", EFFORT["chat/completions"]("none"), {"reasoning_effort": "none", "enable_thinking": False}),
    ("responses", EFFORT["responses"]("high"), {"reasoning_effort": "high", "enable_thinking": True}),
    ("responses", EFFORT["responses"]("none"), {"reasoning_effort": "none", "enable_thinking": False}),
    ("messages", EFFORT["messages"]("max"), {"reasoning_effort": "max", "enable_thinking": True}),
    ("messages", DISABLED, {"reasoning_effort": "none", "enable_thinking": False}),
])  # fmt: skip
def test_an_effort_is_the_recipes_and_what_it_says_then_is_what_vllm_shows(endpoint, body, told, caplog, monkeypatch):
    """A line of the run names the setting with which the ids are vLLM's."""
    monkeypatch.setattr("mt_grpo.base.errors._told", set())
    tokenizer, bodies = shows_efforts(), {"once": body, "again": body}
    expected = VllmPrompts(tokenizer.chat_template).ids(endpoint, body)
    assert read(bodies, endpoint, tokenizer)["once"] != expected
    (line,) = [each.message for each in caplog.records if "sets the reasoning effort" in each.message]
    assert f"set chat_template_kwargs: {json.dumps(told)}." in line
    caplog.clear()
    assert read(bodies, endpoint, tokenizer, chat_template_kwargs=told)["once"] == expected
    assert "sets the reasoning effort" not in caplog.text


@pytest.mark.parametrize("endpoint", EFFORT)
def test_nothing_is_told_of_an_effort_that_changes_no_prompt(endpoint, caplog, monkeypatch):
    monkeypatch.setattr("mt_grpo.base.errors._told", set())
    body = EFFORT[endpoint]("low")
    assert read({"a": body}, endpoint, TOKENIZER)["a"] == VllmPrompts().ids(endpoint, body)
    assert "sets the reasoning effort" not in caplog.text


def test_disabled_thinking_is_a_low_effort_where_the_template_knows_no_other():
    """As vLLM probes it. This one reads an effort that it does not know as the largest, as GLM's do."""
    tokenizer = qwen3()
    tokenizer.chat_template = (
        "{{ 'effort: ' ~ (reasoning_effort if reasoning_effort in ['low', 'medium', 'high'] else 'max') }}"
        "{%- for message in messages %}{{ message.content }}{%- endfor %}"
    )
    theirs = VllmPrompts(tokenizer.chat_template)
    expected = {"reasoning_effort": "low", "enable_thinking": True}
    assert "effort: low" in tokenizer.decode(theirs.ids("messages", DISABLED))

    class Format:
        chat_template_kwargs = {}

    prompts = AgentPrompts(Format(), tokenizer)
    assert prompts.arguments_of_effort(agent_messages.NO_THINKING) == expected
    assert prompts.arguments_of_effort("none", ("enable_thinking",)) == {}  # as without it: the largest
