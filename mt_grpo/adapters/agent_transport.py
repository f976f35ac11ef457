"""Requests of clients in this process, answered without a socket: half the cost of HTTP to oneself."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import httpx

from mt_grpo.adapters.agent_server import AgentServer


class AgentTransport(httpx.AsyncBaseTransport, httpx.BaseTransport):
    """httpx's transport for clients of both kinds, on any thread and loop.

    Args:
        server: Whose `serve` answers, as over HTTP.
        loop: On which it runs.
    """

    def __init__(self, server: AgentServer, loop: asyncio.AbstractEventLoop):
        self._server, self._loop = server, loop

    def _start(self, request: httpx.Request) -> tuple[concurrent.futures.Future, float | None]:
        """(the answer, seconds that the client waits for it)."""
        serving = self._server.serve(request.method, request.url.path, request.headers, request.content)
        limits: dict[str, Any] = request.extensions.get("timeout", {})
        return asyncio.run_coroutine_threadsafe(serving, self._loop), limits.get("read")

    @staticmethod
    def _response(served: Any) -> httpx.Response:
        """The client has it as soon as this returns."""
        served.receipt()
        return httpx.Response(served.status, headers=served.headers, content=served.text.encode())

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.ReadTimeout` as a connection does."""
        await request.aread()
        serving, seconds = self._start(request)
        try:
            return self._response(await asyncio.wait_for(asyncio.wrap_future(serving), seconds))
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer in {seconds} s", request=request) from None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.ReadTimeout` as a connection does."""
        request.read()
        serving, seconds = self._start(request)
        try:
            return self._response(serving.result(seconds))
        except concurrent.futures.TimeoutError:
            serving.cancel()
            raise httpx.ReadTimeout(f"no answer in {seconds} s", request=request) from None
