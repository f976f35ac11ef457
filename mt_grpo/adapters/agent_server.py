"""The HTTP server that agents talk to: OpenAI's API on the loopback address, one per process."""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from aiohttp import web

from mt_grpo.adapters.agent_session import AgentSession
from mt_grpo.adapters.chat_api import chat_answer, chat_error, chat_events, read_chat_request
from mt_grpo.adapters.chat_messages import FROZEN, POLICY, Answer, ApiError, ModelRequest, refuse
from mt_grpo.adapters.responses_api import (
    conversation_of,
    read_responses_request,
    response_id,
    responses_answer,
    responses_error,
    responses_events,
)
from mt_grpo.event_loop import allow_many_open_files
from mt_grpo.replies import is_number

MAX_BYTES = 64 * 2**20  # of one request
KEEP_ALIVE_SECONDS = 5.0  # between the comments of a stream that waits for its answer


class Endpoint(NamedTuple):
    """How one of the two APIs reads requests and writes answers."""

    read: Callable[[dict, AgentSession], ModelRequest]
    write: Callable[[Answer, dict], dict]
    events: Callable[[Answer, dict], Iterator[str]]
    error: Callable[[ApiError], Iterator[str]]


CHAT = Endpoint(lambda body, session: read_chat_request(body), chat_answer, chat_events, chat_error)
RESPONSES = Endpoint(
    lambda body, session: read_responses_request(body, session.responses),
    responses_answer,
    responses_events,
    responses_error,
)


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
        for prefix in ("/v1", "/{key}/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._handler(CHAT))
            app.router.add_post(f"{prefix}/responses", self._handler(RESPONSES))
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(prefix + "/models/{name}", self._models)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

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

    def _session(self, request: web.Request) -> AgentSession:
        """The rollout of a request. Raises `ApiError` for keys of none, or of one that is over.

        Programs send session ids of their own, too: only a key that is known counts.
        """
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        keys = [request.match_info.get("key"), token, request.headers.get("X-Session-ID")]
        for key in keys:
            if key in self._sessions:
                return self._sessions[key]
        if any(key in self._ended for key in keys):
            raise ApiError(429, "The rollout is over. Expected no further request.", "rollout_over")
        raise ApiError(
            401, "The key is of no rollout. Expected the one that the agent was given: as the API key, as the header "
            "X-Session-ID, or in the path.", "invalid_api_key",
        )  # fmt: skip

    def _handler(self, endpoint: Endpoint) -> Callable:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = None
            try:
                session = self._session(request)
                body = await read_body(request)
                read = read_request(endpoint, body, session)
                reward = read_reward(request.headers.get("X-Turn-Reward"))
                is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
                answering = asyncio.ensure_future(self._answer(session, read, body, endpoint, is_retry, reward))
                if read.stream:
                    return await stream(request, answering, body, endpoint)
                return web.json_response(endpoint.write(await answering, body))
            except ApiError as error:
                if session is not None:
                    session.last_error = error
                return refusal(error)

        return handle

    async def _answer(
        self, session: AgentSession, read: ModelRequest, body: dict, endpoint: Endpoint, is_retry: bool,
        reward: float | None,
    ) -> Answer:  # fmt: skip
        answer = await session.answer(read, body, is_retry, reward)
        if endpoint is RESPONSES:
            said = [*conversation_of(body, session.responses), answer.message]
            session.responses[response_id(answer)] = said
        return answer

    async def _models(self, request: web.Request) -> web.Response:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "mt-grpo"} for name in (POLICY, FROZEN)]
        try:
            self._session(request)
            name = request.match_info.get("name")
            if name is None:
                return web.json_response({"object": "list", "data": models})
            found = next((model for model in models if model["id"] == name), None)
            if found is None:
                raise ApiError(404, f"The model {name!r} does not exist.", "model_not_found", "model")
            return web.json_response(found)
        except ApiError as error:
            return refusal(error)

    async def _unknown(self, request: web.Request) -> web.Response:
        return refusal(ApiError(404, f"{request.method} {request.path} is not served. Expected /v1/chat/completions, "
                                "/v1/responses or /v1/models.", "unknown_url"))  # fmt: skip


async def read_body(request: web.Request) -> dict[str, Any]:
    """The object that a request holds. Raises `ApiError`."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise refuse("body", f"is no JSON: {error}.") from None
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"The request has more than {MAX_BYTES} bytes.", "request_too_large") from None
    if not isinstance(body, dict):
        raise refuse("body", f"got {type(body).__name__}, expected an object.")
    return body


def read_request(endpoint: Endpoint, body: dict[str, Any], session: AgentSession) -> ModelRequest:
    """A request as it is sampled. Raises `ApiError`, also for what no check above expects."""
    try:
        return endpoint.read(body, session)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise ApiError(400, f"The request cannot be read: {type(error).__name__}: {error}.") from error


def read_reward(text: str | None) -> float | None:
    """The number in a header. Raises `ApiError`."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_number(value):
        raise refuse("X-Turn-Reward", f"got {text!r:.100}, expected a finite number.")
    return value


def refusal(error: ApiError) -> web.Response:
    """An error as HTTP. The official clients send 429 and 5xx again unless they are told not to."""
    return web.json_response(error.body, status=error.status, headers={"x-should-retry": "false"})


async def stream(
    request: web.Request, answering: asyncio.Future, body: dict, endpoint: Endpoint
) -> web.StreamResponse:
    """Comments that keep the connection alive, then the whole answer as events.

    An error before the first comment has a status of its own; one behind it is an event.
    """
    opened: web.StreamResponse | None = None
    while not answering.done():
        await asyncio.wait({answering}, timeout=KEEP_ALIVE_SECONDS)
        if not answering.done() and opened is None:
            opened = await open_stream(request)
        if not answering.done():
            await opened.write(b": the policy is writing\n\n")
    error = answering.exception()
    if error is not None and (opened is None or not isinstance(error, ApiError)):
        raise error
    opened = opened or await open_stream(request)
    events = endpoint.events(answering.result(), body) if error is None else endpoint.error(error)
    await opened.write("".join(events).encode())
    await opened.write_eof()
    return opened


async def open_stream(request: web.Request) -> web.StreamResponse:
    """The beginning of a stream of events."""
    opened = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await opened.prepare(request)
    return opened
