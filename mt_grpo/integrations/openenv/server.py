"""An OpenEnv server: what it says of itself over HTTP, and its sessions, each a WebSocket with a game of its own.

Everything here runs on one event loop of its own (`on_openenv_loop`): what a server sends may be megabytes of JSON.

    GET /health, /schema, /metadata
    /ws   {"type": "reset" | "step", "data": {...}}   {"type": "observation", "data": {observation, reward, done}}
          {"type": "state"}                           {"type": "state", "data": {...}}
          {"type": "close"}                           {"type": "error", "data": {message, code, ...}}
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import re
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import background_loop, run_on_thread
from mt_grpo.conversation.environments import is_number

logger = logging.getLogger(__name__)
LOOP = "mt-grpo-openenv"
MOST_BYTES = 64 * 2**20  # of a message
SECONDS_TO_CLOSE = 5.0  # then a session is dropped; a server frees its place once it has closed its environment


class OpenEnvFailure(RuntimeError):
    """A server is gone, answers nonsense, or begins no game: it ends a rollout, and the policy did nothing."""


class ErrorAnswer(OpenEnvFailure):
    """A server's environment raised, or the server could not make one. `code` is the server's word for it."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class NoRoom(OpenEnvFailure):
    """All sessions of a server are taken. `most` is how many it says it has, None where it does not say."""

    def __init__(self, message: str, most: int | None):
        super().__init__(message)
        self.most = most


class ActionRefused(ValueError):
    """An action does not fit the server's schema. The policy reads why."""


class StepRaised(RuntimeError):
    """A server's environment raised at an action. The policy reads why: what it did may be the cause."""


async def on_openenv_loop(coroutine: Coroutine) -> Any:
    """Run a coroutine on the loop of the sessions. Who stops waiting for it cancels it."""
    return await run_on_thread(coroutine, LOOP)


