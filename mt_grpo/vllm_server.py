"""The HTTP connection of `VLLMServerClient`: retries, time limits, and proof of the weights' version."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp

from mt_grpo.event_loop import CONTROL_THREAD, allow_many_open_files, background_loop, close_on, gather_all, run_async
from mt_grpo.sampling import sampling_defaults
from mt_grpo.server_errors import ServerError, ServerLost, split_server_url
from mt_grpo.versions import SharedQuestion, continues

logger = logging.getLogger(__name__)


class ServerConnection:
    """Connections to one `vllm serve` in development mode: control calls, retries, health checks, logprobs.

    Args:
        base_url: The address, such as `http://127.0.0.1:8000`. A user and password in it are sent, but never shown.
        api_key: The server's `--api-key`, if it has one. None: the environment variable VLLM_API_KEY.
        timeout: Seconds to wait until the server starts, or comes back, before `ServerError`.
        request_timeout: Seconds that one request may take. Then it is sent again, if `timeout` is not over.
    """

    BAD_ANSWERS = 3  # in a row, after which a request fails
    NOTICE_SECONDS = 10.0  # between two log lines during a wait for the server
    NO_VLLM = "That is no answer of a vLLM server: check vllm_server_host, vllm_server_port, vllm_server_base_url."
    VERSION_SECONDS = 10.0  # that the server may take to say which weights it holds
    WATCH_SECONDS = 1.0  # between two reads of the server's version; no server restarts within this time

    def __init__(self, base_url: str, api_key: str | None, timeout: float, request_timeout: float):
        self.base_url, credentials = split_server_url(base_url)
        self.timeout, self.request_timeout = timeout, request_timeout
        self.retries = 0  # requests that were sent again, since a reader last set it to 0
        self.lineage = 0  # restarts that pushes found out; the same on all ranks after a push
        self.policy_version = 0  # weight changes before the weights of the last push
        self.newest_version, self.pushing = 0, False  # of the last push that was begun; whether one is under way
        self._reached = False  # whether the server has ever answered
        api_key = api_key or os.environ.get("VLLM_API_KEY")
        if api_key and credentials:
            got = "got a password in vllm_server_base_url, and VLLM_API_KEY"
            raise ServerError(f"{self.base_url}: {got}. A request has room for one of them: remove the other.")
        credentials = f"Bearer {api_key}" if api_key else credentials
        self._headers = {"Authorization": credentials} if credentials else {}
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self.held_version = SharedQuestion(self._ask_version).answer
        allow_many_open_files()

    @property
    def sends_credentials(self) -> bool:
        """Whether requests carry an API key or a password."""
        return bool(self._headers)

    # -- control calls (synchronous) --

    def request(
        self, method: str, path: str, timeout: float = 60.0, read: Callable[[Any], Any] = lambda answer: answer,
        **kwargs,
    ) -> Any:  # fmt: skip
        """One control call. Returns `read` of the JSON answer. Raises `ServerError` with URL, status and body.

        It is `ServerLost` if the server may come back: no connection, no answer within `timeout` seconds, 429, 5xx.
        """
        url = f"{self.base_url}{path}"
        loop = background_loop(CONTROL_THREAD)
        future = asyncio.run_coroutine_threadsafe(self._call(method, url, timeout, kwargs), loop)
        try:
            status, body = future.result()
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}" if str(error) else f"no whole answer within {timeout:g} s"
            never = aiohttp.ClientConnectorDNSError, aiohttp.ClientSSLError, aiohttp.InvalidURL
            if isinstance(error, never) and not self._reached:  # DNS may also fail in the middle of a run
                raise ServerError(f"{method} {url}: {problem}. No server can be reached by this address.") from error
            raise ServerLost(f"{method} {url}: {problem}. Is the vLLM server running?") from error
        except BaseException:
            future.cancel()
            raise
        self._reached = True
        text = body.decode("utf-8", "replace")
        if not 200 <= status < 300:
            kind = ServerLost if status == 429 or status >= 500 else ServerError
            raise kind(f"{method} {url}: {status} {text[:2000]}{self._advice(status, path)}")
        try:
            return read(json.loads(body) if body else {})
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{method} {url}: {status} {text[:300]!r}. {self.NO_VLLM}") from None

    def _advice(self, status: int, path: str) -> str:
        """The advice for an answer's status, for the end of an error message."""
        if status in (401, 403):
            return ". Set VLLM_API_KEY to the key that the server was started with (--api-key)."
        if status == 404 and path.startswith(("/v1/", "/health", "/tokenize")):
            return f". {self.NO_VLLM}"
        return ". Start the vLLM server with VLLM_SERVER_DEV_MODE=1." if status == 404 else ""

    async def _call(self, method: str, url: str, timeout: float, kwargs: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body. `timeout` limits the whole call: a server may send a byte every second for ever."""
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=10.0)
        async with aiohttp.ClientSession(headers=self._headers, timeout=limits) as session:
            async with session.request(method, url, **kwargs) as response:
                return response.status, await response.read()

    def healthy(self) -> bool:
        """Whether the server answers its health check now."""
        with suppress(ServerError):
            return self.request("GET", "/health", timeout=10.0) is not None
        return False

    def wait_until_healthy(self, unless: Callable[[], Any] = lambda: False) -> None:
        """Wait for a healthy server, up to `self.timeout` seconds or until `unless` returns true, and log the wait.

        Raises `ServerError` after this time, or at once if another service answers or the address cannot work.
        """
        began, said = time.monotonic(), float("-inf")
        while not unless():
            left = began + self.timeout - time.monotonic()
            try:
                self.request("GET", "/health", timeout=min(10.0, max(left, 1.0)))
                return
            except ServerLost as error:
                if left <= 0:
                    raise ServerError(
                        f"No vLLM server answers at {self.base_url} after {self.timeout:g} s. Start one with "
                        "`bash scripts/train.sh RECIPE`, or set vllm_server_host, vllm_server_port, "
                        f"vllm_server_timeout. The last try: {str(error)[:500]}"
                    ) from None
                if time.monotonic() - said >= self.NOTICE_SECONDS:
                    said = time.monotonic()
                    logger.warning(f"Waiting up to {left:.0f} s more for a vLLM server: {str(error)[:500]}")
            time.sleep(1.0)

    @functools.cached_property
    def model_card(self) -> dict[str, Any]:
        """The served model: `id` (its name in requests), `root` (what was loaded), `max_model_len`."""

        def read(answer: dict[str, Any]) -> dict[str, Any]:
            card = answer["data"][0]
            return {**card, "id": str(card["id"]), "max_model_len": int(card["max_model_len"])}

        return self.request("GET", "/v1/models", read=read)

    @property
    def max_model_len(self) -> int | None:
        """The served model's context in tokens; None if the server does not report it."""
        return self.model_card.get("max_model_len")

    def server_info(self) -> dict[str, Any]:
        """vLLM's configuration as nested dicts. The server must have its development endpoints."""

        def read(answer: dict[str, Any]) -> dict[str, Any]:
            _ = [answer["vllm_config"]["model_config"][key] for key in ("model", "dtype", "logprobs_mode")]
            return answer["vllm_config"]

        return self.request("GET", "/server_info", params={"config_format": "json"}, read=read)

    def settings(self) -> dict[str, Any]:
        """The settings that determine its samples, their length, and how weights get there."""
        info, keys = self.server_info(), ("model", "tokenizer", "dtype", "max_model_len", "logprobs_mode")
        backend = (info.get("weight_transfer_config") or {}).get("backend")
        return {**{key: info["model_config"].get(key) for key in keys}, "weight_transfer": backend}

    def weight_version(self) -> str:
        """The version that the last push set. A restarted server has lost it."""
        return self.request("GET", "/weight_info", timeout=30.0, read=lambda answer: answer["weight_version"])

    def score(self, token_ids: list[int], rank: int | None = None) -> list[float]:
        """The logprobs of `token_ids[1:]` at temperature 1, full vocabulary, of one engine (`rank`) or of any."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        payload = {
            **sampling_defaults(), "model": self.model_card["id"], "prompt": token_ids, "max_tokens": 1,
            "prompt_logprobs": 0,
        }  # fmt: skip

        def read(answer: dict[str, Any]) -> list[float]:
            entries = answer["choices"][0]["prompt_logprobs"]
            return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], entries[1:], strict=True)]

        return self.request("POST", "/v1/completions", json=payload, headers=headers, read=read)

    # -- requests of conversations (async) --

    async def _session(self) -> aiohttp.ClientSession:
        """The session of the running event loop. Sessions of closed loops are closed."""
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            ended = [self._sessions.pop(known) for known in list(self._sessions) if known.is_closed()]
            self._sessions[loop] = aiohttp.ClientSession(
                # vLLM closes connections that were idle for 5 s. A request that is sent at that moment would be lost.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0), headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self.request_timeout, sock_connect=10),
            )  # fmt: skip
            for session in ended:
                await session.close()
        return self._sessions[loop]

    async def _post(
        self, path: str, payload: dict[str, Any], read: Callable[[dict[str, Any]], Any] = lambda answer: answer
    ) -> Any:
        """POST a request. Returns `read` of the JSON answer.

        The request is sent again, with backoff, after a connection error, 429, 5xx or a timeout, until
        `self.timeout` seconds after its first failure. It is also sent again after an answer that is no JSON, or that
        `read` refuses with `BadAnswer`, up to `BAD_ANSWERS` such answers in a row. Raises `ServerError`.
        """
        url, give_up, wait, bad_answers = f"{self.base_url}{path}", None, 0.05, 0
        while True:
            try:
                async with (await self._session()).post(url, json=payload) as response:
                    if response.status == 200:
                        return read(json.loads(await response.read()))
                    problem, bad_answers = f"{response.status} {(await response.text(errors='replace'))[:2000]}", 0
                    if response.status not in (429, 500, 502, 503, 504):
                        raise ServerError(f"POST {url}: {problem}{self._advice(response.status, path)}")
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            except TimeoutError:
                problem = f"no answer within vllm_request_timeout={self.request_timeout:g} s"
            except ValueError as error:
                problem, bad_answers = f"{type(error).__name__}: {error}", bad_answers + 1
                if bad_answers == self.BAD_ANSWERS:
                    raise ServerError(f"POST {url}: {bad_answers} answers in a row are no sample: {problem}") from None
            give_up = give_up or time.monotonic() + self.timeout
            left = give_up - time.monotonic()
            if left <= 0:
                raise ServerLost(f"POST {url}: {problem}; gave up after vllm_server_timeout={self.timeout:g} s")
            self.retries += 1
            logger.debug("POST %s: %s; sending it again", url, problem)
            await asyncio.sleep(min(wait * random.uniform(0.5, 1.0), left))  # the last try is at the time limit
            wait = min(2 * wait, 10.0)

    async def _ask_version(self) -> str | None:
        """The version of the weights that the server holds; None if it does not answer. `held_version` shares it."""
        try:
            timeout = aiohttp.ClientTimeout(total=self.VERSION_SECONDS)
            async with (await self._session()).get(f"{self.base_url}/weight_info", timeout=timeout) as response:
                return (await response.json())["weight_version"] if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return None

    async def gather_from(self, version: str, coroutines: list[Awaitable]) -> list:
        """The results proven to come from the weights `version` and those pushed since; None for all others.

        A result is proven if the server, asked after the end, reports a version that `continues` this one; a restarted
        server has none. If it reports another, what is open is cancelled. Raises the first error of a coroutine, and
        `ServerLost` if no version is reported within `self.timeout` after the last result, pushes apart.
        """
        finished: dict[int, tuple[float, Any]] = {}  # index -> (when, result)

        async def finish(index: int, coroutine: Awaitable) -> None:
            result = await coroutine
            finished[index] = time.monotonic(), result

        running = asyncio.ensure_future(gather_all([finish(i, c) for i, c in enumerate(coroutines)]))
        lineage, confirmed, give_up = self.lineage, float("-inf"), None
        try:
            while True:
                await asyncio.wait({running}, timeout=self.WATCH_SECONDS)
                asked, done = time.monotonic(), running.done()
                if done:
                    running.result()
                holds = continues(await self.held_version(), version, lineage)
                if self.lineage != lineage or holds is False:
                    break
                if holds:
                    confirmed = asked
                    if done:
                        break
                elif done:
                    give_up = None if self.pushing else give_up or asked + self.timeout
                    if give_up is not None and asked > give_up:
                        raise ServerLost(f"{self.base_url} does not say which weights it holds: see its log.")
                    await asyncio.sleep(self.WATCH_SECONDS)
        finally:
            running.cancel()
        ended = [finished.get(i, (float("inf"), None)) for i in range(len(coroutines))]
        return [result if when <= confirmed else None for when, result in ended]

    async def _close_session(self) -> None:
        if session := self._sessions.pop(asyncio.get_running_loop(), None):
            await session.close()

    def close(self) -> None:
        """Close the connections. A later request opens new ones."""
        with suppress(concurrent.futures.TimeoutError):  # a tool or reward may block the loop for ever
            run_async(self._close_session(), timeout=5.0)
        for loop in list(self._sessions):  # of the caller's own loops, which may be closed
            session = self._sessions.pop(loop)
            close_on(loop, session.close())
