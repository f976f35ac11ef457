"""The calculator as an MCP server, written with the official SDK. hf_recipes/tiny/mcp.yaml starts it over stdio.

python tools/mcp/calculator.py
"""

import sys
from pathlib import Path
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.agents.calculator import calculator as compute  # noqa: E402

server = MCPServer("calculator")
EXPRESSION = "Numbers combined with + - * / and parentheses, for example (48 + 24) * 2 / 3"


@server.tool(description="Compute the value of an arithmetic expression.")
def calculator(expression: Annotated[str, Field(description=EXPRESSION)]) -> str:
    """Compute an expression. The model reads the error of an invalid one."""
    try:
        return compute(expression)
    except (TypeError, ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ToolError(str(error)) from None


if __name__ == "__main__":
    server.run("stdio")
