"""`environment: openenv`: a session of a server is the other side of one conversation.

A server that lists tools has them called by the model. The turns of another one are its actions. Each step's reward
is its turn's, and their sum is the outcome reward.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

from mt_grpo.integrations.acting import said
from mt_grpo.integrations.openenv.server import (
    ActionRefused,
    ErrorAnswer,
    NoRoom,
    OpenEnvFailure,
    OpenEnvServer,
    OpenEnvSession,
    Step,
    StepRaised,
    on_openenv_loop,
    share_taken,
)
from mt_grpo.integrations.openenv.text import CallFailed, OpenEnvText
from mt_grpo.rollout import Reply, Rollout, ToolResult, Turn

logger = logging.getLogger(__name__)
told_servers: set[str] = set()  # whose steps failed
SECONDS_BETWEEN_TRIES = 0.2  # to open a session on servers whose sessions are all taken


class OpenEnvEnvironment:
    """One episode in a session of its own, which ends with the conversation.

    INVARIANT: what ends an episode is the server's to say. The policy can leave it. `unfinished_reward` is what that
    costs, in the outcome and in the last turn, as a step's reward is counted.

    Attributes:
        state: What the server's `state` said at the end of the conversation, for reward functions; None before, and
            where the server answers none.
        step_rewards: One per step, None where the server gave no number.
        episode_done: Whether the server said so.
    """

    servers: tuple[OpenEnvServer, ...] = ()
    text: OpenEnvText
    reset_arguments: dict[str, Any] = {}
    unfinished_reward = 0.0
    most_turns: int | None = None  # of the conversation
    most_conversations: int | None = None
    seconds_for_a_session = 60.0  # in which a place must be free, that other runs may have taken
    keyword_columns = ("reset_kwargs",)

    def __init__(self):
        self.state: dict[str, Any] | None = None
        self.step_rewards: list[float | None] = []
        self._uncharged: Turn | None = None  # the last turn, where it has not paid `unfinished_reward`
        self.episode_done = False
        self._session: OpenEnvSession | None = None
        self._steps: list[Step] = []  # of the turn
        self._running: set[asyncio.Task] = set()  # steps that nobody waits for any more are among them
        self._failure: OpenEnvFailure | None = None
        self._order = asyncio.Lock()  # of the steps; of the sessions' loop

    @classmethod
    def check_row(cls, row: dict[str, Any]) -> None:
        """Raise `ValueError` for a row whose columns are no arguments of `reset`."""
        arguments_of_reset(cls.reset_arguments, row.get("seed"), row.get("episode_id"), row.get("reset_kwargs"))

    async def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        reset_kwargs: dict[str, Any] | None = None,
        **row: Any,
    ) -> str | list[Any]:
        """Open a session and begin. Rollouts of a row with `seed` begin alike, as far as the server keeps to it."""
        given = arguments_of_reset(self.reset_arguments, seed, episode_id, reset_kwargs)
        step = await on_openenv_loop(self._begin(given))
        if step.done:
            raise OpenEnvFailure(f"{self._session.server.url} says done at reset: there is no turn to take")
        return self._first(step.observation, "\n" if row.get("prompt") else "")

    def _first(self, observation: dict[str, Any], between: str) -> str | list[Any]:
        """What the model reads first of an observation; `between` stands behind a prompt of the row's."""
        shown = self.text.observation(observation)
        return between + shown if shown and isinstance(shown, str) else shown

    async def _begin(self, arguments: dict[str, Any]) -> Step:
        """Open a session where most of the places are free, then where there is room.

        Where all are taken, wait: other runs give theirs back.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.seconds_for_a_session
        to_ask: list[OpenEnvServer] = []
        while True:
            to_ask = to_ask or list(self.servers)
            server = min(to_ask, key=share_taken)
            to_ask.remove(server)
            self._session = await server.open()
            try:
                return await self._session.reset(arguments)
            except NoRoom as full:
                await self._end()
                if to_ask:
                    continue
                if loop.time() > deadline:
                    raise OpenEnvFailure(
                        f"{full}. It waited {self.seconds_for_a_session:g} s for one. Other runs may hold them: set "
                        "openenv_sessions to this run's share, or start the server with a larger max_concurrent_envs"
                    ) from full
                await asyncio.sleep(SECONDS_BETWEEN_TRIES)
            except BaseException:  # it failed, or nobody waits any more
                await asyncio.shield(self._end())
                raise

    async def _step(self, action: dict[str, Any]) -> Step:
        """One step, which goes on where its caller gives up: its reward and its end count.

        Raises as `OpenEnvSession.step`, and `CallFailed` where the policy is to read why: behind the end of the
        episode, as a turn may have several calls, and where the environment raised.
        """
        task = asyncio.create_task(self._take(action))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has seen it
        return await asyncio.shield(task)

    async def _take(self, action: dict[str, Any]) -> Step:
        async with self._order:
            if self._failure is not None:
                raise self._failure
            if self.episode_done:
                raise CallFailed("the episode is over: this call was not made")
            try:
                step = await self._session.step(action)
            except OpenEnvFailure as error:
                self._failure = error
                raise
            except StepRaised as error:  # a policy that has it raise would else be rid of its rollout
                warn_of_step(self._session.server.url, str(error))
                raise CallFailed(f"the environment failed at this action: {error}") from error
            self._steps.append(step)
            self.step_rewards.append(step.reward)
            self.episode_done |= step.done
            return step

    async def _settle(self) -> float | None:
        """The reward of the turn's steps, None where none has one. Waits for those that were given up.

        Raises the failure of any of them: what the model read as the error of a call may have been the server's end.
        """
        while self._running:
            await asyncio.wait(self._running)
        if self._failure is not None:
            raise self._failure
        rewards = [step.reward for step in self._steps if step.reward is not None]
        self._steps = []
        return sum(rewards) if rewards else None

    def _leaving(self, rollout: Rollout, turn: Turn, ends: bool = False) -> float:
        """What it costs that this turn is the last one, if it is, and the episode goes on."""
        last = ends or (self.most_turns is not None and len(rollout.turns) >= self.most_turns)
        self._uncharged = None if last else turn
        return self.unfinished_reward if last and not self.episode_done else 0.0

    async def get_reward(self) -> float:
        """The sum of the steps' rewards, and `unfinished_reward` where the conversation ended before the episode."""
        await on_openenv_loop(self._settle())
        try:
            self.state = await on_openenv_loop(self._session.state())
        except ErrorAnswer as error:
            warn_of_state(str(error))
        scored = sum(reward for reward in self.step_rewards if reward is not None)
        if self.episode_done:
            return scored
        if self._uncharged is not None and self.unfinished_reward:  # nothing more fitted behind this turn
            self._uncharged.reward = (self._uncharged.reward or 0.0) + self.unfinished_reward
            self._uncharged = None
        return scored + self.unfinished_reward

    async def conversation_over(self) -> None:
        """End the session: another conversation may wait for its place."""
        await on_openenv_loop(self._end())

    async def close(self) -> None:
        """End the session, unless it has ended."""
        await on_openenv_loop(self._end())

    async def _end(self) -> None:
        for task in self._running:
            task.cancel()
        if self._session is not None:
            await self._session.close()


