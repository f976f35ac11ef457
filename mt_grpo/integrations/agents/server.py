"""The HTTP server that agents talk to: OpenAI's and Anthropic's API on the loopback address, one per event loop."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from aiohttp import web

from mt_grpo.base.errors import error_line, tell_once
from mt_grpo.base.event_loop import allow_many_open_files
from mt_grpo.base.rows import is_nested, json_text
from mt_grpo.conversation.environments import is_number
from mt_grpo.integrations.agents import anthropic_api, chat_api, responses_api
from mt_grpo.integrations.agents.messages import DEEPEST, FROZEN, POLICY, ApiError, ModelRequest, check_fields, refuse
from mt_grpo.integrations.agents.session import AgentSession

MAX_BYTES = 256 * 2**20  # of one request, which has all images of a conversation again
KEEP_ALIVE_SECONDS = 5.0  # between the comments of a stream that waits for its answer
MODEL = {"object": "model", "type": "model", "created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "mt-grpo"}
COUNT = "messages/count_tokens"
ENDPOINTS = {  # the name of an endpoint -> the module of its API
    "chat/completions": chat_api, "responses": responses_api, "messages": anthropic_api, COUNT: anthropic_api,
}  # fmt: skip


class AgentServer:
    """Answers the requests of all rollouts of this process.

    A rollout is known by its key: as the API key, in the header `X-Session-ID`, or as the first part of the path.

    Attributes:
        port: On 127.0.0.1, once `start` is done.
    """

    def __init__(self):
        self.port = 0
        self._sessions: dict[str, AgentSession] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of the loopback address."""
        allow_many_open_files()
        for name in ("NO_PROXY", "no_proxy"):  # a proxy of the machine must not stand between agents and this server
            if "127.0.0.1" not in (hosts := os.environ.get(name, "")):
                os.environ[name] = ",".join(filter(None, ("127.0.0.1", hosts)))
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A request is cancelled with its client, so that an answer which nobody reads is known as such.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    @property
    def address(self) -> str:
        """The base URL of the server for clients."""
        return f"http://127.0.0.1:{self.port}/v1"

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

    def _session_of(self, path: str, headers: Mapping[str, str]) -> AgentSession:
        """The rollout of a request. Raises `ApiError` without the key of one that is running.

        Programs send session ids of their own, too: only a key that is known counts.
        """
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        for key in (split_path(path)[0], token, headers.get("x-api-key"), headers.get("X-Session-ID")):
            if key in self._sessions:
                return self._sessions[key]
        message = (
            "The key is of no rollout that is running. Expected the key that the agent was given: as the API key, as "
            "the header X-Session-ID, or in the path."
        )
        raise ApiError(401, message, "invalid_api_key")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, with the error of its API if it is invalid. A stream's status goes with its first part."""
        api, session = api_of(request.path, request.headers), None
        opened = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            session = self._session_of(request.path, request.headers)
            return await self._answer(request, api, session, opened)
        except ApiError as error:
            if session is not None:
                session.refuse(error)
            elif error.status == 401:
                tell_once(f"A request of an agent was refused. {error}", "a key of no rollout")
            if opened.prepared:
                await opened.write("".join(api.error(error)).encode())
                await opened.write_eof()
                return opened
            # The official clients send 429 and 5xx again unless they are told not to.
            headers = {"x-should-retry": "false"} | ({"Upgrade": "HTTP/1.1"} if error.status == 426 else {})
            body = anthropic_api.refusal(error) if api is anthropic_api else error.body
            return json_response(body, status=error.status, headers=headers)

    async def _answer(
        self, request: web.Request, api: ModuleType, session: AgentSession, opened: web.StreamResponse
    ) -> web.StreamResponse:
        """The answer to a request of a rollout. Raises `ApiError`."""
        name, headers = split_path(request.path)[1], request.headers
        if headers.get("Upgrade", "").lower() == "websocket":  # Codex begins with one, and goes on over HTTP
            raise ApiError(426, "WebSockets are not served. Expected requests over HTTP.", "upgrade_required")
        if request.method == "GET" and name.partition("/")[0] == "models":
            return json_response(models(name.partition("/")[2], session))
        if request.method != "POST" or name not in ENDPOINTS:
            expected = ", ".join(f"/v1/{each}" for each in (*ENDPOINTS, "models"))
            message = f"{request.method} /v1/{name:.100} is not served. Expected one of {expected}."
            raise ApiError(404, message, "unknown_url")
        body = read_body(await request.read())
        read = await session.in_order(functools.partial(read_request, api, body, session))
        reward, rewarded = read_reward(headers.get("X-Turn-Reward")), headers.get("X-Turn-Answer")
        if (rewarded is not None and reward is None) or (reward is not None and name == COUNT):
            raise refuse("X-Turn-Reward", "a reward has a number, and goes with a request that is sampled.")
        if name == COUNT:
            return json_response({"input_tokens": session.count_tokens(read)})
        is_retry = headers.get("x-stainless-retry-count", "0") != "0"
        asked = session.ask(read, body, is_retry, reward, rewarded)
        try:
            while body.get("stream"):
                await asyncio.wait({asked.task}, timeout=KEEP_ALIVE_SECONDS)
                if asked.task.done():
                    break
                if not opened.prepared:
                    await opened.prepare(request)
                await opened.write(b": the policy is writing\n\n")
            answers = await session.answers(asked)
        except BaseException:  # it is refused, or the client has left
            session.lost(asked)
            raise
        if api is responses_api:
            session.responses.add(answers[0], body, read.messages)
        session.received(asked)
        try:
            if body.get("stream"):
                if not opened.prepared:
                    await opened.prepare(request)
                await opened.write("".join(api.events(answers, body)).encode())
            else:
                opened = json_response(api.write(answers, body))
                await opened.prepare(request)
            await opened.write_eof()
        except BaseException:  # the client has left
            session.lost(asked, received=True)
            raise
        return opened


