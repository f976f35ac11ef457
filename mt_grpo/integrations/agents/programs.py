"""An agent as a function that gets a client, or as a command, and the end of an agent of either kind."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import openai.resources.chat  # the clients import them at their first request, which takes a second
import openai.resources.responses

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import run_on_thread
from mt_grpo.conversation.environments import EnvironmentFailure, is_number
from mt_grpo.conversation.tools.running import ToolsUnavailable, run_tool
from mt_grpo.images.messages import uri_or_str
from mt_grpo.integrations.agents.messages import ApiError
from mt_grpo.integrations.agents.server import AgentServer
from mt_grpo.integrations.agents.session import AgentSession
from mt_grpo.integrations.session import end_all
from mt_grpo.rollout import StopReason

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 2**20  # of a command's output, the end is kept
SECONDS_TO_END = 2.0  # between SIGTERM and SIGKILL of a command, and for an async function that is cancelled
AGENT_THREAD = "mt-grpo-agents"  # the loop of async agents: one that blocks must not stop the server that it waits for
# What tells a process that it is a rank of a training run. An agent that reads it would wait for the others.
OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
# By which Anthropic's clients send credentials and headers of the user's, or ask elsewhere. Names of models stay.
OF_ANTHROPIC = ("ANTHROPIC_", "CLAUDE_CODE_OAUTH_", "CLAUDE_CODE_USE_")
LAUNCHER = Path(__file__).with_name("launcher.py")
# A namespace of processes with a /proc of its own, in a namespace of users if this is not root. `sh` is its first
# process: that one gets no signal that it does not handle, and the command should get SIGTERM.
OWN_PROCESSES = ["--pid", "--fork", "--kill-child", "--mount-proc"]
FIRST = ["sh", "-c", '"$@"; exit $?', "sh"]


class AgentFailure(EnvironmentFailure):
    """An agent raised, hung before the policy answered, or returned an invalid value. It is not trained on."""

    reason = StopReason.AGENT_ERROR


@functools.cache
def apart() -> tuple[str, ...]:
    """The prefix of a command that hides the processes of others. Empty, with a warning, if it is not available.

    INVARIANT: a rollout's key is in the environment of its command, where every client looks for it. No other
    rollout's command may read that: who has a key can write a turn of its rollout.
    """
    users = [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
    command = ("unshare", *users, *OWN_PROCESSES, *FIRST)
    try:
        found = subprocess.run([*command, "true"], capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
        problem = found.stderr.decode(errors="replace").strip() or f"exit code {found.returncode}"
        if found.returncode == 0:
            return command
    except (OSError, subprocess.SubprocessError) as error:
        problem = error_line(error)
    logger.warning(
        f"agent_command: the commands of this run are not isolated from each other ({problem}). Each could read the "
        "key of another one in /proc, and write a turn of its rollout. In a container, allow PID namespaces."
    )
    return ()


class CommandAgent:
    """An agent that is a program: it reads the row from standard input, and writes the result as its last line.

    Each one sees only its own processes, if the machine allows it (`apart`).
    """

    def __init__(self, command: str):
        self.arguments, self.name = [*apart(), *shlex.split(command)], "agent_command"

    async def run(self, row: dict[str, Any], server: AgentServer, session: AgentSession) -> Any:
        """Run the program and return its result. If cancelled, all processes of its group are terminated."""
        watched, held = os.pipe()  # closed with this process
        command = [sys.executable, "-I", "-S", str(LAUNCHER), str(watched), *self.arguments]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        more = {"pass_fds": [watched], "start_new_session": True, "env": environment_of(server.address, session.key)}
        starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **pipes, **more))
        starting.add_done_callback(lambda _: os.close(watched))
        try:
            # Shielded: asyncio kills a process whose start is cancelled, here the launcher, and so leaves the command.
            process = await asyncio.shield(starting)
        except BaseException:
            release(held)
            raise
        sending = asyncio.ensure_future(send(process.stdin, json.dumps(row, default=uri_or_str).encode()))
        reading = [asyncio.ensure_future(read_end(each)) for each in (process.stdout, process.stderr)]
        try:
            code = await process.wait()
        finally:
            try:
                with suppress(TimeoutError, ProcessLookupError):
                    if process.returncode is None:
                        process.terminate()
                        await asyncio.wait_for(process.wait(), SECONDS_TO_END)
            finally:  # even if this is cancelled meanwhile
                release(held)
                sending.cancel()
        output, errors = await asyncio.gather(*reading)
        if code:
            said = errors.decode(errors="replace").strip()[-500:]
            raise RuntimeError(f"the command ended with code {code}: {said or 'it said nothing'}")
        last = output.decode(errors="replace").strip().rpartition("\n")[2]
        try:
            return json.loads(last) if last else None
        except ValueError:
            raise RuntimeError(f"the last line of the command is {last!r:.200}, expected JSON") from None


def release(pipe: int) -> None:
    """Let the launcher kill the command. A byte says it even if a forked process holds a copy of the pipe."""
    with suppress(BrokenPipeError):  # the launcher has ended
        os.write(pipe, b".")
    os.close(pipe)


def environment_of(address: str, key: str) -> dict[str, str]:
    """The environment variables of a command, with those in which clients look for an address and a key."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OF_RANKS) and (name.endswith("_MODEL") or not name.startswith(OF_ANTHROPIC))
    }
    kept |= {"OPENAI_BASE_URL": address, "ANTHROPIC_BASE_URL": address.removesuffix("/v1")}
    return kept | {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}


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


