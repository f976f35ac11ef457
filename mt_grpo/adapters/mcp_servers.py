"""Servers of the Model Context Protocol (MCP), by the official SDK: started, asked, started again where they die."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from mt_grpo.event_loop import background_loop
from mt_grpo.tool_results import error_text

logger = logging.getLogger(__name__)
LOOP = "mt-grpo-mcp"
SECONDS_TO_CLOSE = 8.0  # the SDK gives a server 2 s to end by itself, and 2 s behind SIGTERM
KEYS = {"command", "args", "env", "cwd", "url", "headers", "auth_token", "type", "transport", "disabled"}
TRANSPORTS = ("stdio", "http", "streamable-http", "streamable_http", "sse")


class McpToolError(RuntimeError):
    """What a server says of a call that failed; the model reads it."""


class McpServer:
    """One server, and the connection to it, which conversations share.

    A task of its own opens the connection and closes it, as the SDK wants it. Where the connection is lost, the call
    that notices it fails, and the next one opens another.

    Args:
        name: Its name in `mcpServers`.
        entry: What stands there.
        start_timeout: Seconds until it answers.
        concurrency: Calls at the same time.
        rate_limit: Calls per second. None: any number.
    """

    def __init__(
        self, name: str, entry: dict[str, Any], start_timeout: float, concurrency: int, rate_limit: float | None = None
    ):
        self.name, self.entry, self.start_timeout = name, entry, start_timeout
        self.slots, self.interval, self.next_call = asyncio.Semaphore(concurrency), 1 / (rate_limit or 1e9), 0.0
        self.starting = asyncio.Lock()
        self.client: Client | None = None
        self.owner: asyncio.Task | None = None
        self.closing: asyncio.Event | None = None
        self.starts = 0

    async def tools(self) -> list[Any]:
        """All tools that it offers."""
        client, found, cursor = await self.connected(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """The server's `CallToolResult`. Raises `McpToolError` with what the model may read of a failure."""
        async with self.slots:
            loop = asyncio.get_running_loop()
            self.next_call = max(self.next_call, loop.time()) + self.interval
            await asyncio.sleep(self.next_call - self.interval - loop.time())
            try:
                client = await self.connected()
            except Exception as error:
                raise McpToolError(f"the server {self.name} does not start: {error_text(error)}") from error
            try:
                return await client.call_tool(tool, arguments)
            except Exception as error:
                if await self.is_alive(client):
                    raise McpToolError(error_text(error)) from error
                await self.close()
                raise McpToolError(f"the server {self.name} ended during the call. Try again.") from error

    async def is_alive(self, client: Client) -> bool:
        """Whether a connection still answers: asked after an error that may be of the call alone."""
        if self.owner is None or self.owner.done():
            return False
        try:
            await client.list_tools(cache_mode="refresh")
        except MCPError as error:
            return "closed" not in str(error).lower() and "timed out" not in str(error).lower()
        except Exception:
            return False
        return True

    async def connected(self) -> Client:
        """The connection; a new one where there is none. Raises what keeps it from opening."""
        async with self.starting:
            if self.owner is not None and self.owner.done():
                self.client = None
            if self.client is None:
                ready = asyncio.get_running_loop().create_future()
                self.closing = asyncio.Event()
                self.owner = asyncio.create_task(self.own(ready, self.closing))
                try:
                    self.client = await asyncio.wait_for(asyncio.shield(ready), self.start_timeout)
                except TimeoutError:
                    ready.cancel()
                    await self.close()
                    raise TimeoutError(f"no answer in {self.start_timeout:g} s") from None
                self.starts += 1
                if self.starts > 1:
                    logger.warning(f"The MCP server {self.name} had ended, and is started again.")
            return self.client

    async def own(self, ready: asyncio.Future, closing: asyncio.Event) -> None:
        """Hold the connection open until it is to be closed."""
        try:
            async with self.transport() as target, Client(target, read_timeout_seconds=self.start_timeout) as client:
                client.session  # noqa: B018  it raises where there is none
                ready.set_result(client)
                await closing.wait()
        except BaseException as error:
            causes = leaves(error)
            if not ready.done():
                ready.set_exception(causes[0] if isinstance(causes[0], Exception) else RuntimeError(repr(causes[0])))
            elif not closing.is_set():
                logger.warning(f"The connection to the MCP server {self.name} ended: {error_text(causes[0])}")

    @contextlib.asynccontextmanager
    async def transport(self) -> Any:
        """What the SDK's client connects to."""
        entry = self.entry
        if "command" in entry:
            # The commands of this Python's own environment first, as where it is activated.
            env = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
            env |= {key: os.path.expandvars(str(value)) for key, value in (entry.get("env") or {}).items()}
            yield StdioServerParameters(
                command=entry["command"], args=[str(arg) for arg in entry.get("args") or []], env=env,
                cwd=entry.get("cwd"),
            )  # fmt: skip
            return
        headers = {key: os.path.expandvars(str(value)) for key, value in (entry.get("headers") or {}).items()}
        if entry.get("auth_token"):
            headers["Authorization"] = f"Bearer {os.path.expandvars(entry['auth_token'])}"
        if (entry.get("type") or entry.get("transport")) == "sse":
            yield sse_client(entry["url"], headers=headers)
            return
        timeout = httpx2.Timeout(self.start_timeout, read=None)
        async with httpx2.AsyncClient(headers=headers, timeout=timeout, follow_redirects=True) as http:
            yield streamable_http_client(entry["url"], http_client=http)

    async def close(self) -> None:
        """Close the connection; a process ends with it."""
        owner, self.owner, self.client = self.owner, None, None
        if owner is not None:
            self.closing.set()
            done, _ = await asyncio.wait([owner], timeout=SECONDS_TO_CLOSE)
            if not done:
                owner.cancel()


