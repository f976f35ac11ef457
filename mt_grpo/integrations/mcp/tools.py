"""The tools of MCP servers as tools of the trainer: `mcp_config_file`, and verl's entries of `type: mcp`."""

from __future__ import annotations

import asyncio
import json
import shlex
import types
from collections.abc import Callable
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import background_loop, gather_all, run_on_thread
from mt_grpo.conversation.tools.results import ResultInParts
from mt_grpo.conversation.tools.signature import as_tool
from mt_grpo.integrations.mcp.files import read_servers, without_filled
from mt_grpo.integrations.mcp.servers import LOOP, McpServer, McpToolError, ServerEnded, servers_to_close


def offered(name: str, entry: dict[str, Any], tools: list[Any], where: str) -> list[Any]:
    """The tools of a server after its filters (`only`, `without`). Raises `ValueError` for two of the same name."""
    names = [tool.name for tool in tools]
    if repeated := [each for each in names if names.count(each) > 1]:
        raise ValueError(f"{where} offers two tools called {repeated[0]!r}. The model could not tell them apart.")
    listed = [*(entry["only"] or []), *entry["without"]]
    if unknown := [each for each in listed if each not in names]:
        raise ValueError(f"{where} has no tool {unknown[0]!r}, which the file lists. It has: {', '.join(names)}.")
    only = names if entry["only"] is None else entry["only"]
    return [tool for tool in tools if tool.name not in entry["without"] and tool.name in only]


def why_not(error: Exception, entry: dict[str, Any], seconds: str) -> str:
    """Why a server does not start, and what to do.

    Args:
        error: The error that was raised.
        entry: The server's entry in the configuration.
        seconds: The name of the key that limits the time of the start.
    """
    if isinstance(error, TimeoutError):
        return f"{str(error) or 'no answer to its list of tools'}. Raise {seconds} if it needs longer."
    if "command" not in entry:
        return f"{error_line(error)}. Is it running at {entry['url']}?"
    command = shlex.join([entry["command"], *entry["args"]])
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return f"{error_line(error)}. Install it, or write its full path."
    said = str(error) if isinstance(error, ServerEnded) else error_line(error)
    return f"{said}. See its output above. To start it yourself, run `{command}`."


def start_servers(
    path: str, key: str, start_timeout: float, concurrency: int, rate_limit: float | None = None
) -> list[tuple[McpServer, list[Any]]]:
    """Start the servers of a JSON file, all at the same time: each with its tools. Raises `ValueError`."""
    entries = read_servers(path, key)

    async def start(name: str) -> tuple[McpServer, list[Any]]:
        server = McpServer(name, entries[name], start_timeout, concurrency, rate_limit)
        servers_to_close.append(server)
        try:
            tools = await server.tools()
        except Exception as error:
            await server.close()
            where = f"{key}: the server {name!r} of {path!r}"
            seconds = "mcp_start_timeout" if key == "mcp_config_file" else "timeout of the entry's config"
            said = why_not(error, entries[name], seconds)
            why = without_filled(said, entries[name])
            raise ValueError(f"{where} does not start: {why}") from (error if why == said else None)
        return server, offered(name, entries[name], tools, f"{key}: the server {name!r} of {path!r}")

    async def start_all() -> list[tuple[McpServer, list[Any]]]:
        return await gather_all([start(name) for name in entries])

    return asyncio.run_coroutine_threadsafe(start_all(), background_loop(LOOP)).result()


