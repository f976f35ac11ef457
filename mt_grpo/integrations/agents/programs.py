"""An agent as a function that gets a client, and the end of an agent of either kind."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import inspect
import json
import logging
import os
import shlex
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import openai.resources.chat  # the clients import them at their first request, which takes a second
import openai.resources.responses

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import background_loop
from mt_grpo.base.pictures import uri_or_str
from mt_grpo.conversation.environments import EnvironmentFailure, is_number
from mt_grpo.conversation.tools.threads import ToolsUnavailable, run_tool
from mt_grpo.integrations.agents.messages import ApiError
from mt_grpo.integrations.agents.server import AgentServer, AgentTransport
from mt_grpo.integrations.agents.session import AgentSession
from mt_grpo.integrations.session import end_all
from mt_grpo.rollout import StopReason

logger = logging.getLogger(__name__)


# An agent as a command: it gets a row and an address, and is ended with all its processes.


OUTPUT_BYTES = 2**20  # of a command's output, the end is kept
SECONDS_TO_END = 2.0  # between SIGTERM and SIGKILL
SECONDS_OF_OUTPUT = 3.0  # for what a command has written, where a daemon of its own holds its output open
# What tells a process that it is a rank of a training run. An agent that reads it would wait for the others.
OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
# By which Anthropic's clients send credentials and headers of the user's, or ask elsewhere. Names of models stay.
OF_ANTHROPIC = ("ANTHROPIC_", "CLAUDE_CODE_OAUTH_", "CLAUDE_CODE_USE_")
KEY_FILE = "OPENAI_API_KEY_FILE"  # the variable with the path of the pipe with a command's key
UNREAD = f"it did not read its key from the file ${KEY_FILE} (agent_key: pipe)"
LAUNCHER = Path(__file__).with_name("launcher.py")
# A namespace of processes with a /proc of its own, in a namespace of users where this is not root. `sh` is its first
# process: that one gets no signal that it does not handle, and the command should get SIGTERM.
OWN_PROCESSES = ["--pid", "--fork", "--kill-child", "--mount-proc"]
FIRST = ["sh", "-c", '"$@"; exit $?', "sh"]


@functools.cache
def apart() -> tuple[str, ...]:
    """The prefix of a command that hides the processes of others. Empty, with a warning, if it is not available.

    INVARIANT: a rollout's key is in the environment of its command, where every client looks for it, or in a pipe
    until it is read. So no other rollout's command may read that: who has a key can write a turn of its rollout.
    """
    users = [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
    command = ("unshare", *users, *OWN_PROCESSES, *FIRST)
    try:
        found = subprocess.run([*command, "true"], capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
        problem = found.stderr.decode(errors="replace").strip() or f"exit code {found.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        found, problem = None, error_line(error)
    if found is not None and found.returncode == 0:
        return command
    logger.warning(
        f"agent_command: the commands of this run are not isolated from each other ({problem}). Each could read the "
        "key of another one in /proc, and write a turn of its rollout. In a container, allow PID namespaces, or "
        "set agent_key: pipe and let the command read its key there."
    )
    return ()


class CommandAgent:
    """An agent that is a program: it reads the row from standard input, and writes the result as its last line.

    Each one sees only its own processes, if the machine allows it (`apart`).

    Args:
        command: The program and its arguments, as a shell command line.
        key_by_pipe: Whether the program gets its rollout's key through a pipe instead of its environment.
    """

    def __init__(self, command: str, key_by_pipe: bool = False):
        self.arguments = [*apart(), *shlex.split(command)]
        self.key_by_pipe, self.name = key_by_pipe, "agent_command"

    async def run(self, row: dict[str, Any], server: AgentServer, session: AgentSession) -> Any:
        """Run the program and return its result. If cancelled, all processes of its group are terminated."""
        if not self.key_by_pipe:
            return await self._run(row, environment_of(server.address, session.key))
        pipe = pipe_with(session.key)
        kept = os.dup(pipe)  # tells in the end whether the key was read; the command's own is closed by `_run`
        try:
            variables = environment_of(server.address, None) | {KEY_FILE: f"/dev/fd/{pipe}"}
            result = await self._run(row, variables, pipe)
        except RuntimeError as error:
            raise RuntimeError(f"{error}{'' if is_empty(kept) else f'; {UNREAD}'}") from None
        else:
            if not is_empty(kept):
                raise RuntimeError(f"the command ended, and {UNREAD}")
            return result
        finally:
            os.close(kept)

    async def _run(self, row: dict[str, Any], variables: dict[str, str], *for_command: int) -> Any:
        """The program's result.

        Args:
            row: Of the data set.
            variables: The command's environment.
            for_command: Open files that the command gets under the same numbers. They are closed here.
        """
        watched, held = os.pipe()  # closed with this process
        passed = [watched, *for_command]
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(LAUNCHER),
                ",".join(map(str, passed)),
                *self.arguments,
                pass_fds=passed,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                env=variables,
            )
        )
        starting.add_done_callback(lambda _: [os.close(each) for each in passed])
        try:
            # Shielded: asyncio kills a process whose start is cancelled, here the launcher, and so leaves the command.
            process = await asyncio.shield(starting)
        except BaseException:
            release(held)
            raise
        sending = asyncio.ensure_future(send(process.stdin, json.dumps(row, default=uri_or_str).encode()))
        reading = [asyncio.ensure_future(read_end(pipe)) for pipe in (process.stdout, process.stderr)]
        try:
            code = await exit_of(process)
        finally:
            try:
                with suppress(TimeoutError, ProcessLookupError):
                    if process.returncode is None:
                        process.terminate()
                        await asyncio.wait_for(process.wait(), SECONDS_TO_END)
            finally:  # even where this is cancelled meanwhile
                release(held)
                sending.cancel()
        # The launcher kills what the command has left behind. Should anything hold the output open all the same: what
        # was written until its end is there at once.
        await asyncio.wait(reading, timeout=SECONDS_OF_OUTPUT)
        for each in reading:
            each.cancel()
        output, errors = await asyncio.gather(*reading)
        if code:
            said = errors.decode(errors="replace").strip()[-500:]
            raise RuntimeError(f"the command ended with code {code}: {said or 'it said nothing'}")
        last = output.decode(errors="replace").strip().rpartition("\n")[2]
        if len(output) == OUTPUT_BYTES and last == output.decode(errors="replace").strip():
            raise RuntimeError(f"the last line of the command has more than {OUTPUT_BYTES} bytes")
        try:
            return json.loads(last) if last else None
        except ValueError:
            raise RuntimeError(f"the last line of the command is {last!r:.200}, expected JSON") from None


async def exit_of(process: asyncio.subprocess.Process) -> int:
    """The exit code of a process. Its `wait` waits for the end of its output, which a daemon may hold open."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait({waiting}, timeout=0.5)
    finally:
        waiting.cancel()
    return process.returncode


