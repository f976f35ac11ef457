"""The calculator's task as a tool for verl, with its names and import paths: calculator.yaml names the class.

`verl` is found here where verl is not installed.
"""

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from tools.agents.calculator import calculator


class CalculatorTool(BaseTool):
    """Computes, and remembers per conversation what came out last."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.last = {}

    async def create(self, instance_id=None, answer=None, **kwargs):
        """A conversation begins. The row's `create_kwargs` may have the right answer."""
        instance_id, response = await super().create(instance_id)
        self.last[instance_id] = {"answer": answer, "result": None}
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        """One call. What computes earns `config.reward`, as the turn's reward."""
        try:
            result = calculator(parameters["expression"])
        except (TypeError, ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
            return ToolResponse(text=f"Error: {error}"), 0.0, {"failed": 1}
        self.last[instance_id]["result"] = result
        return ToolResponse(text=result), self.config.get("reward", 0.0), {"failed": 0}

    async def calc_reward(self, instance_id, **kwargs):
        """The outcome reward: 0.5 where the last result is the answer that the row asks for."""
        state = self.last[instance_id]
        return 0.5 * (state["answer"] is not None and state["result"] == state["answer"])

    async def release(self, instance_id, **kwargs):
        """The conversation is over."""
        self.last.pop(instance_id, None)
