"""An agent as a program: a function that gets a client, or a command that gets an address; and its end."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import openai
import openai.resources.chat  # the clients import them at their first request, which takes a second
import openai.resources.responses

from mt_grpo.adapters.agent_session import AgentSession
from mt_grpo.replies import EnvironmentFailure, is_number
from mt_grpo.rollout import StopReason
from mt_grpo.tool_results import error_text
from mt_grpo.tool_threads import ToolsUnavailable, run_tool

OUTPUT_BYTES = 2**16  # of a command's output, the end is kept
SECONDS_TO_END = 2.0  # for a command, between SIGTERM and SIGKILL
LIBC = ctypes.CDLL(None)
# What tells a process that it is a rank of a training run. An agent that reads it would wait for the others.
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class AgentFailure(EnvironmentFailure):
    """An agent raised, hung, or returned what it may not: its rollout is not trained on."""

    def __init__(self, message: str, reason: StopReason = StopReason.AGENT_ERROR):
        super().__init__(message)
        self.reason = reason


class Rewarding:
    """What the clients of both kinds have beside OpenAI's methods."""

    session: AgentSession | None = None

    def reward(self, value: float) -> None:
        """Give the turn that was sampled last a reward. Several of one turn add up."""
        if not is_number(value):
            raise ValueError(f"client.reward: got {value!r}, expected a finite number.")
        self.session.reward(float(value))


class AgentClient(Rewarding, openai.OpenAI):
    """OpenAI's client, for one rollout."""


class AsyncAgentClient(Rewarding, openai.AsyncOpenAI):
    """OpenAI's asynchronous client, for one rollout."""


class FunctionAgent:
    """An agent `(row, client)`: an async function on the event loop, another one in a thread."""

    def __init__(self, function: Callable):
        self.function, self.name = function, function.__name__
        self._client: AgentClient | AsyncAgentClient | None = None  # the others share its connections

    def client(self, address: str, session: AgentSession) -> AgentClient | AsyncAgentClient:
        """A client with the key of a rollout."""
        if self._client is None:
            asynchronous = inspect.iscoroutinefunction(self.function)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            # trust_env: a proxy of the machine must not stand between a process and itself.
            http = (httpx.AsyncClient if asynchronous else httpx.Client)(limits=limits, trust_env=False, timeout=None)
            kind = AsyncAgentClient if asynchronous else AgentClient
            self._client = kind(base_url=address, api_key="none", http_client=http)
        client = self._client.with_options(api_key=session.key)
        client.session = session
        return client

    async def run(self, row: dict[str, Any], address: str, session: AgentSession, timeout: float) -> Any:
        """What the function returns. Raises `ToolTimeout`, and what the function raises."""
        client = self.client(address, session)
        if inspect.iscoroutinefunction(self.function):

            async def call() -> Any:
                return await self.function(row, client)
        else:

            def call() -> Any:
                return self.function(row, client)

        call.__name__ = self.name
        return await run_tool(call, {}, timeout)


class CommandAgent:
    """An agent that is a program: the row on its standard input, the result as its last line of output."""

    def __init__(self, command: str):
        self.arguments = shlex.split(command)
        self.name = "agent_command"

    async def run(self, row: dict[str, Any], address: str, session: AgentSession, timeout: float) -> Any:
        """The program's result. It is ended with all processes of its group when this is cancelled."""
        environment = {key: value for key, value in os.environ.items() if key not in OF_RANKS}
        process = await asyncio.create_subprocess_exec(
            *self.arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True, preexec_fn=end_with_parent,
            env={
                **environment, "OPENAI_BASE_URL": address, "OPENAI_API_KEY": session.key,
                "NO_PROXY": ",".join(filter(None, ("127.0.0.1", environment.get("NO_PROXY")))),
            },
        )  # fmt: skip
        try:
            sending = asyncio.ensure_future(send(process.stdin, json.dumps(row, default=str).encode()))
            output, errors, _ = await asyncio.gather(read_end(process.stdout), read_end(process.stderr), sending)
            code = await process.wait()
        finally:
            await end_group(process)
        if code:
            said = errors.decode(errors="replace").strip()[-500:]
            raise RuntimeError(f"the command ended with code {code}: {said or 'it said nothing'}")
        lines = output.decode(errors="replace").strip().splitlines()
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            raise RuntimeError(f"the last line of the command is {lines[-1]!r:.200}, expected JSON") from None


def end_with_parent() -> None:
    """In the child: end with the trainer, be it killed."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


async def send(pipe: asyncio.StreamWriter, content: bytes) -> None:
    """Write all, to a program that may not read it."""
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(content)
        await pipe.drain()
    pipe.close()


async def read_end(pipe: asyncio.StreamReader) -> bytes:
    """The last bytes of a stream that may be long."""
    kept = b""
    while part := await pipe.read(OUTPUT_BYTES):
        kept = (kept + part)[-OUTPUT_BYTES:]
    return kept


async def end_group(process: asyncio.subprocess.Process) -> None:
    """End all processes of a command's group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), SECONDS_TO_END)
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def read_result(result: Any) -> tuple[float | None, dict[str, Any]]:
    """(reward or None, all that the agent returned). Raises `AgentFailure` for what is no result."""
    values = result if isinstance(result, dict) else {"reward": result}
    reward = values.get("reward")
    if reward is not None and not is_number(reward):
        raise AgentFailure(f"the agent returned {result!r:.200}, expected a number, a dict with `reward`, or None.")
    return None if reward is None else float(reward), values


async def run_program(
    agent: FunctionAgent | CommandAgent, row: dict[str, Any], address: str, session: AgentSession, timeout: float,
    grace: float,
) -> Any:  # fmt: skip
    """What an agent returns, None where its budget was spent and it did not return by itself.

    Args:
        agent: The program.
        row: Of the dataset.
        address: Of the server.
        session: The rollout.
        timeout: Seconds that the agent may take.
        grace: Seconds between the first refusal of a request, because the budget is spent, and the agent's end.

    Raises:
        AgentFailure: it raised, or took too long.
        Exception: what the trainer must hear of.
    """
    running = asyncio.ensure_future(agent.run(row, address, session, timeout + grace))
    over = asyncio.ensure_future(session.over.wait())
    try:
        await asyncio.wait({running, over}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and not over.done():
            session.stop(StopReason.AGENT_TIMEOUT)
            raise AgentFailure(f"{agent.name} took longer than agent_timeout={timeout:g} s.", StopReason.AGENT_TIMEOUT)
        if over.done() and session.failure is None:
            await asyncio.wait({running}, timeout=grace)
        if session.failure is not None:
            raise session.failure
        if not running.done():
            return None
        try:
            return running.result()
        except ToolsUnavailable:
            raise
        except Exception as error:
            if session.stop_reason is not None:  # it was told that its budget is spent
                return None
            raise AgentFailure(f"{agent.name} raised {type(error).__name__}: {error_text(error)}") from error
    finally:
        over.cancel()
        running.cancel()
        await asyncio.gather(running, over, return_exceptions=True)
