"""An agent as a function that gets a client, and the end of an agent of either kind."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import openai
import openai.resources.chat  # the clients import them at their first request, which takes a second
import openai.resources.responses

from mt_grpo.adapters.agent_commands import CommandAgent
from mt_grpo.adapters.agent_server import AgentServer
from mt_grpo.adapters.agent_session import AgentSession
from mt_grpo.adapters.agent_transport import AgentTransport
from mt_grpo.adapters.chat_messages import ApiError
from mt_grpo.event_loop import background_loop
from mt_grpo.replies import EnvironmentFailure, is_number
from mt_grpo.rollout import StopReason
from mt_grpo.tool_results import error_text
from mt_grpo.tool_threads import ToolsUnavailable, run_tool

logger = logging.getLogger(__name__)

SECONDS_TO_END = 2.0  # for an async function that is cancelled; twice
AGENT_THREAD = "mt-grpo-agents"  # the loop of async agents: one that blocks must not stop the server that it waits for


class AgentFailure(EnvironmentFailure):
    """An agent raised, hung, or returned what it may not: its rollout is not trained on."""

    def __init__(self, message: str, reason: StopReason = StopReason.AGENT_ERROR):
        super().__init__(message)
        self.reason = reason


class Rewarding:
    """What the clients of both kinds have beside OpenAI's methods."""

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
        """As OpenAI's, for the same rollout."""
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
    """OpenAI's client, for one rollout."""


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
        """What the function returns. Raises what the function raises."""
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
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
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
                logger.warning(f"The agent {self.name} does not end: it ignores that, or blocks the loop of agents.")
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()


def told_refusals(session: AgentSession) -> str:
    """What the API refused last, behind the text of an error."""
    return f"; its last refused request: {session.refused[-1]}" if session.refused else ""


def read_result(result: Any) -> tuple[float | None, dict[str, Any]]:
    """(reward or None, all that the agent returned). Raises `AgentFailure` for what is no result."""
    values = result if isinstance(result, dict) else {"reward": result}
    reward = values.get("reward")
    if reward is not None and not is_number(reward):
        raise AgentFailure(f"the agent returned {result!r:.200}, expected a number, a dict with `reward`, or None.")
    return None if reward is None else float(reward), values


async def run_program(
    agent: FunctionAgent | CommandAgent, row: dict[str, Any], server: AgentServer, session: AgentSession,
    timeout: float, grace: float,
) -> Any:  # fmt: skip
    """What an agent returns, None where its budget was spent and it did not return by itself.

    Args:
        agent: The program.
        row: Of the dataset.
        server: Which answers it.
        session: The rollout.
        timeout: Seconds that the agent may take, without those in which it waits for the policy.
        grace: Such seconds between the end of its budget and its own end.

    Raises:
        AgentFailure: it raised, or took too long.
        Exception: what the trainer must hear of.
    """
    running = asyncio.ensure_future(agent.run(row, server, session))
    try:
        await own_time(running, session, timeout)
        if not running.done() and not session.over.is_set():
            session.stop(StopReason.AGENT_TIMEOUT)
            raise AgentFailure(f"{agent.name} took longer than agent_timeout={timeout:g} s.", StopReason.AGENT_TIMEOUT)
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
            if session.stop_reason is None and session.context_is_full:
                session.stop(StopReason.CONTEXT_LENGTH)
            if session.stop_reason is not None:  # it was told that its budget is spent
                return None
            raised = f"{agent.name} raised {type(error).__name__}: {error_text(error)}"
            raise AgentFailure(f"{raised}{told_refusals(session)}") from error
    finally:
        session.closed = True
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


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
