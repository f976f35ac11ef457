"""Recipe keys of MCP servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key
from mt_grpo.integrations.checks import OWN, cut_characters, truncation
from mt_grpo.recipe.integrations import Integration, needs_packages, refuse


@dataclass
class McpKeys:
    """Servers of the Model Context Protocol, whose tools the model has in addition to others."""

    mcp_config_file: str | None = key(None, "JSON with mcpServers, whose tools the model has", path=True, opens=True)
    mcp_tools: list[str] | None = key(
        None, "Names of the servers' tools, or server:tool. None: all", needs="the key mcp_config_file"
    )


class McpIntegration(Integration):
    """Adds the tools of servers to conversations of the trainer's own."""

    keys = McpKeys

    def check(self, script_args: Any, runner: Integration | None) -> None:
        """Raise `ValueError` if a program runs the conversation."""
        if runner is not None and runner.line:
            refuse(script_args, McpKeys, OWN)

    def tools(self, script_args: Any) -> list[Callable]:
        """The tools of `mcp_config_file`, whose results are truncated to `max_tool_response_length`."""
        if script_args.mcp_config_file is None:
            refuse(script_args, McpKeys)
            return []
        with needs_packages("mcp_config_file", extra="mcp"):
            from mt_grpo.integrations.mcp.tools import load_mcp_tools
        most, side = truncation(script_args)
        cut = functools.partial(cut_characters, most=most, side=side)
        return load_mcp_tools(script_args.mcp_config_file, script_args.mcp_tools, cut)
