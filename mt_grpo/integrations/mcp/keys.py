"""Recipe keys of MCP servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key
from mt_grpo.recipe.plugins import OWN, Integration


@dataclass
class McpKeys:
    """Servers of the Model Context Protocol, whose tools the model has in addition to others."""

    mcp_config_file: str | None = key(
        None, "JSON with mcpServers, whose tools the model has", path=True, opens=True, needs=OWN
    )


class McpIntegration(Integration):
    """Adds the tools of servers to conversations of the trainer's own."""

    keys = McpKeys

    def tools(self, script_args: Any) -> list[Callable]:
        """The tools of `mcp_config_file`."""
        if script_args.mcp_config_file is None:
            return []
        from mt_grpo.integrations.mcp.tools import load_mcp_tools

        return load_mcp_tools(script_args.mcp_config_file)
