"""A reverse proxy on the loopback, between the trainer and a vLLM server, that fails as networks and servers fail.

    with VLLMServer(model) as server, FaultProxy(server.url) as proxy:
        proxy.faults = first(3, Fault("busy", status=503), "/v1/completions")
        client = VLLMServerClient("127.0.0.1", proxy.port)
        ...
        assert proxy.counts["busy"] == 3

It runs in a thread of its own, and every request that it saw is in `proxy.requests`.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}


@dataclass
class Request:
    """One request as the proxy saw it."""

    method: str
    path: str
    payload: Any  # the JSON that was sent, None for anything else
    query: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Fault:
    """What happens to one request. Delay, then `status` without asking the server, or its answer cut or changed.

    Args:
        name: Counted under it in `FaultProxy.counts`.
        delay: Seconds before anything else.
        status, body, headers: Answered in the server's place.
        drip: Seconds before each byte of that body.
        cut: The connection closes in mid-answer; with `status=0` before the server was asked at all.
        change: From the server's JSON answer to the one that is passed on, bytes as they are.
    """

    name: str
    delay: float = 0.0
    status: int | None = None
    body: bytes = b'{"error": {"message": "injected", "code": 0}}'
    cut: bool = False
    drip: float = 0.0
    change: Callable[[Any], Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


Rule = Callable[[Request], Fault | None]


def no_faults(request: Request) -> None:
    """Everything passes."""


def first(count: int, fault: Fault, path: str = "") -> Rule:
    """The rule that gives `fault` to the first `count` requests whose path begins so, and lets the rest pass.

    >>> rule = first(1, Fault("busy", status=503), "/v1")
    >>> [rule(Request("POST", path, None)) is not None for path in ("/health", "/v1/completions", "/v1/completions")]
    [False, True, False]
    """
    left = [count]

    def rule(request: Request) -> Fault | None:
        if left[0] <= 0 or not request.path.startswith(path):
            return None
        left[0] -= 1
        return fault

    return rule


class FaultProxy:
    """Passes requests on to `target`, and does to them what `faults` says.

    Args:
        target: URL of the server; may be set to another one at any time.
        faults: Asked for every request, in the proxy's thread; may be set to another rule at any time.

    Attributes:
        port: Where it listens on 127.0.0.1.
        requests: All of them so far, in the order in which they came.
        counts: Faults so far by name.
        reachable: False: every connection is closed without an answer, as by a server that is gone.
    """

    def __init__(self, target: str, faults: Rule = no_faults):
        self.target, self.faults, self.reachable = target, faults, True
        self.requests: list[Request] = []
        self.counts: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self.port: int = self._call(self._start())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """No faults from here on, and nothing counted yet."""
        self.faults, self.reachable, self.requests, self.counts = no_faults, True, [], Counter()

    def close(self) -> None:
        """Close every connection and end the thread."""
        if self._thread.is_alive():
            self._call(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _call(self, coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self) -> int:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _handle(self, incoming: web.Request) -> web.StreamResponse:
        body = await incoming.read()
        try:
            payload = json.loads(body) if body else None
        except ValueError:
            payload = None
        request = Request(
            incoming.method, incoming.path, payload, query=incoming.query_string, headers=dict(incoming.headers)
        )
        self.requests.append(request)
        fault = self.faults(request)
        if fault is not None:
            self.counts[fault.name] += 1
            await asyncio.sleep(fault.delay)
            if fault.drip:
                return await self._drip(incoming, fault)
            if fault.status:
                return self._answer(fault.status, fault.body, fault.headers)
        if not self.reachable or (fault is not None and fault.status == 0):
            return self._hang_up(incoming)
        headers = {k: v for k, v in incoming.headers.items() if k.lower() not in HOP_BY_HOP}
        try:
            url = f"{self.target}{incoming.path_qs}"
            async with self._session.request(incoming.method, url, data=body, headers=headers) as response:
                answer, status = await response.read(), response.status
        except aiohttp.ClientError:  # the server is gone: so is the proxy for this request
            return self._hang_up(incoming)
        if not self.reachable:
            return self._hang_up(incoming)
        if fault is not None and fault.change is not None:
            changed = fault.change(json.loads(answer))
            answer = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        if fault is not None and fault.cut:
            cut = web.StreamResponse(status=status, headers={"Content-Length": str(len(answer))})
            await cut.prepare(incoming)
            await cut.write(answer[: len(answer) // 2])
            return self._hang_up(incoming)
        return self._answer(status, answer)

    @staticmethod
    async def _drip(incoming: web.Request, fault: Fault) -> web.StreamResponse:
        answer = web.StreamResponse(status=fault.status or 200, headers={"Content-Length": str(len(fault.body))})
        await answer.prepare(incoming)
        for i in range(len(fault.body)):
            await asyncio.sleep(fault.drip)
            await answer.write(fault.body[i : i + 1])
        return answer

    @staticmethod
    def _answer(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
        return web.Response(status=status, body=body, headers=headers, content_type="application/json")

    @staticmethod
    def _hang_up(incoming: web.Request) -> web.Response:
        if incoming.transport is not None:
            incoming.transport.abort()
        return web.Response(status=502)
