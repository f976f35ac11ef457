"""An agent for the calculator task, written with LangGraph: `agent: tools/agents/calculator_langgraph.py:solve`.

Needs `pip install langgraph langchain-openai`.
"""

from typing import Any

from calculator import calculator
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import ToolNode, create_react_agent


async def solve(row: dict[str, Any], client: Any) -> float:
    """Run a graph that calls the policy and the calculator. Returns 1 for the right answer, else 0."""
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key)
    tools = ToolNode([calculator], handle_tool_errors=True)  # the policy reads the errors
    graph = create_react_agent(model, tools, prompt="Use the calculator, then answer.")
    said = await graph.ainvoke({"messages": [("user", row["question"])]}, {"recursion_limit": 20})
    return float(said["messages"][-1].content.strip() == row["answer"])
