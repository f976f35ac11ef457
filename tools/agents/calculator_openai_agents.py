"""The calculator's task by openai-agents: `agent: tools/agents/calculator_openai_agents.py:solve`, or `:respond`.

`solve` uses /v1/chat/completions, `respond` /v1/responses. Needs `pip install openai-agents`.
"""

from typing import Any

from agents import (
    Agent,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from calculator import calculator

set_tracing_disabled(True)  # it would be sent to OpenAI
CALCULATOR = function_tool(calculator)  # what it raises is text for the policy


async def run(row: dict[str, Any], model: Any) -> float:
    """1 for the right answer."""
    agent = Agent("solver", instructions="Use the calculator, then answer.", tools=[CALCULATOR], model=model)
    try:
        result = await Runner.run(agent, row["question"], max_turns=20)
    except ModelBehaviorError:  # such as a tool that is none: the policy's mistake, which it is to learn from
        return 0.0
    return float(str(result.final_output).strip() == row["answer"])


async def solve(row: dict[str, Any], client: Any) -> float:
    """Over /v1/chat/completions."""
    return await run(row, OpenAIChatCompletionsModel("policy", client))


async def respond(row: dict[str, Any], client: Any) -> float:
    """Over /v1/responses."""
    return await run(row, OpenAIResponsesModel("policy", client))
