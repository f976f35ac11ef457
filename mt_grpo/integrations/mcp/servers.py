"""Servers of the Model Context Protocol (MCP), by the official SDK: started, asked, started again where they die."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import background_loop
from mt_grpo.conversation.tools.results import error_text
from mt_grpo.integrations.mcp.files import without_filled

logger = logging.getLogger(__name__)
LOOP = "mt-grpo-mcp"
MOST_PAGES = 1000  # of a server's list of tools
SECONDS_TO_CLOSE = 8.0  # the SDK gives a server 2 s to end by itself, and 2 s behind SIGTERM


SECONDS_TO_EXIT = 0.5  # a process that has closed its output has as good as ended


class ServerEnded(RuntimeError):
    """The process of a server ended by itself. The message says how, and what the connection said of it."""


class McpToolError(RuntimeError):
    """A tool call failed on the server. The model reads its message."""


class McpServer:
    """One server, and the connection to it, which conversations share.

    A task of its own opens the connection and closes it, as the SDK wants it. Where the connection is lost, the call
    that notices it fails, and the next one opens another.

    Args:
        name: Its name in `mcpServers`.
        entry: What stands there, as `read_servers` has it.
        start_timeout: Seconds until it answers.
        concurrency: Calls at the same time.
        rate_limit: Calls per second. None: any number.
    """

    def __init__(
        self, name: str, entry: dict[str, Any], start_timeout: float, concurrency: int, rate_limit: float | None = None
    ):
        self.name, self.entry, self.start_timeout = name, entry, start_timeout
        self.slots, self.interval, self.next_call = asyncio.Semaphore(concurrency), 1 / (rate_limit or 1e9), 0.0
        self.owner: asyncio.Task | None = None
        self.ready: asyncio.Future | None = None  # the client, once it is connected
        self.closing: asyncio.Event | None = None
        self.deadline = 0.0
        self.check: asyncio.Task | None = None
        self.starts = 0

    async def tools(self) -> list[Any]:
        """All tools that it offers.

        Raises:
            TimeoutError: Its list does not end within `start_timeout`.
            ValueError: Its list goes round, or has more than `MOST_PAGES` pages.
        """
        client, found, cursors = await self.connected(), [], [None]
        try:
            async with asyncio.timeout(self.start_timeout):
                while len(cursors) <= MOST_PAGES:
                    page = await client.list_tools(cursor=cursors[-1])
                    found += page.tools
                    if not page.next_cursor:
                        return found
                    if page.next_cursor in cursors:
                        raise ValueError(
                            f"tools/list gave the nextCursor {page.next_cursor!r:.100} twice: its list never ends. "
                            "Expected a last page without nextCursor"
                        )
                    cursors.append(page.next_cursor)
        except TimeoutError:
            raise TimeoutError(
                f"tools/list did not end in {self.start_timeout:g} s: it gave {len(found)} tools on "
                f"{len(cursors) - 1} pages. Raise mcp_start_timeout if it needs longer"
            ) from None
        raise ValueError(f"tools/list has more than {MOST_PAGES} pages, and a nextCursor on each")

    def told(self, error: BaseException) -> str:
        """An error's message without URLs, which may contain a key."""
        return without_filled(error_text(error), self.entry)

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """The server's `CallToolResult`. Raises `McpToolError` with what the model may read of a failure."""
        try:  # a half character ends the connection that all conversations share; NaN would arrive as null
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            raise McpToolError(
                "the call holds half a character, or a number that JSON has not (NaN, Infinity). Write another value."
            ) from None
        async with self.slots:
            loop = asyncio.get_running_loop()
            self.next_call = max(self.next_call, loop.time()) + self.interval
            await asyncio.sleep(self.next_call - self.interval - loop.time())
            try:
                client = await self.connected()
            except Exception as error:
                raise McpToolError(f"the server {self.name} does not start: {self.told(error)}") from error
            owner = self.owner
            try:
                return await client.call_tool(tool, arguments)
            except asyncio.CancelledError:  # the call's time is over: is it the server's?
                self.check = self.check or asyncio.create_task(self.close_if_dead(client, owner))
                raise
            except Exception as error:
                if not await self.close_if_dead(client, owner):
                    raise McpToolError(self.told(error)) from error
                raise McpToolError(f"the server {self.name} ended during the call. Try again.") from error

    async def close_if_dead(self, client: Client, owner: asyncio.Task) -> bool:
        """Close a connection that answers no more; whether it was one. Asked after a call that failed, or hung."""
        try:
            if owner.done():
                raise ConnectionError
            await asyncio.wait_for(client.list_tools(cache_mode="refresh"), self.start_timeout)
            return False
        except Exception:
            if self.owner is owner:  # else another call has closed it, and there may be a new one
                await self.close()
            return True
        finally:
            self.check = None

    async def connected(self) -> Client:
        """The connection; a new one where there is none. Raises what keeps it from opening.

        A start goes on where the call that began it is given up: the next call waits for the same one.
        """
        loop = asyncio.get_running_loop()
        if self.owner is None or self.owner.done():
            self.ready, self.closing = loop.create_future(), asyncio.Event()
            self.owner = asyncio.create_task(self.own(self.ready, self.closing))
            self.deadline, self.starts = loop.time() + self.start_timeout, self.starts + 1
            if self.starts > 1:
                logger.warning(f"The MCP server {self.name} had ended and is restarted.")
        try:
            return await asyncio.wait_for(asyncio.shield(self.ready), max(0.0, self.deadline - loop.time()))
        except TimeoutError:
            await self.close()
            raise TimeoutError(f"no answer in {self.start_timeout:g} s") from None

    async def own(self, ready: asyncio.Future, closing: asyncio.Event) -> None:
        """Hold the connection open until it is to be closed."""
        failures: list[BaseException] = []
        for kind in kinds(self.entry):
            try:
                async with self.transport(kind) as target, Client(target) as client:
                    if not ready.done():
                        ready.set_result(client)
                        await closing.wait()
                return
            except BaseException as error:
                failures.append(leaves(error)[0])
                if ready.done() or not isinstance(error, Exception):
                    break
        if not ready.done():
            first = failures[0]
            ready.set_exception(first if isinstance(first, Exception) else RuntimeError(repr(first)))
        elif not closing.is_set():
            logger.warning(f"The connection to the MCP server {self.name} ended: {self.told(failures[-1])}")

    @contextlib.asynccontextmanager
    async def transport(self, kind: str) -> Any:
        """The transport that the SDK's client connects to."""
        entry = self.entry
        if "command" in entry:
            # The commands of this Python's own environment first, as where it is activated.
            env = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
            env |= entry["env"]
            yield process_of(
                StdioServerParameters(
                    command=entry["command"],
                    args=entry["args"],
                    env=env,
                    cwd=entry.get("cwd"),
                )
            )
            return
        headers = entry["headers"]
        if kind == "sse":
            # Between two calls it may be silent for as long as a training step takes; the SDK would give it 300 s.
            yield sse_client(entry["url"], headers=headers, timeout=self.start_timeout, sse_read_timeout=None)
            return
        timeout = httpx2.Timeout(self.start_timeout, read=None)
        async with httpx2.AsyncClient(headers=headers, timeout=timeout, follow_redirects=True) as http:
            yield streamable_http_client(entry["url"], http_client=http)

    async def close(self) -> None:
        """Close the connection; a process ends with it."""
        owner, self.owner = self.owner, None
        if owner is not None:
            if not self.ready.done():
                self.ready.set_exception(ConnectionError("it was closed before it answered"))
                self.ready.exception()  # somebody has seen it
            self.closing.set()
            done, _ = await asyncio.wait([owner], timeout=SECONDS_TO_CLOSE)
            if not done:
                owner.cancel()