def load_mcp_tools(
    path: str, selection: list[str] | None, start_timeout: float, concurrency: int, finish: Callable[[str], str]
) -> list[Callable]:
    """The tools of the servers of a JSON file.

    Args:
        path: The file.
        selection: Names of tools, or `server:tool`. None: all.
        start_timeout: Seconds until a server answers.
        concurrency: Calls of a server at the same time.
        finish: Makes the last of a result's text, as by cutting it.

    Raises:
        ValueError: A file of another form, a server that does not start, two tools of one name, an unknown name.
    """
    found = [
        (server, tool)
        for server, tools in start_servers(path, "mcp_config_file", start_timeout, concurrency)
        for tool in tools
    ]
    known = {name for server, tool in found for name in (tool.name, f"{server.name}:{tool.name}")}
    if unknown := [name for name in selection or [] if name not in known]:
        offered = ", ".join(f"{server.name}:{tool.name}" for server, tool in found) or "none"
        raise ValueError(f"mcp_tools: no server of {path!r} offers {unknown[0]!r}. They offer: {offered}.")
    chosen: dict[str, tuple[McpServer, Any]] = {}
    for server, tool in found:
        if selection is not None and tool.name not in selection and f"{server.name}:{tool.name}" not in selection:
            continue
        if tool.name in chosen:
            other = chosen[tool.name][0].name
            raise ValueError(
                f"mcp_config_file: the servers {other!r} and {server.name!r} both have a tool {tool.name!r}. Select "
                f"one with mcp_tools: [{server.name}:{tool.name}, ...]."
            )
        chosen[tool.name] = (server, tool)
    if not chosen:
        raise ValueError(f"mcp_config_file: the servers of {path!r} offer no tools. Expected at least one tool.")
    try:
        return [mcp_tool(server, tool, finish) for server, tool in chosen.values()]
    except ValueError as error:
        raise ValueError(f"mcp_config_file: {error} Leave the tool out by listing the others in mcp_tools.") from None


def mcp_tool(server: McpServer, tool: Any, finish: Callable[[str], str]) -> Callable:
    """One tool of a server, which checks its arguments. Raises `ValueError` for names that Python does not take."""

    async def run(**arguments: Any) -> str | ResultInParts:
        result = await run_on_thread(server.call(tool.name, arguments), LOOP)
        text = finish(result_text(result))
        if result.is_error:
            raise McpToolError(text)
        return text if (parts := result_parts(result)) is None else ResultInParts(parts, text).with_text(finish)

    made = as_tool(types.SimpleNamespace(name=tool.name, schema=schema_of(server, tool), run=run))
    made.as_written = True
    return made


def schema_of(server: McpServer, tool: Any) -> dict[str, Any]:
    """The JSON schema of a tool, as the model reads it."""
    return {
        "name": tool.name,
        "description": tool.description or tool.title or f"{tool.name} of {server.name}.",
        "parameters": {"type": "object", "properties": {}, **tool.input_schema},
    }


def result_text(result: Any) -> str:
    """The texts of a result, one per line; what is no text is named. Without any, its structured content as JSON.

    >>> result_text(types.SimpleNamespace(content=[], structured_content={"sum": 7}))
    '{"sum": 7}'
    """
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(content_text(part) for part in result.content)


def result_parts(result: Any) -> list[Any] | None:
    r"""The texts and images of a result, as `result_text` joins them; None without an image.

    >>> told, drawn = (types.SimpleNamespace(type=kind, text="x", data="eA==") for kind in ("text", "image"))
    >>> result_parts(types.SimpleNamespace(content=[told, drawn, told]))
    ['x\n', {'type': 'image', 'image': 'data:;base64,eA=='}, '\nx']
    """
    images = [image_data(part) for part in result.content]
    if not any(images):
        return None
    parts = []
    for k, (part, data) in enumerate(zip(result.content, images)):
        for each in ["\n"] * (k > 0) + [{"type": "image", "image": data} if data else content_text(part)]:
            if isinstance(each, str) and parts and isinstance(parts[-1], str):
                parts[-1] += each
            else:
                parts.append(each)
    return parts


def image_data(part: Any) -> str | None:
    """The data URI of a part that is an image: itself, or as the blob of a resource."""
    resource = getattr(part, "resource", None)
    if part.type == "image":
        return f"data:;base64,{part.data}"
    blob, kind = getattr(resource, "blob", None), getattr(resource, "mime_type", None)
    return f"data:;base64,{blob}" if blob is not None and str(kind).startswith("image/") else None


def content_text(part: Any) -> str:
    """Convert one content part of a result to text."""
    if part.type == "text":
        return part.text
    resource = getattr(part, "resource", None)
    if getattr(resource, "text", None) is not None:
        return resource.text
    return f"[{part.type}: not shown]"
