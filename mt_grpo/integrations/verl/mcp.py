"""verl's tools behind MCP servers: entries of `type: mcp` in its YAML. An entry makes a tool of each that there is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mt_grpo.base.event_loop import run_on_thread
from mt_grpo.integrations.verl.base import BaseTool
from mt_grpo.integrations.verl.schemas import OpenAIFunctionToolSchema, ToolResponse


class MCPBaseTool(BaseTool):
    """A tool that a server runs. A subclass overrides `_parse_tool_result`."""

    server: Any = None  # set by `load_mcp_entry`

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        """Ask the server. Raises what it says of a call that failed, which the model reads."""
        text, metrics = await ask_server(self, instance_id, parameters)
        return ToolResponse(text=text), 0.0, metrics

    def _parse_tool_result(self, content: list) -> tuple[str, dict[str, Any]]:
        """(what the model reads, metrics) of a result's parts: their texts, and names of what is no text."""
        from mt_grpo.integrations.mcp.tools import content_text

        return " ".join(content_text(part) for part in content), {}


class MCPSearchTool(MCPBaseTool):
    """A search, whose answer is JSON with `query` and `results`: the model reads the results."""

    def _parse_tool_result(self, content: list) -> tuple[str, dict[str, Any]]:
        """An answer of another form is read as it is."""
        texts, queries, total = [], [], 0
        for part in content:
            try:
                answer = json.loads(part.text) if part.type == "text" else None
                results = answer["results"]
                queries.append(answer.get("query", ""))
            except (ValueError, TypeError, KeyError):
                texts += [part.text] if part.type == "text" else []
                continue
            texts.append(json.dumps(results, ensure_ascii=False))
            total += len(results)
        metrics = {"status": "success", "queries": queries, "query_count": len(queries), "total_results": total}
        return "".join(texts), metrics


async def ask_server(tool: Any, instance_id: str, parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(what the model reads, metrics) of a call. It stands for `_call_tool` of verl's own class."""
    from mt_grpo.integrations.mcp.servers import LOOP, McpToolError
    from mt_grpo.integrations.mcp.tools import result_text

    result = await run_on_thread(tool.server.call(tool.name, parameters), LOOP)
    if result.is_error:
        raise McpToolError(result_text(result))  # as it is: a class may read nothing but answers
    if not result.content and result.structured_content is not None:  # verl's classes see no more than the parts
        return result_text(result), {}
    return tool._parse_tool_result(result.content)


def load_mcp_entry(entry: dict[str, Any], cls: type, path: str, key: str) -> list[BaseTool]:
    """The tools of an entry. Raises `ValueError`.

    Args:
        entry: With `config` (`timeout` in seconds, `rate_limit` in calls per second) and `mcp`
            (`mcp_servers_config_path`, `tool_selected_list`).
        cls: Its class.
        path: The YAML's. Servers are looked for from the working directory, and then beside it.
        key: The recipe's.
    """
    where, config, mcp = f"{key}: {entry['class_name']!r} of {path!r}", entry.get("config") or {}, entry.get("mcp")
    if not isinstance(mcp, dict) or not isinstance(mcp.get("mcp_servers_config_path"), str):
        raise ValueError(f"{where} is of type mcp. Expected `mcp: {{mcp_servers_config_path: servers.json}}`.")
    try:
        from mt_grpo.integrations.mcp.tools import schema_of, start_servers
    except ImportError as error:
        raise ValueError(f"{where} needs a package ({error}). Run `pip install -e '.[mcp]'` in the clone.") from None
    servers = mcp["mcp_servers_config_path"]
    if not os.path.exists(servers):
        servers = str(Path(path).parent / servers)
    selection, found = mcp.get("tool_selected_list"), []
    owner = next((each for each in reversed(cls.__mro__) if "_call_tool" in vars(each)), MCPBaseTool)
    if not issubclass(owner, MCPBaseTool):  # verl's own class, which would ask its `ClientManager`
        owner._call_tool = ask_server
    timeout, rate = config.get("timeout", 30), config.get("rate_limit")
    for server, tools in start_servers(servers, key, timeout, 64, rate):
        for tool in tools:
            if selection is not None and tool.name not in selection:
                continue
            schema = {"type": "function", "function": schema_of(server, tool)}
            made = cls(config=config, tool_schema=OpenAIFunctionToolSchema(**schema))
            made.server, made.json_schema = server, schema
            found.append(made)
    if missing := set(selection or []) - {tool.name for tool in found}:
        raise ValueError(f"{where}: tool_selected_list has {sorted(missing)}, which no server of {servers!r} offers.")
    return found
