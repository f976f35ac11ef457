"""The HTTP server that agents talk to: OpenAI's and Anthropic's API on the loopback address, one per process."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import functools
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from mt_grpo.base.errors import error_line, tell_once
from mt_grpo.base.event_loop import allow_many_open_files
from mt_grpo.base.json_types import is_nested, json_text
from mt_grpo.conversation.environments import is_number
from mt_grpo.integrations.agents.anthropic_api import (
    anthropic_answer,
    anthropic_error,
    anthropic_error_event,
    anthropic_events,
    anthropic_models,
    read_anthropic_request,
)
from mt_grpo.integrations.agents.chains import Asked
from mt_grpo.integrations.agents.chat_api import chat_answer, chat_error, chat_events, read_chat_request
from mt_grpo.integrations.agents.messages import (
    DEEPEST,
    FROZEN,
    POLICY,
    Answer,
    ApiError,
    ModelRequest,
    refuse,
)
from mt_grpo.integrations.agents.responses_api import (
    read_responses_request,
    responses_answer,
    responses_error,
    responses_events,
)
from mt_grpo.integrations.agents.session import AgentSession

MAX_BYTES = 256 * 2**20  # of one request, which has all images of a conversation again
KEEP_ALIVE_SECONDS = 5.0  # between the comments of a stream that waits for its answer


class Endpoint(NamedTuple):
    """How an API reads requests and writes answers."""

    read: Callable[[dict, AgentSession], ModelRequest]
    write: Callable[[list[Answer], dict], dict]
    events: Callable[[list[Answer], dict], Iterator[str]]
    error: Callable[[ApiError], Iterator[str]]  # behind the beginning of a stream
    refusal: Callable[[ApiError], dict] = lambda error: error.body


JSON = "application/json"
CHAT = Endpoint(
    lambda body, session: read_chat_request(body, session.contents, session.format.chat_template_kwargs),
    chat_answer,
    chat_events,
    chat_error,
)
RESPONSES = Endpoint(
    lambda body, session: read_responses_request(
        body, session.responses, session.contents, session.format.chat_template_kwargs
    ),
    responses_answer,
    responses_events,
    responses_error,
)


def read_anthropic(body: dict, session: AgentSession, counts: bool = False) -> ModelRequest:
    """A request of /v1/messages, or of those of which only the tokens are counted. Raises `ApiError`."""
    arguments, later = session.format.chat_template_kwargs, session.prompts.takes_later_systems
    return read_anthropic_request(body, session.contents, arguments, later, counts)


ANTHROPIC = Endpoint(read_anthropic, anthropic_answer, anthropic_events, anthropic_error_event, anthropic_error)
COUNT = ANTHROPIC._replace(read=functools.partial(read_anthropic, counts=True))
ENDPOINTS = {
    "chat/completions": CHAT, "responses": RESPONSES, "messages": ANTHROPIC, "messages/count_tokens": COUNT,
}  # fmt: skip


class Served(NamedTuple):
    """An answer as HTTP has it.

    Whoever hands it to the client calls `receipt` before, and `receipt(False)` where the client turns out to be gone.
    """

    status: int
    kind: str  # of content
    text: str
    event: str = ""  # an error behind the beginning of a stream
    receipt: Callable[..., None] = lambda received=True: None

    @property
    def headers(self) -> dict[str, str]:
        """The official clients send 429 and 5xx again unless they are told not to."""
        refused = {"x-should-retry": "false"} if self.status != 200 else {}
        return {"Content-Type": self.kind, **refused, **({"Upgrade": "HTTP/1.1"} if self.status == 426 else {})}


http_logger = logging.getLogger(f"{__name__}.http")


def without_traceback(record: logging.LogRecord) -> bool:
    """Logging filter that replaces aiohttp's traceback for an invalid HTTP request by one line."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, BadHttpMessage):
        record.msg, record.args, record.exc_info = f"An agent sent invalid HTTP: {error_line(error)}.", (), None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


http_logger.addFilter(without_traceback)


