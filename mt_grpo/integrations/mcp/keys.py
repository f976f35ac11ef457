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
    mcp_config_file: str | None = key(None, "JSON with mcpServers, whose tools the model has", path=True, opens=True)
    mcp_tools: list[str] | None = key(
        None, "Names of the servers' tools, or server:tool. None: all", needs="the key mcp_config_file"
    )


class McpIntegration(Integration):
    keys = McpKeys

    def check(self, script_args: Any, runner: Integration | None) -> None:
        if runner is not None and runner.line:
            refuse(script_args, McpKeys, OWN)

    def tools(self, script_args: Any) -> list[Callable]:
        if script_args.mcp_config_file is None:
            refuse(script_args, McpKeys)
            return []
        with needs_packages("mcp_config_file", extra="mcp"):
            from mt_grpo.integrations.mcp.tools import load_mcp_tools
        most, side = truncation(script_args)
        cut = functools.partial(cut_characters, most=most, side=side)
        return load_mcp_tools(script_args.mcp_config_file, script_args.mcp_tools, cut)
