"""Programs of other houses, unchanged, on a scripted policy: what they ask again must go on token for token."""

import pytest
from test_agents import CALL, run

from mt_grpo.rollout import StopReason

THINKS = "<think>I add.</think>"
pytestmark = pytest.mark.program


def add(a: float, b: str) -> str:
    """Add.

    Args:
        a: A number.
        b: A text.
    """
    return f"{a:g} and {b}"


def one_record(agent, *turns, num_turns):
    rollout, _ = run(agent, *turns, timeout=60.0, max_completion_length=2000, max_model_len=6000)
    assert rollout.stop_reason == StopReason.AGENT_DONE and len(rollout.turns) == num_turns
    assert [record.numbers for record in rollout.records] == [list(range(num_turns))]
    return rollout


@pytest.mark.parametrize("responses, streaming", [(False, True), (True, False)], ids=["chat", "responses"])
def test_langgraph(responses, streaming):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    async def agent(row, client):
        model = ChatOpenAI(
            model="policy", base_url=str(client.base_url), api_key=client.api_key, use_responses_api=responses,
            streaming=streaming,
        )  # fmt: skip
        graph = create_react_agent(model, [tool(add)], prompt="Be brief.")
        said = await graph.ainvoke({"messages": [("user", row["question"])]})
        text = said["messages"][-1].text
        return float((text if isinstance(text, str) else text()) == "3")

    rollout = one_record(agent, CALL, f"{THINKS}Again.\n{CALL}\n{CALL}", "3", num_turns=3)
    assert rollout.reward == 1.0
    assert [[result.text for result in turn.results] for turn in rollout.turns] == [
        ["1 and x y"], ["1 and x y", "1 and x y"], [],
    ]  # fmt: skip


@pytest.mark.parametrize("kind, streaming", [("chat", False), ("responses", True)])
def test_openai_agents(kind, streaming):
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)

    async def agent(row, client):
        model = (OpenAIChatCompletionsModel if kind == "chat" else OpenAIResponsesModel)("policy", client)
        helper = Agent(name="helper", instructions="Be brief.", tools=[function_tool(add)], model=model)
        if not streaming:
            return float((await Runner.run(helper, row["question"])).final_output == "3")
        result = Runner.run_streamed(helper, row["question"])
        async for _ in result.stream_events():
            pass
        return float(result.final_output == "3")

    rollout = one_record(agent, CALL, f"{THINKS}Again.\n{CALL}\n{CALL}", "3", num_turns=3)
    assert rollout.reward == 1.0


CODE = "Thought: I add.\n<code>\nresult = add(1, 'x')\nprint(result)\n</code>"
FINAL = "Thought: Done.\n<code>\nfinal_answer('3')\n</code>"


@pytest.mark.slow
def test_smolagents_tells_its_code_again_as_a_call_and_begins_records():
    from smolagents import CodeAgent, OpenAIServerModel, tool

    def agent(row, client):
        model = OpenAIServerModel("policy", api_base=str(client.base_url), api_key=client.api_key)
        helper = CodeAgent([tool(add)], model, max_steps=4, verbosity_level=0)
        return float(helper.run(row["question"]) == "3")

    rollout, _ = run(agent, CODE, FINAL, timeout=60.0, max_completion_length=8000, max_model_len=60000)
    assert rollout.reward == 1.0
    assert [record.numbers for record in rollout.records] == [[0], [1]]  # one per turn
    assert all(turn.text.endswith("</code>") for turn in rollout.turns)  # its stop text, which was sampled
    assert "Calling tools:" in rollout.turns[1].context.messages[-2]["content"]  # which the policy never wrote