class AgentServer:
    """Answers the requests of all rollouts of this process.

    A rollout is told by its key: in the header `X-Session-ID`, as the API key, or as the first part of the path.

    Attributes:
        port: On 127.0.0.1, once `start` is done.
    """

    def __init__(self):
        self.port = 0
        self._sessions: dict[str, AgentSession] = {}
        self._ended: collections.OrderedDict[str, None] = collections.OrderedDict()  # keys of rollouts that are over
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of the loopback address."""
        allow_many_open_files()
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A request is cancelled with its client, so that an answer which nobody reads is known as such.
        self._runner = web.AppRunner(
            app, access_log=None, logger=http_logger, shutdown_timeout=1.0, handler_cancellation=True
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    @property
    def address(self) -> str:
        """The base URL of the server for clients."""
        return address_of(self.port)

    async def stop(self) -> None:
        """Close the port, and all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    def add(self, session: AgentSession) -> None:
        """Answer the requests of a rollout."""
        self._sessions[session.key] = session

    def remove(self, session: AgentSession) -> None:
        """Answer no further request of a rollout."""
        self._sessions.pop(session.key, None)
        self._ended[session.key] = None
        while len(self._ended) > 65_536:
            self._ended.popitem(last=False)

    async def serve(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        content: bytes,
        keep_alive: Callable[[], Awaitable] | None = None,
    ) -> Served:
        """Answer a request, whichever way it came.

        Args:
            method, path, headers, content: Of the request. Names of headers in any case.
            keep_alive: Awaited every few seconds while a stream waits for its answer.
        """
        session, endpoint, asked = None, endpoint_of(path, headers), None
        try:
            name = split_path(path)[1]
            session = self._session_of(path, headers)
            if headers.get("Upgrade", "").lower() == "websocket":  # by which some begin, and go on by HTTP
                raise ApiError(426, "WebSockets are not served. Expected requests over HTTP.", "upgrade_required")
            if method == "GET" and name.partition("/")[0] == "models":
                _, _, model = name.partition("/")
                names = (POLICY, FROZEN) if session.env.other_models == "refused" else (POLICY, FROZEN, model)
                listed = (anthropic_models if endpoint is ANTHROPIC else models)(model, names)
                return Served(200, JSON, json.dumps(listed))
            if method != "POST" or name not in ENDPOINTS:
                raise ApiError(
                    404,
                    f"{method} /v1/{name:.100} is not served. Expected /v1/chat/completions, /v1/responses, "
                    "/v1/messages or /v1/models.",
                    "unknown_url",
                )
            body = read_body(content)
            known, fixed = session.with_known_model(body)
            read = await session.in_order(functools.partial(read_request, endpoint, known, session))
            read.fixed = fixed
            session.tell_effort(read, body)
            if endpoint is COUNT:
                if "X-Turn-Reward" in headers:
                    raise refuse("X-Turn-Reward", "a request that counts tokens goes on from no turn. Remove it.")
                return Served(200, JSON, json.dumps({"input_tokens": session.count_tokens(read)}))
            reward, rewarded = read_reward(headers.get("X-Turn-Reward")), headers.get("X-Turn-Answer")
            if reward is None and rewarded is not None:
                raise refuse("X-Turn-Answer", "got the answer that a reward is for without X-Turn-Reward.")
            is_retry = headers.get("x-stainless-retry-count", "0") != "0"
            asked = session.ask(read, body, is_retry, headers.get("Idempotency-Key"), reward, rewarded)
            while read.stream and keep_alive is not None:
                await asyncio.wait({asked.task}, timeout=KEEP_ALIVE_SECONDS)
                if asked.task.done():
                    break
                await keep_alive()
            answers = await session.answers(asked)
            if endpoint is RESPONSES:
                session.responses.add(answers[0], body, read.messages)
            receipt = functools.partial(tell_receipt, session, asked)
            if read.stream:
                return Served(200, "text/event-stream", "".join(endpoint.events(answers, body)), "", receipt)
            return Served(200, JSON, json_text(endpoint.write(answers, body)), "", receipt)
        except BaseException as error:
            if asked is not None:
                session.lost(asked)
            if not isinstance(error, ApiError):  # the client is gone
                raise
            if session is not None:
                session.refuse(error)
            elif error.status == 401:
                tell_once(f"A request of an agent was refused. {error}", "a key of no rollout")
            return Served(error.status, JSON, json_text(endpoint.refusal(error)), "".join(endpoint.error(error)))

    def _session(self, keys: tuple[str | None, ...]) -> AgentSession:
        """The rollout of a request. Raises `ApiError` for keys of none, or of one that is over.

        Programs send session ids of their own, too: only a key that is known counts.
        """
        for key in keys:
            if key in self._sessions:
                return self._sessions[key]
        if any(key in self._ended for key in keys):
            raise ApiError(429, "The rollout is over. Expected no further request.", "rollout_over")
        raise ApiError(
            401,
            "The key is of no rollout. Expected the one that the agent was given: as the API key, as the header "
            "X-Session-ID, or in the path.",
            "invalid_api_key",
        )

    def _session_of(self, path: str, headers: Mapping[str, str]) -> AgentSession:
        """The rollout of a request. Raises `ApiError`."""
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        return self._session((split_path(path)[0], token, headers.get("x-api-key"), headers.get("X-Session-ID")))

    def _tell_refused(self, request: web.Request, error: ApiError) -> None:
        """Keep for the log what could not even be received."""
        try:
            self._session_of(request.path, request.headers).refuse(error)
        except ApiError:  # of no rollout that goes on
            pass

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """A request over HTTP. Of a stream the status is sent with the first comment, or with the answer."""
        opened: web.StreamResponse | None = None

        async def keep_alive() -> None:
            nonlocal opened
            if opened is None:
                opened = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
                await opened.prepare(request)
            await opened.write(b": the policy is writing\n\n")

        refusal = endpoint_of(request.path, request.headers).refusal
        try:
            content = await request.read()
        except web.HTTPRequestEntityTooLarge:
            error = ApiError(413, f"The request has more than {MAX_BYTES} bytes.", "request_too_large")
            self._tell_refused(request, error)
            return web.json_response(refusal(error), status=error.status)
        except web.RequestPayloadError as error:
            encoding = request.headers.get("Content-Encoding", "none")
            refused = refuse(
                "body", f"cannot be read by its Content-Encoding, {encoding!r:.100}: {error_line(error)}."
            )
            self._tell_refused(request, refused)
            answer = web.json_response(refusal(refused), status=refused.status)
            answer.force_close()  # the client must not send its next request behind what cannot be read
            request.content.feed_eof()  # aiohttp would read on, fail once more, and cut the answer off
            return answer
        served = await self.serve(request.method, request.path, request.headers, content, keep_alive)
        text = served.text if opened is None or served.status == 200 else served.event
        served.receipt()
        try:
            if opened is None:
                opened = web.Response(status=served.status, text=text, headers=served.headers)
                await opened.prepare(request)
            else:
                await opened.write(text.encode())
            await opened.write_eof()
        except BaseException:  # the client is gone
            served.receipt(received=False)
            raise
        return opened


