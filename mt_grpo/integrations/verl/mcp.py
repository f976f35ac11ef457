"""verl's tools on MCP servers: an entry of `type: mcp` in its YAML makes a tool of each tool of its servers."""

from __future__ import annotations

import json
import os
from typing import Any

from mt_grpo.base.event_loop import run_on_thread
from mt_grpo.integrations.verl.base import BaseTool
from mt_grpo.integrations.verl.schemas import OpenAIFunctionToolSchema, ToolResponse


class MCPBaseTool(BaseTool):
    """A tool that a server runs. A subclass may override `_parse_tool_result`."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        """Ask the server. Raises what it says of a call that failed."""
        text, metrics = await ask_server(self, instance_id, parameters)
        return ToolResponse(text=text), 0.0, metrics

    def _parse_tool_result(self, content: list) -> tuple[str, dict[str, Any]]:
        from mt_grpo.integrations.mcp.tools import content_text

        return " ".join(map(content_text, content)), {}


class MCPSearchTool(MCPBaseTool):
    """A search whose answers are JSON with `query` and `results`. The model reads the results."""

    def _parse_tool_result(self, content: list) -> tuple[str, dict[str, Any]]:
        texts, queries, total = [], [], 0
        for part in filter(lambda part: part.type == "text", content):
            try:
                answer = json.loads(part.text)
                texts.append(json.dumps(answer["results"], ensure_ascii=False))
                queries, total = [*queries, answer.get("query", "")], total + len(answer["results"])
            except (ValueError, TypeError, LookupError):  # an answer in another form is read unchanged
                texts.append(part.text)
        metrics = {"status": "success", "queries": queries, "query_count": len(queries), "total_results": total}
        return "".join(texts), metrics


async def ask_server(tool: Any, instance_id: str, parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(text for the model, metrics) of a call. It also replaces `_call_tool` of verl's own class."""
    from mt_grpo.integrations.mcp.tools import LOOP, McpToolError, result_text

    result = await run_on_thread(tool.server.call(tool.name, parameters), LOOP)
    if result.is_error:
        raise McpToolError(result_text(result))
    return tool._parse_tool_result(result.content) if result.content else (result_text(result), {})


def load_mcp_entry(cls: type, config: dict, mcp: dict[str, Any], path: str, key: str) -> list[BaseTool]:
    """The tools of an entry with `mcp: {mcp_servers_config_path, tool_selected_list}`. Raises `ValueError`."""
    from mt_grpo.integrations.mcp.tools import schema_of, start_servers

    owner = next((each for each in reversed(cls.__mro__) if "_call_tool" in vars(each)), MCPBaseTool)
    if not issubclass(owner, MCPBaseTool):  # verl's own class, which would ask its `ClientManager`
        owner._call_tool = ask_server
    servers, selection, tools = mcp["mcp_servers_config_path"], mcp.get("tool_selected_list"), []
    servers = servers if os.path.exists(servers) else os.path.join(os.path.dirname(path), servers)
    for server, tool in [(server, tool) for server, tools_of in start_servers(servers, key) for tool in tools_of]:
        if selection is None or tool.name in selection:
            schema = {"type": "function", "function": schema_of(server, tool)}
            tools.append(cls(config, OpenAIFunctionToolSchema(**schema)))
            tools[-1].server, tools[-1].json_schema = server, schema
    if missing := set(selection or []) - {tool.name for tool in tools}:
        raise ValueError(f"{key}: no server of {servers!r} offers {sorted(missing)} of tool_selected_list.")
    return tools