def release(pipe: int) -> None:
    """Let the launcher kill the command. A byte says it even where a forked process holds a copy of the pipe."""
    with suppress(BrokenPipeError):  # the launcher has ended
        os.write(pipe, b".")
    os.close(pipe)


def pipe_with(key: str) -> int:
    """The reading end of a pipe that holds a key as its only line, and its end behind it."""
    reading, writing = os.pipe()
    os.write(writing, f"{key}\n".encode())  # a pipe holds more than that before anybody reads it
    os.close(writing)
    return reading


def is_empty(pipe: int) -> bool:
    """Whether a pipe's contents were read completely."""
    return not int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def environment_of(address: str, key: str | None) -> dict[str, str]:
    """The environment variables of a command. Without a key there is none, not even one of this process's own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OF_RANKS) and (name.endswith("_MODEL") or not name.startswith(OF_ANTHROPIC))
    }
    for name in ("NO_PROXY", "no_proxy"):  # a proxy of the machine must not stand between them
        kept[name] = ",".join(filter(None, ("127.0.0.1", kept.get(name))))
    kept.pop("OPENAI_API_KEY", None)
    return {**kept, **variables_of_clients(address, key)}


def variables_of_clients(address: str, key: str | None) -> dict[str, str]:
    """The environment variables in which clients look for an address and a key."""
    addresses = {"OPENAI_BASE_URL": address, "ANTHROPIC_BASE_URL": address.removesuffix("/v1")}
    return addresses | ({} if key is None else dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key))


async def send(pipe: asyncio.StreamWriter, content: bytes) -> None:
    """Write all, to a program that may not read it."""
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(content)
        await pipe.drain()
    pipe.close()


async def read_end(pipe: asyncio.StreamReader) -> bytes:
    """The last bytes of a stream that may be long. Where it is cancelled, those until then."""
    kept = b""
    with suppress(asyncio.CancelledError):
        while part := await pipe.read(OUTPUT_BYTES):
            kept = (kept + part)[-OUTPUT_BYTES:]
    return kept


SECONDS_TO_END = 2.0  # for an async function that is cancelled; twice
AGENT_THREAD = "mt-grpo-agents"  # the loop of async agents: one that blocks must not stop the server that it waits for


class AgentFailure(EnvironmentFailure):
    """An agent raised, hung before the policy answered, or returned what it may not: its rollout is not trained on."""

    reason = StopReason.AGENT_ERROR


class Rewarding:
    """Mixin of the synchronous and async clients: methods in addition to OpenAI's."""

    session: AgentSession | None = None

    def reward(self, value: float, answer: Any = None, choice: int | None = None) -> None:
        """Give a turn a reward. Several of one turn add up.

        Args:
            value: The reward.
            answer: The answer that it is for: what the client's method returned, a chunk of its stream, or its id.
                None: the last one of the model `policy`.
            choice: Which of a request's `n` answers.

        Raises:
            ValueError: it is no finite number; there is no such answer; or, without `answer`, several were open at the
                same time, so that the reward may belong to each of them.
        """
        if not is_number(value):
            raise ValueError(f"client.reward: got {value!r}, expected a finite number.")
        name = answer if answer is None or isinstance(answer, str) else id_of(answer)
        if choice is not None and name is None:
            raise ValueError(f"client.reward: got choice={choice} without the answer that it is a choice of.")
        try:
            self.session.reward(float(value), name if choice is None else f"{name}:{choice}")
        except ApiError as error:
            raise ValueError(f"client.reward: {error}") from None

    def copy(self, **options: Any) -> Any:
        """Copy the client as OpenAI's does, for the same rollout."""
        made = super().copy(**options)
        made.session = self.session
        return made

    with_options = copy


