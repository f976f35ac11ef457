"""MCP servers: read from a file, started, asked, and started again if they die."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import start_in_background

logger = logging.getLogger(__name__)
LOOP = "mt-grpo-mcp"  # the thread of all servers
SECONDS_TO_START, SECONDS_TO_ANSWER, SECONDS_TO_CLOSE, MOST_CALLS = 60.0, 60.0, 8.0, 16  # of one server
KEYS = {"command", "args", "env", "cwd", "url", "headers", "type", "tools", "auth_token"}  # auth_token is verl's


class McpToolError(RuntimeError):
    """A tool call failed on the server. The model reads its message."""


def read_servers(path: str, key: str) -> dict[str, dict[str, Any]]:
    """The servers of a JSON file by name, with variables filled in. Raises `ValueError`, which names the key."""

    def value(found: re.Match) -> str:
        name, has_default, default = found[1].partition(":-")
        if has_default and name not in os.environ:
            return default
        return json.dumps(os.environ[name])[1:-1]

    try:
        servers = json.loads(re.sub(r"\$\{([^}]+)\}", value, Path(path).read_text(encoding="utf-8")))["mcpServers"]
        for name, entry in servers.items():
            if entry.keys() - KEYS or ("command" in entry) == ("url" in entry):
                raise TypeError(f"{name!r} has {', '.join(entry)}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{key}: {path!r} cannot be read ({error_line(error)}). Expected JSON with mcpServers, each with command, "
            "args, env, cwd, or with url, headers, type. ${NAME} is an environment variable, which must be set."
        ) from error
    return servers


class McpServer:
    """One server, and the connection to it, which conversations share.

    A task of its own opens the connection and closes it, as the SDK wants it. If the connection is lost, the call that
    notices it fails, and the next one opens another. No call is sent twice: the server may have run it.
    """

    def __init__(self, name: str, entry: dict[str, Any]):
        self.name, self.entry, self.starts = name, entry, 0
        self.slots = asyncio.Semaphore(MOST_CALLS)
        self.owner = self.ready = self.closing = None  # a task, a future of its client, and an event that ends it

    async def tools(self) -> list[Any]:
        """All tools of the server, page by page."""
        async with asyncio.timeout(SECONDS_TO_START):
            client, tools, cursor = await self.connected(), [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if not (cursor := page.next_cursor):
                    return tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """The server's `CallToolResult`. Raises `McpToolError` with what the model may read of a failure."""
        try:  # half a character would end the connection that all conversations share; NaN would arrive as null
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            raise McpToolError("the call holds half a character, or a number that JSON has not (NaN)") from None
        async with self.slots:
            try:
                client, owner = await self.connected(), self.owner
            except Exception as error:
                raise McpToolError(f"the server {self.name} does not start ({type(error).__name__})") from error
            try:
                return await client.call_tool(tool, arguments)
            except asyncio.CancelledError:  # it took too long: the server may hang
                self.check = asyncio.create_task(self.close_if_dead(client, owner))
                raise
            except Exception as error:
                lost = f"the server {self.name} was lost during the call. Try again."
                raise McpToolError(lost if await self.close_if_dead(client, owner) else str(error)) from error

    async def close_if_dead(self, client: Client, owner: asyncio.Task) -> bool:
        """Close a connection over which the server answers no more, and return whether it does not."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                if not owner.done():
                    await client.list_tools()
                    return False
        if self.owner is owner:  # otherwise another call has noticed it, too
            await self.close()
        return True

    async def connected(self) -> Client:
        """The connection; a new one if there is none. A start goes on if the call that began it is given up."""
        if self.owner is None or self.owner.done():
            self.ready, self.closing = asyncio.get_running_loop().create_future(), asyncio.Event()
            self.owner, self.starts = asyncio.create_task(self._own(self.ready, self.closing)), self.starts + 1
            if self.starts > 1:
                logger.warning(f"The MCP server {self.name} had ended and is restarted.")
        return await asyncio.shield(self.ready)

    async def _own(self, ready: asyncio.Future, closing: asyncio.Event) -> None:
        """Hold the connection open until it is to be closed."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(SECONDS_TO_START):
                    ready.set_result(await stack.enter_async_context(Client(await self._target(stack))))
                await closing.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                ready.exception()  # perhaps nobody waits for it

    async def _target(self, stack: contextlib.AsyncExitStack) -> Any:
        entry = self.entry
        if "command" in entry:  # commands of this Python's environment are found first
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
            return StdioServerParameters(**{"args": [], **entry, "env": {"PATH": path, **entry.get("env", {})}})
        token, headers = entry.get("auth_token"), entry.get("headers", {})
        headers = headers if token is None else {**headers, "Authorization": f"Bearer {token}"}
        if token is not None or entry.get("type") == "sse":  # it may be silent for long
            return sse_client(entry["url"], headers=headers, timeout=SECONDS_TO_START, sse_read_timeout=None)
        limits = httpx2.Timeout(SECONDS_TO_START, read=None)
        client = httpx2.AsyncClient(headers=headers, timeout=limits, follow_redirects=True)
        return streamable_http_client(entry["url"], http_client=await stack.enter_async_context(client))

    async def close(self) -> None:
        """Close the connection; a process ends with it."""
        owner, self.owner = self.owner, None
        if owner is not None:
            self.closing.set()
            await asyncio.wait([owner], timeout=SECONDS_TO_CLOSE)
            owner.cancel()


servers_to_close: list[McpServer] = []


@atexit.register
def close_servers() -> None:
    """Close all connections when this process ends. Their loop is still there: its thread is a daemon."""
    closing = [server.close() for server in servers_to_close]
    servers_to_close.clear()
    for future in [start_in_background(each, LOOP) for each in closing]:
        with contextlib.suppress(Exception):
            future.result(SECONDS_TO_CLOSE + 1)
