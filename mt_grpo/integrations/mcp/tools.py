"""The tools of MCP servers as tools of the trainer (`mcp_config_file`)."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import gather_all, run_on_thread, start_in_background
from mt_grpo.conversation.tools.running import ResultInParts
from mt_grpo.conversation.tools.signature import as_tool
from mt_grpo.integrations.mcp.servers import LOOP, McpServer, McpToolError, read_servers, servers_to_close


def load_mcp_tools(path: str) -> list[Callable]:
    """The tools of the servers of a JSON file, which all start at the same time. Raises `ValueError`.

    A server's entry may choose among its tools by a list `tools`. Servers end with the process.
    """
    key = "mcp_config_file"

    async def start(name: str, entry: dict[str, Any]) -> tuple[McpServer, list[Any]]:
        servers_to_close.append(server := McpServer(name, entry))
        try:
            tools = await server.tools()
        except Exception as error:
            await server.close()
            url = entry.get("url") or ""
            shown = re.sub("//[^/@]*@", "//", url.partition("?")[0])  # without secrets that ${NAME} has filled in
            why, hint = error_line(error), f"Is it running at {shown}?" if url else "See its output above."
            why = why.replace(url, shown) if url else why
            raise ValueError(f"{key}: the server {name!r} does not start ({why}). {hint}") from error
        names = [tool.name for tool in tools]
        if unknown := [each for each in entry.get("tools", []) if each not in names]:
            raise ValueError(f"{key}: the server {name!r} of {path!r} offers no tool {unknown[0]!r}, but {names}.")
        return server, [tool for tool in tools if tool.name in entry.get("tools", names)]

    starting = gather_all([start(name, entry) for name, entry in read_servers(path, key).items()])
    started = start_in_background(starting, LOOP).result()
    tools = [mcp_tool(server, tool) for server, offered in started for tool in offered]
    if not tools:
        raise ValueError(f"{key}: the servers of {path!r} offer no tools. Expected at least one.")
    return tools


def mcp_tool(server: McpServer, tool: Any) -> Callable:
    """One tool of a server, which checks its arguments itself. Raises `ValueError` for a schema of no function.

    Without any part, the text of a result is its structured content as JSON.
    """

    async def run(**arguments: Any) -> str | ResultInParts:
        result = await run_on_thread(server.call(tool.name, arguments), LOOP)
        texts = list(map(content_text, result.content))
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(texts)
        if result.is_error:
            raise McpToolError(text)
        parts = [part for each in result.content for part in (image_part(each) or content_text(each), "\n")][:-1]
        return ResultInParts(parts, text) if any(isinstance(part, dict) for part in parts) else text

    schema = {
        "name": tool.name,
        "description": tool.description or tool.title or f"{tool.name} of {server.name}.",
        "parameters": {"type": "object", "properties": {}, **tool.input_schema},
    }
    return as_tool(types.SimpleNamespace(name=tool.name, schema=schema, run=run))


def image_part(part: Any) -> dict[str, str] | None:
    """A part of a result that is an image, itself or as the blob of a resource, as a part of a message."""
    resource = getattr(part, "resource", None)
    is_blob = str(getattr(resource, "mime_type", None)).startswith("image/")
    data = part.data if part.type == "image" else getattr(resource, "blob", None) if is_blob else None
    return None if data is None else {"type": "image", "image": f"data:;base64,{data}"}


def content_text(part: Any) -> str:
    """The text of one part of a result; other parts are named."""
    text = part.text if part.type == "text" else getattr(getattr(part, "resource", None), "text", None)
    return f"[{part.type}: not shown]" if text is None else text