class Rewarding:
    """Mixin of the synchronous and async clients: methods in addition to OpenAI's."""

    session: AgentSession | None = None

    def reward(self, value: float, answer: Any = None, choice: int | None = None) -> None:
        """Give a turn a reward. Several of one turn add up.

        Args:
            answer: The answer that it is for: what the client's method returned, a chunk of its stream, or its id.
                None: the last one of the model `policy`.
            choice: Which of a request's `n` answers.

        Raises:
            ValueError: it is no finite number; there is no such answer; or, without `answer`, several were open at the
                same time, so that the reward may belong to each of them.
        """
        if not is_number(value):
            raise ValueError(f"client.reward: got {value!r}, expected a finite number.")
        if answer is not None and not isinstance(answer, str):
            answer = answer["id"] if isinstance(answer, dict) else answer.id
        try:
            self.session.reward(float(value), answer if choice is None else f"{answer}:{choice}")
        except ApiError as error:
            raise ValueError(f"client.reward: {error}") from None

    def copy(self, **options: Any) -> Any:
        """Copy the client as OpenAI's does, for the same rollout."""
        made = super().copy(**options)
        made.session = self.session
        return made

    with_options = copy


class AgentClient(Rewarding, openai.OpenAI):
    """OpenAI's client for one rollout, whose model `policy` is the one in training."""


class AsyncAgentClient(Rewarding, openai.AsyncOpenAI):
    """OpenAI's asynchronous client, for one rollout."""


class FunctionAgent:
    """An agent `(row, client)`: an async function on a loop for agents, another one in a thread."""

    def __init__(self, function: Callable):
        self.function, self.name = function, function.__name__
        self._client: AgentClient | AsyncAgentClient | None = None  # the others are copies of it

    def client(self, server: AgentServer, session: AgentSession) -> AgentClient | AsyncAgentClient:
        """A client with the key of a rollout. A new one of OpenAI's costs 27 ms, a copy 0.3 ms."""
        asynchronous = inspect.iscoroutinefunction(self.function)
        http = openai.DefaultAsyncHttpxClient if asynchronous else openai.DefaultHttpxClient
        # No proxy of the machine stands between, and no certificates are loaded for an address without TLS.
        own = {"api_key": session.key, "base_url": server.address, "http_client": http(trust_env=False, verify=False)}
        if self._client is None:
            self._client = (AsyncAgentClient if asynchronous else AgentClient)(**own)
        client = self._client.with_options(**own)
        client.session = session
        return client

    async def run(self, row: dict[str, Any], server: AgentServer, session: AgentSession) -> Any:
        """Call the agent function and return its result. Raises its errors."""
        client = self.client(server, session)
        if inspect.iscoroutinefunction(self.function):
            return await self._run_on_agents_loop(row, client)

        def call() -> Any:
            with client:
                return self.function(row, client)

        call.__name__ = self.name
        return await run_tool(call, {}, float("inf"))

    async def _run_on_agents_loop(self, row: dict[str, Any], client: AsyncAgentClient) -> Any:
        """The result of an async function. If this is cancelled the function is, too, and has a moment to end."""
        here, ended, tasks = asyncio.get_running_loop(), asyncio.Event(), []

        async def call() -> Any:
            tasks.append(asyncio.current_task())
            try:
                async with client:
                    return await self.function(row, client)
            except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # would end more than the agent
                if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                    raise
                raise RuntimeError(error_line(error)) from error
            finally:
                here.call_soon_threadsafe(ended.set)

        try:
            return await run_on_thread(call(), AGENT_THREAD)
        except asyncio.CancelledError:
            for task in [None, *tasks]:  # one that catches its cancellation is cancelled once more
                if task is not None and not ended.is_set():
                    task.get_loop().call_soon_threadsafe(task.cancel)
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), SECONDS_TO_END)
            if tasks and not ended.is_set():
                logger.warning(f"The agent {self.name} goes on after it was cancelled twice. It should end.")
            raise


