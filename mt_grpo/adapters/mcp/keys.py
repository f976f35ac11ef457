"""What a recipe says of MCP servers."""

from __future__ import annotations

from dataclasses import dataclass

from mt_grpo.base.fields import key


@dataclass
class McpKeys:
    """Servers of the Model Context Protocol, whose tools the model has beside others."""

    mcp_config_file: str | None = key(None, "JSON with mcpServers, whose tools the model has", path=True, opens=True)
    mcp_tools: list[str] | None = key(
        None, "Names of the servers' tools, or server:tool. None: all", needs="the key mcp_config_file"
    )
    mcp_start_timeout: float = key(
        60.0, "Seconds until an MCP server answers", within="(0, inf)", needs="the key mcp_config_file"
    )
    mcp_max_concurrent_calls: int = key(
        16, "Calls of one MCP server at the same time, per rank", within="[1, inf)", needs="the key mcp_config_file"
    )