def leaves(error: BaseException) -> list[BaseException]:
    """The errors of a group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


async def on_loop(coroutine: Coroutine) -> Any:
    """Run a coroutine on the event loop of the connections. Who stops waiting for it cancels it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, background_loop(LOOP)))


def read_servers(path: str, key: str) -> dict[str, dict[str, Any]]:
    """The servers of a JSON file: `{"mcpServers": {name: {"command", "args", "env"} or {"url", "headers"}}}`.

    Raises `ValueError`.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{key}: {path!r} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"{key}: {path!r} is not JSON ({error}).") from None
    servers = found.get("mcpServers") if isinstance(found, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f'{key}: {path!r} has no "mcpServers". Expected {{"mcpServers": {{"name": {{...}}}}}}.')
    for name, entry in servers.items():
        where = f"{key}: server {name!r} of {path!r}"
        if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
            raise ValueError(f"{where} has neither or both of command and url. Expected one of them.")
        if unknown := entry.keys() - KEYS:
            raise ValueError(f"{where} has the keys {sorted(unknown)}, expected some of {', '.join(sorted(KEYS))}.")
        if (transport := entry.get("type") or entry.get("transport") or "stdio") not in TRANSPORTS:
            raise ValueError(f"{where} has the type {transport!r}, expected one of {', '.join(TRANSPORTS)}.")
        for name, kind in (("args", list), ("env", dict), ("headers", dict)):
            if not isinstance(entry.get(name) or kind(), kind):
                raise ValueError(f"{where}: {name} is no {kind.__name__}.")
    return {name: entry for name, entry in servers.items() if not entry.get("disabled")}


servers_to_close: list[McpServer] = []


@atexit.register
def close_servers() -> None:
    """Close all connections when this process ends. Its loop is still there: its thread is a daemon."""
    closing = [server.close() for server in servers_to_close]
    servers_to_close.clear()
    for each in [asyncio.run_coroutine_threadsafe(one, background_loop(LOOP)) for one in closing]:
        with contextlib.suppress(Exception):
            each.result(SECONDS_TO_CLOSE + 1)