def told_refusals(session: AgentSession) -> str:
    """The last rejected request of a session, to append to an error message. Empty without one."""
    return f"; its last refused request: {session.refused[-1]}" if session.refused else ""


def read_result(result: Any) -> tuple[float | None, dict[str, Any]]:
    """Read an agent's return value: (reward or None, all values). Raises `AgentFailure` if it is invalid."""
    values = result if isinstance(result, dict) else {"reward": result}
    reward = values.get("reward")
    if reward is not None and not is_number(reward):
        raise AgentFailure(f"the agent returned {result!r:.200}, expected a number, a dict with `reward`, or None.")
    return None if reward is None else float(reward), values


async def run_program(
    agent: FunctionAgent | CommandAgent,
    row: dict[str, Any],
    server: AgentServer,
    session: AgentSession,
    timeout: float,
    grace: float,
) -> Any:
    """Run an agent and return its result, None if its budget or its time was used up and it did not return by itself.

    INVARIANT: once the policy has answered, no answer of it, however long, makes the agent fail: it would escape its
    loss so.

    Args:
        timeout: Seconds that the agent may take, without those in which it waits for the policy.
        grace: Seconds, counted in the same way, that it may take after its budget is used up.

    Raises:
        AgentFailure: The agent raised, or took too long before the policy answered.
        Exception: An error that ends the run.
    """
    running = asyncio.ensure_future(agent.run(row, server, session))
    try:
        await own_time(running, session, timeout)
        if not running.done() and not session.over.is_set():
            if not session.policy_answered:
                raise AgentFailure(f"{agent.name} took longer than agent_timeout={timeout:g} s, without an answer.")
            session.stop(StopReason.AGENT_TIMEOUT)
            return None
        if not running.done() and session.failure is None:
            await own_time(running, session, grace, until_over=False)
        if session.failure is not None:
            raise session.failure
        if not running.done():
            return None
        try:
            return running.result()
        except ToolsUnavailable:
            raise
        except Exception as error:
            if session.stop_reason is None and (limit := session.limit_met):
                session.stop(limit)
            if session.stop_reason is not None:  # what it asked was rejected or cut, since its budget is used up
                return None
            raise AgentFailure(f"{agent.name} raised {error_line(error)}{told_refusals(session)}") from error
    finally:
        session.closed = True
        await end_all([running])


async def own_time(running: asyncio.Future, session: AgentSession, seconds: float, until_over: bool = True) -> None:
    """Wait for an agent, at most so many seconds in which it does not wait for the policy.

    With `until_over` also return when the rollout is over. The policy's time is not the agent's: if this process
    generates, all conversations wait for the slowest agent.
    """
    over = asyncio.ensure_future(session.over.wait())
    began, before = time.monotonic(), session.policy_seconds
    try:
        while not running.done() and not (until_over and over.done()):
            left = seconds - (time.monotonic() - began) + session.policy_seconds - before
            if left <= 0:
                return
            waited_for = {running, over} if until_over else {running}
            await asyncio.wait(waited_for, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        over.cancel()