def address_of(port: int) -> str:
    """The base URL for clients of a port on the loopback address."""
    return f"http://127.0.0.1:{port}/v1"


def tell_receipt(session: AgentSession, asked: Asked, received: bool = True) -> None:
    """Tell the session that a client gets the answers, or that it has not got them after all."""
    if received:
        session.received(asked)
    else:
        session.lost(asked, received=True)


def split_path(path: str) -> tuple[str | None, str]:
    """(key or None, name of the endpoint) of a path.

    >>> split_path("/v1/chat/completions"), split_path("/mt-secret/v1/models/policy"), split_path("/health")
    ((None, 'chat/completions'), ('mt-secret', 'models/policy'), (None, ''))
    """
    found = re.fullmatch(r"(?:/([^/]+))?/v1/(.+?)/?", path)
    return (found[1], found[2]) if found else (None, "")


def endpoint_of(path: str, headers: Mapping[str, str]) -> Endpoint:
    """The endpoint of a request. Where there is none: one of the API that the request looks like, for its errors."""
    is_anthropic = "x-api-key" in headers or "anthropic-version" in headers
    return ENDPOINTS.get(split_path(path)[1], ANTHROPIC if is_anthropic else CHAT)


def models(name: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The list of models with these names, or one of them. Raises `ApiError` for an unknown one."""
    known = [{"id": each, "object": "model", "created": 0, "owned_by": "mt-grpo"} for each in names if each]
    if not name:
        return {"object": "list", "data": known}
    found = next((model for model in known if model["id"] == name), None)
    if found is None:
        raise ApiError(404, f"The model {name!r} does not exist.", "model_not_found", "model")
    return found


def read_body(content: bytes) -> dict[str, Any]:
    """The object that a request holds. Raises `ApiError`."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refuse("body", f"is no JSON: {error}.") from None
    if is_nested(body, DEEPEST):  # what reads it is recursive, at any depth of the stack
        raise refuse("body", f"is nested deeper than {DEEPEST} levels. Send a flatter one.")
    if not isinstance(body, dict):
        raise refuse("body", f"got {type(body).__name__}, expected an object.")
    return body


def read_request(endpoint: Endpoint, body: dict[str, Any], session: AgentSession) -> ModelRequest:
    """A request as it is sampled. Raises `ApiError`, also for what no check above expects."""
    try:
        return endpoint.read(body, session)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        raise ApiError(400, f"The request cannot be read: {error_line(error)}.") from error


def read_reward(text: str | None) -> float | None:
    """The number in a header. Raises `ApiError`."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_number(value):
        raise refuse("X-Turn-Reward", f"got {text!r:.100}, expected a finite number of at most 3.4e38.")
    return value


# Requests of clients in this process, answered without a socket: half the cost of HTTP to oneself.


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
