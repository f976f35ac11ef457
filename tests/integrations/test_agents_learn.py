"""The tiny model learns through programs that speak each API, and not where its rewards are shuffled."""

import json
from pathlib import Path
from statistics import mean

import pytest

import mt_grpo_trainer as mt

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "hf_recipes/tiny/agent.yaml"
STEPS = 25
# The openai package in its other ways, and the anthropic one; those that stand in tools/agents/ are files there.
VARIANTS = '''
"""Calculator agents with the openai package: without async, as streams, over /v1/responses; and with anthropic's."""

import json

import anthropic
import openai

from tools.calculator import calculator

SCHEMA = {
    "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"],
    "additionalProperties": False,
}
FUNCTION = {"name": "calculator", "description": "A calculator.", "parameters": SCHEMA, "strict": True}
CHAT, FLAT = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
SYSTEM = "Use the calculator. Answer with the number alone."


def result_of(name, arguments):
    try:
        return calculator(**json.loads(arguments)) if name == "calculator" else "Error: there is no such tool"
    except (TypeError, ValueError, ArithmeticError) as error:
        return f"Error: {error}"


def solve_sync(row, client):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    while True:
        message = client.chat.completions.create(model="policy", messages=messages, tools=[CHAT]).choices[0].message
        if not message.tool_calls:
            return float(message.content.strip() == row["answer"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            content = result_of(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def solve_stream(row, client):
    messages = [{"role": "user", "content": row["question"]}]
    while True:
        try:
            async with client.chat.completions.stream(model="policy", messages=messages, tools=[CHAT]) as events:
                async for _ in events:
                    pass
                message = (await events.get_final_completion()).choices[0].message
        except openai.LengthFinishReasonError:  # with a strict tool, where an answer was cut off
            return 0.0
        if not message.tool_calls:
            return float((message.content or "").strip() == row["answer"])
        calls = [{"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments":
                 c.function.arguments}} for c in message.tool_calls]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        for call in message.tool_calls:
            content = result_of(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def respond_sync(row, client):
    items, previous = row["question"], None
    while True:
        answer = client.responses.create(
            model="policy", input=items, instructions=SYSTEM, tools=[FLAT], previous_response_id=previous
        )
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return float(answer.output_text.strip() == row["answer"])
        previous = answer.id
        items = [{"type": "function_call_output", "call_id": call.call_id, "output":
                  result_of(call.name, call.arguments)} for call in calls]


async def respond_stream(row, client):
    items = [{"role": "user", "content": row["question"]}]
    while True:
        async with client.responses.stream(model="policy", input=items, instructions=SYSTEM, tools=[FLAT]) as events:
            async for _ in events:
                pass
            answer = await events.get_final_response()
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return float(answer.output_text.strip() == row["answer"])
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output":
                   result_of(call.name, call.arguments)} for call in calls]


async def converse(row, client, say):
    address, http = str(client.base_url).removesuffix("v1/"), anthropic.DefaultAsyncHttpxClient(trust_env=False)
    tool = {"name": "calculator", "description": "A calculator.", "input_schema": SCHEMA, "strict": True}
    async with anthropic.AsyncAnthropic(base_url=address, api_key=client.api_key, http_client=http) as claude:
        messages = [{"role": "user", "content": row["question"]}]
        while True:
            said = await say(
                claude, model="policy", max_tokens=200, system=SYSTEM, messages=messages, tools=[tool]
            )
            calls = [block for block in said.content if block.type == "tool_use"]
            if not calls:
                texts = [block.text for block in said.content if block.type == "text"]
                return float("".join(texts).strip() == row["answer"])
            results = [{"type": "tool_result", "tool_use_id": call.id,
                        "content": result_of(call.name, json.dumps(call.input))} for call in calls]
            messages += [said.to_param(), {"role": "user", "content": results}]


async def message(row, client):
    return await converse(row, client, lambda claude, **asked: claude.messages.create(**asked))


async def message_stream(row, client):
    async def say(claude, **asked):
        async with claude.messages.stream(**asked) as events:
            return await events.get_final_message()

    return await converse(row, client, say)
'''
SHUFFLED = """
import random

rng = random.Random(0)


def shuffled_reward(environments, **kwargs):
    \"\"\"The agents' rewards, each given to another rollout of the same prompt.\"\"\"
    rewards = [agent.result.get("reward") for agent in environments]
    for first in range(0, len(rewards), 8):
        group = rewards[first : first + 8]
        rng.shuffle(group)
        rewards[first : first + 8] = group
    return rewards


OUTCOME_REWARD_FUNCS = [shuffled_reward]
"""
AGENTS = {
    "openai": "tools/agents/calculator.py:solve",
    "openai, without async": "{variants}:solve_sync",
    "openai, streams": "{variants}:solve_stream",
    "openai, responses": "{variants}:respond_sync",
    "openai, responses as streams": "{variants}:respond_stream",
    "anthropic": "{variants}:message",
    "anthropic, streams": "{variants}:message_stream",
    "langgraph": "tools/agents/calculator_langgraph.py:solve",
    "openai-agents": "tools/agents/calculator_openai_agents.py:solve",
    "openai-agents, responses": "tools/agents/calculator_openai_agents.py:respond",
}


def exact_match(agent, folder, seed, shuffled=False):
    """The share of right answers, per step."""
    (folder / "variants.py").write_text(VARIANTS)
    (folder / "shuffled.py").write_text(SHUFFLED)
    control = ["--reward_fn", str(folder / "shuffled.py"), "--environment_reward_weight", "0"] if shuffled else []
    mt.main([
        "--config", RECIPE, "--agent", agent.format(variants=folder / "variants.py"), "--seed", str(seed),
        "--max_steps", str(STEPS), "--output_dir", str(folder / "out"), "--disable_tqdm", "true", *control,
    ])  # fmt: skip
    history = json.loads((folder / "out/trainer_state.json").read_text())["log_history"]
    steps = [row for row in history if "reward" in row]
    assert len(steps) == STEPS and all(row["stop/agent_error"] == row["stop/agent_timeout"] == 0.0 for row in steps)
    assert all(row["records/mean"] == 1.0 for row in steps)  # every history was repeated as it was sampled
    column = f"rewards/{agent.rpartition(':')[2]}/mean"
    return [row[column] for row in steps]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", AGENTS)
def test_the_model_learns_through(name, tmp_path, monkeypatch):
    """Over three seeds, against a control whose rewards are shuffled in each group."""
    monkeypatch.chdir(ROOT)
    gains = {False: [], True: []}
    for seed in (42, 43, 44):
        for shuffled in gains:
            folder = tmp_path / f"{seed}-{shuffled}"
            folder.mkdir()
            exact = exact_match(AGENTS[name], folder, seed, shuffled)
            gains[shuffled].append(mean(exact[-5:]) - mean(exact[:3]))
            print(f"{name}, seed {seed}, shuffled {shuffled}: {mean(exact[:3]):.2f} -> {mean(exact[-5:]):.2f}")
    assert mean(gains[False]) - mean(gains[True]) > 0.2, gains