@dataclass(frozen=True)
class Described:
    """The description of a server.

    Attributes:
        name: The name of its environment.
        action, observation: The JSON schemas of actions and observations.
    """

    name: str
    action: dict[str, Any]
    observation: dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A server's answer to `reset` and `step`. `reward` is None without one."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class OpenEnvServer:
    """The client of one OpenEnv server.

    Args:
        url: The HTTP or WebSocket address, such as `http://127.0.0.1:8000`.
        headers: The headers of all requests.

    Raises:
        ValueError: The URL is not an address.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None):
        self.url = http_address(url)
        self.headers = headers or {}
        self.sessions: set[OpenEnvSession] = set()  # that are open
        self.places = 1  # that it had at the start
        self.opening = 0
        self._client: aiohttp.ClientSession | None = None
        servers_in_use.append(self)

    def client(self) -> aiohttp.ClientSession:
        """The HTTP client, made on the loop that uses it."""
        if self._client is None:
            limits = aiohttp.ClientTimeout(total=None)  # who asks has a time limit
            # A proxy of the environment is for addresses outside this machine.
            proxies = urlsplit(self.url).hostname not in ("localhost", "127.0.0.1", "::1")
            connector = aiohttp.TCPConnector(limit=0)
            self._client = aiohttp.ClientSession(
                headers=self.headers, timeout=limits, trust_env=proxies, connector=connector
            )
        return self._client

    async def get(self, path: str) -> tuple[int, Any]:
        """(HTTP status, the JSON that was answered, None where it is none). Raises `OpenEnvFailure`."""
        try:
            async with self.client().get(self.url + path) as response:
                body = bytearray()
                async for part in response.content.iter_chunked(2**16):
                    body += part[: MOST_BYTES - len(body)]
                    if len(body) == MOST_BYTES:
                        break
                with suppress(ValueError, RecursionError):
                    return response.status, json.loads(body)
                return response.status, None
        except (aiohttp.ClientError, OSError) as error:
            raise OpenEnvFailure(f"{self.url} does not answer ({error_line(error)})") from error

    async def describe(self) -> Described:
        """Ask for the server's description. Raises `OpenEnvFailure` unless it is OpenEnv 0.2 or later."""
        status, health = await self.get("/health")
        if status != 200 or not isinstance(health, dict) or "status" not in health:
            raise OpenEnvFailure(
                f"{self.url} is not an OpenEnv server: GET /health returned HTTP {status} and {brief(health)}, "
                'expected {"status": "healthy"}'
            )
        if health["status"] != "healthy":
            raise OpenEnvFailure(f"{self.url} reports the status {health['status']!r:.50}, expected healthy")
        status, schema = await self.get("/schema")
        if status == 404:
            raise OpenEnvFailure(
                f"{self.url} runs OpenEnv 0.1, with /health but no /schema, and one game for all. Expected 0.2 or "
                "later: run it with openenv-core>=0.2"
            )
        schema = schema if isinstance(schema, dict) else {}
        found = [schema.get(key) for key in ("action", "observation")]
        if status != 200 or not all(isinstance(each, dict) for each in found):
            raise OpenEnvFailure(
                f"{self.url} is not an OpenEnv server: GET /schema returned HTTP {status} and {brief(schema)}, "
                "expected the JSON schemas of action and observation"
            )
        _, about = await self.get("/metadata")
        name = about.get("name") if isinstance(about, dict) else None
        name = re.sub(r"\W+", "_", name).strip("_") if isinstance(name, str) else ""
        return Described(name or "OpenEnv", *found)

    async def open(self) -> OpenEnvSession:
        """A session. That all are taken is known at its first answer. Raises `OpenEnvFailure`."""
        self.opening += 1
        try:
            socket = await self.client().ws_connect(f"{self.url}/ws", max_msg_size=MOST_BYTES, heartbeat=None)
        except aiohttp.WSServerHandshakeError as error:
            raise OpenEnvFailure(
                f"{self.url} has no sessions: its WebSocket /ws returned HTTP {error.status}. Use openenv-core>=0.2"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise OpenEnvFailure(f"{self.url} does not answer ({error_line(error)})") from error
        finally:
            self.opening -= 1
        return OpenEnvSession(self, socket)

    async def close(self) -> None:
        """Close the client, and with it all sessions."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def share_taken(server: OpenEnvServer) -> float:
    """How full a server is, of its places at the start."""
    return (len(server.sessions) + server.opening) / server.places


class OpenEnvSession:
    """A game on a server. Requests are answered in their order, one at a time."""

    def __init__(self, server: OpenEnvServer, socket: aiohttp.ClientWebSocketResponse):
        self.server, self.socket = server, socket
        self._order = asyncio.Lock()
        server.sessions.add(self)

    async def reset(self, arguments: dict[str, Any]) -> Step:
        """Begin a new episode. Raises `OpenEnvFailure`."""
        return read_step(await self.ask("reset", arguments), self._where("reset"))

    async def step(self, action: dict[str, Any]) -> Step:
        """Send one action. Raises `ActionRefused` for an invalid one, `StepRaised`, otherwise `OpenEnvFailure`."""
        try:
            json.dumps(action, ensure_ascii=False).encode()
        except RecursionError:  # the policy wrote it, and it is no failure of the server's
            raise ActionRefused("it is nested too deeply") from None
        except UnicodeEncodeError:  # OpenEnv cannot answer it, and closes the session
            raise ActionRefused("it has half of a character: a lone surrogate") from None
        return read_step(await self.ask("step", action), self._where("step"))

    async def state(self) -> dict[str, Any]:
        """The state of the game. Raises `OpenEnvFailure`."""
        return await self.ask("state")

    async def ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """The `data` of the answer to a request.

        INVARIANT: who stops waiting does not stop the request. Else its answer would be taken for that of the next
        one. So a caller that has a time limit shields this.
        """
        async with self._order:
            try:
                await self.socket.send_str(
                    json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
                )
                said = await self.socket.receive()
            except (aiohttp.ClientError, OSError) as error:
                raise OpenEnvFailure(f"{self._where(kind)} was lost ({error_line(error)})") from error
        if said.type is not aiohttp.WSMsgType.TEXT:
            how = f"code {self.socket.close_code}" if said.type in CLOSED else said.type.name
            raise OpenEnvFailure(f"{self._where(kind)} was not answered: the session was closed ({how})")
        return read_answer(said.data, kind, self._where(kind))

    def _where(self, kind: str) -> str:
        return f"{kind} of {self.server.url}"

    async def close(self) -> None:
        """End the session, and wait until the server has freed its place. It never raises, and may be called again."""
        if self not in self.server.sessions:
            return
        self.server.sessions.remove(self)
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(SECONDS_TO_CLOSE):
                if not self.socket.closed and not self._order.locked():
                    await self.socket.send_str('{"type": "close"}')
                    while (await self.socket.receive()).type not in CLOSED:
                        pass
                await self.socket.close()


CLOSED = (
    aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR
)  # fmt: skip


def http_address(url: str) -> str:
    """An address without a path's end. Raises `ValueError`.

    >>> http_address("http://127.0.0.1:8000/"), http_address("wss://me-lake.hf.space/ws")
    ('http://127.0.0.1:8000', 'https://me-lake.hf.space')
    """
    parts = urlsplit(url)
    scheme = {"http": "http", "https": "https", "ws": "http", "wss": "https"}.get(parts.scheme)
    try:
        fits = scheme is not None and parts.hostname and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:  # a port that is no number
        fits = False
    if not fits:
        raise ValueError(f"{url!r} is not an address. Expected one such as http://127.0.0.1:8000.")
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/ws').rstrip('/')}"


def brief(value: Any) -> str:
    """The beginning of an answer, for an error."""
    return "no JSON" if value is None else json.dumps(value)[:100]


ANSWERS = {"reset": "observation", "step": "observation", "state": "state"}


def read_answer(text: str, kind: str, where: str) -> dict[str, Any]:
    """The data of an answer to a request. Raises as `OpenEnvSession.step`."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict) or answer.get("type") not in (ANSWERS[kind], "error"):
        raise OpenEnvFailure(f"{where} was answered with {text[:100]!r}, expected a message {ANSWERS[kind]!r}")
    if answer["type"] != "error":
        return data
    code, message = data.get("code"), str(data.get("message"))
    if code == "CAPACITY_REACHED":
        most = data.get("max_sessions")
        raise NoRoom(f"{where}: {message[:300]}", most if type(most) is int else None)
    if code == "VALIDATION_ERROR" and kind == "step":
        raise ActionRefused(why_refused(data, message))
    if code == "EXECUTION_ERROR" and kind == "step":
        raise StepRaised(message[:500])
    raise ErrorAnswer(f"{where} failed on the server ({code}): {message[:500]}", str(code))


def why_refused(data: dict[str, Any], message: str) -> str:
    """What does not fit in an action, as pydantic says it on the server.

    >>> why_refused({"errors": [{"loc": ["column"], "msg": "Field required"}]}, "Invalid message")
    'column: Field required'
    """
    errors = data.get("errors") if isinstance(data.get("errors"), list) else []
    found = [each for each in errors if isinstance(each, dict) and "msg" in each]
    lines = [
        f"{'.'.join(map(str, each['loc'])) if isinstance(each.get('loc'), list) else ''}: {each['msg']}"
        for each in found[:5]
    ]
    return "; ".join(line.removeprefix(": ")[:200] for line in lines) or message[:300]


def read_step(data: dict[str, Any], where: str) -> Step:
    """What a server answered to `reset` or `step`. Raises `OpenEnvFailure` for what is none.

    >>> read_step({"observation": {"text": "Won."}, "reward": True, "done": True}, "step")
    Step(observation={'text': 'Won.'}, reward=1.0, done=True)
    """
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    if not isinstance(observation, dict):
        raise OpenEnvFailure(f"{where} gave the observation {observation!r:.100}, expected an object")
    if reward is not None and not is_number(reward):
        raise OpenEnvFailure(f"{where} gave the reward {reward!r:.100}, expected a finite number or null")
    if not isinstance(done, bool):  # any text would be true
        raise OpenEnvFailure(f"{where} gave done={done!r:.100}, expected true or false")
    return Step(observation, None if reward is None else float(reward), done)


servers_in_use: list[OpenEnvServer] = []


@atexit.register
def close_connections() -> None:
    """Close all sessions when this process ends: a server frees their places. Their loop's thread is a daemon."""
    closing = [server.close() for server in servers_in_use if server._client is not None]
    servers_in_use.clear()
    for each in [asyncio.run_coroutine_threadsafe(one, background_loop(LOOP)) for one in closing]:
        with suppress(Exception):
            each.result(SECONDS_TO_CLOSE)
