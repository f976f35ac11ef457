"""The calculator as a tool for verl, with verl's names and import paths. calculator.yaml lists the class.

The imports of `verl` also work if verl is not installed.
"""

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from tools.agents.calculator import calculator


class CalculatorTool(BaseTool):
    """Computes expressions, and remembers the last result of each conversation."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.last = {}

    async def create(self, instance_id=None, answer=None, **kwargs):
        """Begin a conversation. The row's `create_kwargs` may have the right answer."""
        instance_id, response = await super().create(instance_id)
        self.last[instance_id] = {"answer": answer, "result": None}
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        """Run one call. A successful call earns `config.reward` as turn reward."""
        try:
            result = calculator(parameters["expression"])
        except (TypeError, ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
            return ToolResponse(text=f"Error: {error}"), 0.0, {"failed": 1}
        self.last[instance_id]["result"] = result
        return ToolResponse(text=result), self.config.get("reward", 0.0), {"failed": 0}

    async def calc_reward(self, instance_id, **kwargs):
        """Return the outcome reward: 0.5 if the last result is the row's answer."""
        state = self.last[instance_id]
        return 0.5 * (state["answer"] is not None and state["result"] == state["answer"])

    async def release(self, instance_id, **kwargs):
        """End a conversation."""
        self.last.pop(instance_id, None)