class ActingEnvironment(OpenEnvEnvironment):
    """An environment whose actions are the texts of turns."""

    def __init__(self):
        super().__init__()
        self._shown: str | list[Any] = ""

    def _first(self, observation: dict[str, Any], between: str) -> str | list[Any]:
        """The rules before the observation."""
        self._shown = self.text.observation(observation)
        rules = between + self.text.rules()
        if isinstance(self._shown, str):
            return rules + self._shown if rules + self._shown != between else ""
        return [*([{"type": "text", "text": rules}] if rules else []), *self._shown]

    async def respond(self, rollout: Rollout, turn: Turn) -> Reply:
        """Take one step. Text without a valid action is answered with an error, and nothing moves.

        A turn that a token limit truncated is not a step: it gets no answer, and the conversation ends.
        """
        turn.calls, turn.results = [], []  # what looks like a call is text
        if turn.finish_reason == "length":
            return Reply(reward=self._leaving(rollout, turn, ends=True) or None, info={"action": None})
        try:
            action = self.text.action(said(turn))
            step = await on_openenv_loop(self._step(action))
        except ActionRefused as error:
            return self._no_action(rollout, turn, f"the action does not fit: {error}")
        except (ValueError, CallFailed) as error:
            return self._no_action(rollout, turn, str(error))
        reward = await on_openenv_loop(self._settle())
        self._shown = self.text.observation(step.observation)
        leaving = self._leaving(rollout, turn)
        return Reply(
            messages=[] if step.done else [{"role": "user", "content": self._shown or "{}"}],
            stop=step.done,
            reward=reward if not leaving else (reward or 0.0) + leaving,
            info={"action": action, "done": step.done, **({"observation": step.observation} if step.done else {})},
        )

    def _no_action(self, rollout: Rollout, turn: Turn, why: str) -> Reply:
        message = {"role": "user", "content": f"Error: {why}"}
        return Reply(messages=[message], reward=self._leaving(rollout, turn) or None, info={"action": None})

    async def state_key(self) -> str:
        """The text of the current observation, as the state for `gigpo`."""
        return str(self._shown)