def json_response(value: Any, **options: Any) -> web.Response:
    """A response with a JSON value, in which NaN is null."""
    return web.json_response(text=json_text(value), **options)


def split_path(path: str) -> tuple[str | None, str]:
    """(key or None, name of the endpoint) of a path.

    >>> split_path("/v1/chat/completions"), split_path("/mt-secret/v1/models/policy"), split_path("/health")
    ((None, 'chat/completions'), ('mt-secret', 'models/policy'), (None, ''))
    """
    found = re.fullmatch(r"(?:/([^/]+))?/v1/(.+?)/?", path)
    return (found[1], found[2]) if found else (None, "")


def api_of(path: str, headers: Mapping[str, str]) -> ModuleType:
    """The API of a request; for an unknown path the one that the request looks like, for its errors."""
    is_anthropic = "x-api-key" in headers or "anthropic-version" in headers
    return ENDPOINTS.get(split_path(path)[1], anthropic_api if is_anthropic else chat_api)


def models(name: str, session: AgentSession) -> dict[str, Any]:
    """The list of models, or one of them, with the fields of both APIs. Raises `ApiError` for an unknown one."""
    if name:
        session.trains(name)
        return {"id": name, "display_name": name, **MODEL}
    listed = [models(each, session) for each in (POLICY, FROZEN)]
    return {"object": "list", "data": listed, "has_more": False, "first_id": POLICY, "last_id": FROZEN}


def read_body(content: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises `ApiError`."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refuse("body", f"is no JSON: {error}.") from None
    if is_nested(body, DEEPEST):  # what reads it is recursive, at any depth of the stack
        raise refuse("body", f"is nested deeper than {DEEPEST} levels. Send a flatter one.")
    if not isinstance(body, dict):
        raise refuse("body", f"got {type(body).__name__}, expected an object.")
    return body


def read_request(api: ModuleType, body: dict[str, Any], session: AgentSession) -> ModelRequest:
    """A request as it is sampled. Raises `ApiError`, also for an error that no check expects."""
    try:
        trained = session.trains(body.get("model"))
        check_fields(body, session.format.chat_template_kwargs)
        request = api.read(body, session)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        raise ApiError(400, f"The request cannot be read: {error_line(error)}.") from error
    request.trained = trained
    return request


def read_reward(text: str | None) -> float | None:
    """The number in the header X-Turn-Reward. Raises `ApiError`."""
    with suppress(ValueError):
        if text is None or is_number(float(text)):
            return text and float(text)
    raise refuse("X-Turn-Reward", f"got {text!r:.100}, expected a finite number of at most 3.4e38.")