def id_of(answer: Any) -> str:
    """The id of an answer. Raises `ValueError`."""
    found = answer.get("id") if isinstance(answer, dict) else getattr(answer, "id", None)
    if not isinstance(found, str):
        raise ValueError(f"client.reward: got answer={answer!r:.100}, expected a response of the client, or its id.")
    return found


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
        asynchronous, address = inspect.iscoroutinefunction(self.function), server.address
        transport = AgentTransport(server, asyncio.get_running_loop())
        http = (httpx.AsyncClient if asynchronous else httpx.Client)(transport=transport, trust_env=False)
        if self._client is None:
            kind = AsyncAgentClient if asynchronous else AgentClient
            self._client = kind(base_url=address, api_key="none", http_client=http)
        client = self._client.with_options(api_key=session.key, base_url=address, http_client=http)
        client.session = session
        return client

    async def run(self, row: dict[str, Any], server: AgentServer, session: AgentSession) -> Any:
        """Call the agent function and return its result. Raises its errors."""
        client = self.client(server, session)
        if inspect.iscoroutinefunction(self.function):
            return await self._run_on_agents_loop(row, client)

        def call() -> Any:
            try:
                return self.function(row, client)
            finally:
                client.close()

        call.__name__ = self.name
        return await run_tool(call, {}, float("inf"))

    async def _run_on_agents_loop(self, row: dict[str, Any], client: AsyncAgentClient) -> Any:
        """The result of an async function. Where this is cancelled the function is, too, and has a moment to end."""
        here, there, ended = asyncio.get_running_loop(), background_loop(AGENT_THREAD), asyncio.Event()
        task: asyncio.Task | None = None

        async def call() -> Any:
            try:
                return await self.function(row, client)
            except (SystemExit, KeyboardInterrupt) as error:  # would end the loop of all agents
                raise RuntimeError(error_line(error)) from error
            finally:
                await client.close()

        def begin() -> None:
            nonlocal task
            task = there.create_task(call())
            task.add_done_callback(lambda _: here.call_soon_threadsafe(ended.set))

        there.call_soon_threadsafe(begin)
        try:
            await ended.wait()
        finally:
            for _ in range(2):
                if not ended.is_set():
                    there.call_soon_threadsafe(lambda: task.cancel())
                    with suppress(TimeoutError):
                        await asyncio.wait_for(ended.wait(), SECONDS_TO_END)
            if not ended.is_set():
                logger.warning(f"The agent {self.name} ignores its cancellation, or blocks the event loop of agents.")
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()


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
        agent: The agent's program.
        row: The row of the dataset.
        server: The server that answers its requests.
        session: The session of the rollout.
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
            raised = f"{agent.name} raised {error_line(error)}"
            raise AgentFailure(f"{raised}{told_refusals(session)}") from error
    finally:
        session.closed = True
        await end_all([running])


async def own_time(running: asyncio.Future, session: AgentSession, seconds: float, until_over: bool = True) -> None:
    """Wait for an agent, at most so many seconds in which it does not wait for the policy.

    The policy's time is not the agent's: where this process generates, all conversations wait for the slowest agent.

    Args:
        running: The agent.
        session: Its rollout.
        seconds: How long.
        until_over: Whether to return when the rollout is over.
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