class CallingEnvironment(OpenEnvEnvironment):
    """An environment whose actions are calls of the server's tools, each a method of the class (`as_method`)."""

    async def _call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """One call of the model's, with what it reads of it. What fails on the server is an error that it reads."""
        action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        step = await on_openenv_loop(self._step(action))
        return ToolResult(self.text.result(step.observation))

    async def respond(self, rollout: Rollout, turn: Turn) -> Reply:
        """The reward of the turn's calls. The conversation ends with a turn without calls, and with the episode."""
        reward = await on_openenv_loop(self._settle())
        leaving = self._leaving(rollout, turn, ends=not turn.calls)
        return Reply(
            stop=self.episode_done,
            reward=reward if not leaving else (reward or 0.0) + leaving,
            info={"done": self.episode_done},
        )


async def call_of(environment: CallingEnvironment, tool: str, arguments: dict[str, Any]) -> ToolResult:
    """A call of a tool of the environment's server, for `as_method`."""
    return await environment._call(tool, arguments)


def arguments_of_reset(
    defaults: dict[str, Any], seed: Any = None, episode_id: Any = None, given: Any = None
) -> dict[str, Any]:
    """The arguments of a reset: the row's columns before the recipe's. Raises `ValueError`.

    >>> arguments_of_reset({"level": 1, "seed": 5}, seed=3, given={"level": 2})
    {'level': 2, 'seed': 3}
    """
    if given is not None and (not isinstance(given, dict) or not all(isinstance(name, str) for name in given)):
        raise ValueError(f"reset_kwargs is {given!r:.100}, expected a mapping of arguments of the server's reset.")
    with_columns = {"seed": seed, "episode_id": episode_id}
    columns = {name: value for name, value in with_columns.items() if value is not None}
    if twice := columns.keys() & (given or {}).keys():
        raise ValueError(f"The row has {min(twice)!r} as a column and in reset_kwargs. Remove one.")
    arguments = {**defaults, **(given or {}), **columns}
    for name, kind, expected in (("seed", int, "a whole number of at least 0"), ("episode_id", str, "a text")):
        value = arguments.get(name)
        if value is not None and (type(value) is not kind or (kind is int and value < 0)):
            raise ValueError(
                f"{name} is {value!r:.100}, expected {expected}: it is an argument of the server's reset."
            )
    return arguments


@functools.cache
def warn_of_state(why: str) -> None:
    """Say once that a server answers no state."""
    logger.warning(f"{why}. So `state` is None for reward functions.")


def warn_of_step(url: str, why: str) -> None:
    """Say once of each server that its environment raised: it may be the server's fault at every action."""
    if url not in told_servers:
        told_servers.add(url)
        logger.warning(
            f"A step of {url} failed on the server: {why}. The model reads it as the error of its action, and the "
            "episode goes on. Look into the server's log if no action should do so."
        )
