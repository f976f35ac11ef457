"""An agent for the calculator task with openai-agents: `agent: tools/agents/calculator_openai_agents.py:solve`.

`solve` uses /v1/chat/completions, and `respond` uses /v1/responses. Needs `pip install openai-agents`.
"""

from typing import Any

import agents
from calculator import calculator

agents.set_tracing_disabled(True)  # traces would be sent to OpenAI
CALCULATOR = agents.function_tool(calculator)  # the policy reads the text of its errors


async def run(row: dict[str, Any], model: Any) -> float:
    """Run the agent with a model. Returns 1 for the right answer, else 0."""
    agent = agents.Agent("solver", instructions="Use the calculator, then answer.", tools=[CALCULATOR], model=model)
    try:
        result = await agents.Runner.run(agent, row["question"], max_turns=20)
    except (agents.MaxTurnsExceeded, agents.ModelBehaviorError):  # the policy's mistakes, from which it should learn
        return 0.0
    return float(str(result.final_output).strip() == row["answer"])


async def solve(row: dict[str, Any], client: Any) -> float:
    """Solve a row over /v1/chat/completions."""
    return await run(row, agents.OpenAIChatCompletionsModel("policy", client))


async def respond(row: dict[str, Any], client: Any) -> float:
    """Solve a row over /v1/responses."""
    return await run(row, agents.OpenAIResponsesModel("policy", client))