@contextlib.asynccontextmanager
async def process_of(parameters: StdioServerParameters) -> Any:
    """The SDK's streams of a server that is a process. Raises `ServerEnded` where it has ended before they are closed.

    The SDK says "Connection closed" then. It holds the process, with its exit code, in its generator alone.
    """
    started = stdio_client(parameters)
    async with started as streams:
        process = started.gen.ag_frame.f_locals.get("process")
        try:
            yield streams
        except Exception as error:
            deadline = asyncio.get_running_loop().time() + SECONDS_TO_EXIT
            while (code := getattr(process, "returncode", None)) is None:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.01)
            how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            raise ServerEnded(f"its process ended {how} ({error_line(leaves(error)[0])})") from error


def kinds(entry: dict[str, Any]) -> list[str]:
    """The transports to try, one after the other. An address without a type may also be of the older one, as in verl.

    >>> kinds({"type": "stdio"}), kinds({"type": None}), kinds({"type": "sse"})
    (['stdio'], ['http', 'sse'], ['sse'])
    """
    return [entry["type"]] if entry["type"] else ["http", "sse"]


def leaves(error: BaseException) -> list[BaseException]:
    """The errors of a group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


servers_to_close: list[McpServer] = []


@atexit.register
def close_servers() -> None:
    """Close all connections when this process ends. Its loop is still there: its thread is a daemon."""
    closing = [server.close() for server in servers_to_close]
    servers_to_close.clear()
    for each in [asyncio.run_coroutine_threadsafe(one, background_loop(LOOP)) for one in closing]:
        with contextlib.suppress(Exception):
            each.result(SECONDS_TO_CLOSE + 1)
