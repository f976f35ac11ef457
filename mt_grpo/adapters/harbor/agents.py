"""`environment: harbor` with `agent_command`: a program of the user's works on a task, inside the task's sandbox.

It is what an `agent_command` is elsewhere: it gets a row on standard input, and asks the policy over OpenAI's or
Anthropic's API at the address and with the key of its environment. But it runs where the policy's commands run: in the
task's files, as their user, with their limits, on a loopback address where nobody but the trainer listens. Where it
ends, or its time is over, the tests say what was reached. What it returns, and how it ends, says nothing: the policy's
own commands could end it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
from pathlib import Path
from typing import Any

from mt_grpo.adapters.agents.chains import Asked
from mt_grpo.adapters.agents.conversation import (
    SECONDS_TO_RETURN,
    AgentConversation,
    agent_conversation,
    check_agent_time,
    read_other_models,
)
from mt_grpo.adapters.agents.messages import ModelRequest, refuse
from mt_grpo.adapters.agents.programs import AgentFailure, own_time, told_refusals, variables_of_clients
from mt_grpo.adapters.agents.server import AgentServer, address_of
from mt_grpo.adapters.agents.session import AgentSession
from mt_grpo.adapters.harbor.commands import Outcome, SandboxError
from mt_grpo.adapters.harbor.environment import JudgedTask, check_namespaces, settings_of_tasks
from mt_grpo.adapters.harbor.images import NamespaceImages
from mt_grpo.adapters.house import check_settings_of, check_unset
from mt_grpo.adapters.session import end_all
from mt_grpo.base.pictures import uri_or_str
from mt_grpo.conversation.environments import EnvironmentFailure
from mt_grpo.conversation.tools.threads import run_tool
from mt_grpo.rollout import Rollout, StopReason

logger = logging.getLogger(__name__)
SAID = 500  # characters of a program's output, in what is told of it
# What each sandbox has of its own: a folder that is shown can be in none of the first, nor in place of the second.
OF_SANDBOXES = "/usr /etc /bin /sbin /lib /lib32 /lib64 /libx32 /proc /sys /dev /tests /logs /solution".split()
WRITTEN = "/root /home /tmp /run /var /var/tmp /var/log".split()


class AgentTask(JudgedTask):
    """A task on which a program works.

    Attributes:
        command: The program and its arguments.
        row: What it reads: the row of the data.
    """

    tools: list = []  # the program brings its own
    command: tuple[str, ...] = ()

    def __init__(self):
        super().__init__()
        self.row: dict[str, Any] = {}

    def reset(self, task_folder: str, **row: Any) -> None:
        """Begin a task."""
        self.row = row
        super().reset(task_folder, **row)

    @property
    def given(self) -> bytes:
        """What the program reads: the row, with the instruction of the step."""
        own = {"instruction": self._step.instruction, "step": self._step.name}
        return json.dumps({**self.row, **own}, default=uri_or_str).encode()

    def _work(self, variables: dict[str, str]) -> Outcome:
        """Run the program until it ends, or is ended. `variables` are the address and the key."""
        desk = self._desk
        env = {name: value for name, value in desk.env.items() if name not in variables}
        return desk.sandbox.program(self.command, desk.workdir, env, variables, self.given)


class TaskSession(AgentSession):
    """A rollout whose rewards are the tests' alone.

    INVARIANT: no request gives a reward. The policy's commands may read the program's key, and ask as it does.
    """

    def ask(
        self,
        request: ModelRequest,
        body: dict[str, Any],
        is_retry: bool = False,
        idempotency_key: str | None = None,
        reward: float | None = None,
        rewarded: str | None = None,
    ) -> Asked:
        """As of an agent. Raises `ApiError` for a reward."""
        if reward is not None:
            raise refuse("X-Turn-Reward", "the tests of the task give the rewards. Remove it.")
        return super().ask(request, body, is_retry, idempotency_key)

    @property
    def last_answer(self) -> int:
        """The number of the answer that a client got last, of the model that is trained; -1: of none."""
        return -1 if self._last is None else self._last.numbers[0]

    async def end_requests(self) -> None:
        """End what is in flight: whoever asked it is gone."""
        await end_all(asked.task for asked in self._asked if not asked.task.done())

    def say(self, number: int, reward: float | None, info: dict[str, Any]) -> None:
        """Give an answer what the tests of its step said."""
        if reward is not None:
            self._add_reward(number, reward)
        for each in self.samples:
            if each.number == number:
                each.turn.info.update(info)


class TaskAgents(AgentConversation):
    """The conversation between the policy and a program that works on a task."""

    async def run_agent(self, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None) -> None:
        """Let the program work on each step, and let the tests judge it. Raises `EnvironmentFailure`."""
        server = await self.server()
        session = TaskSession(self, rollout, llm, sampling_params)
        server.add(session)
        try:
            goes_on, ended = True, False
            while goes_on:
                before, session.closed = session.last_answer, False
                outcome, in_time = await self.work(rollout, server, session)
                if session.failure is not None:
                    raise session.failure
                if not session.got_an_answer and session.stop_reason is None:
                    raise AgentFailure(
                        f"{self.agent.name} never got a completion of the policy{told_refusals(session)}. It "
                        f"{how_it_ended(outcome, in_time)}."
                    )
                reward, info, goes_on = await self.environments.call(
                    rollout, "_end_step", session.stop_reason is not None
                )
                ended = ended or not in_time
                if outcome.code != 0 and session.stop_reason is None and not session.context_is_full:
                    info["harbor"]["agent"] = how_it_ended(outcome, in_time)
                    rollout.environment._tell(f"{self.agent.name} {info['harbor']['agent']}. The tests judge it")
                if session.last_answer > before:
                    session.say(session.last_answer, reward, info)
        finally:
            server.remove(session)
            await session.finish()
        by_time = StopReason.ENVIRONMENT_STOP if ended else StopReason.AGENT_DONE
        rollout.stop_reason = session.stop_reason or by_time

    async def work(self, rollout: Rollout, server: AgentServer, session: TaskSession) -> tuple[Outcome, bool]:
        """(what came of the program in a step, whether it ended by itself). Raises `EnvironmentFailure`.

        INVARIANT: when this returns, nothing of the program's runs, and nobody listens in the sandbox.
        """
        task: AgentTask = rollout.environment
        sandbox, limit = task._desk.sandbox, task._step.agent_seconds
        try:
            listening = await asyncio.to_thread(sandbox.listener)
        except SandboxError as error:
            raise EnvironmentFailure(f"the sandbox of the task {task.task.name}: {error}") from error
        site = await server.listen(listening)
        variables = variables_of_clients(address_of(listening.getsockname()[1]), session.key)

        def work() -> Outcome:
            return task._work(variables)

        work.__name__ = self.agent.name
        running = asyncio.ensure_future(run_tool(work, {}, float("inf")))
        try:
            seconds = self.agent_timeout if limit is None else min(limit, self.agent_timeout)
            await own_time(running, session, seconds)
            if not running.done() and session.over.is_set() and session.failure is None:
                await own_time(running, session, SECONDS_TO_RETURN, until_over=False)
            in_time = running.done() or session.over.is_set()
        finally:
            session.closed = True
            await site.stop()
            while not running.done():  # again: it may not have begun
                await asyncio.to_thread(sandbox.end_programs)
                await asyncio.wait([running], timeout=0.2)
            await session.end_requests()
        try:
            return running.result(), in_time
        except SandboxError as error:
            raise EnvironmentFailure(f"the sandbox of the task {task.task.name}: {error}") from error


def how_it_ended(outcome: Outcome, in_time: bool) -> str:
    """In words, with what it said last.

    >>> how_it_ended(Outcome(3, b"no\\n", size=3), True), how_it_ended(Outcome(137), False)
    ("ended with exit code 3; it printed: 'no'", 'was ended at its time limit; it printed nothing')
    """
    said = outcome.text(SAID).strip()
    how = f"ended with exit code {outcome.code}" if in_time else "was ended at its time limit"
    return f"{how}; it printed {f': {said!r}' if said else 'nothing'}".replace("printed :", "printed:")


# -- what a recipe says --


class TaskProgram:
    """A program that works inside sandboxes.

    Args:
        command: The program and its arguments, as a shell's line.
        folders: Of this machine, which sandboxes show to it. A file of them may be named by a relative path.

    Raises:
        ValueError: it is no command, or a folder cannot be shown.
    """

    name = "agent_command"

    def __init__(self, command: str, folders: list[str]):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"agent_command: {command!r} is no command: {error}.") from None
        if not words:
            raise ValueError(f"agent_command: {command!r} begins with no program. Expected one like `sh my_agent.sh`.")
        self.shown = tuple(shown_folder(folder) for folder in folders)
        self.words = tuple(self._found(word) for word in words)

    def _found(self, word: str) -> str:
        """A word of the command, the absolute path where it names a file in a folder that is shown."""
        path = os.path.abspath(word)
        if not os.path.exists(path) or "/" not in word:
            return word
        if any(is_in(path, each) for each in self.shown):
            return path
        if not word.startswith("/"):
            raise ValueError(
                f"agent_command: a sandbox has no {word!r}. Name a folder that has it in harbor_agent_folders, such "
                f"as {os.path.dirname(path)}."
            )
        return word


def is_in(path: str, folder: str) -> bool:
    """Whether a path is that of a folder, or of something in it.

    >>> is_in("/usr/bin", "/usr"), is_in("/usr", "/usr"), is_in("/usr2", "/usr")
    (True, True, False)
    """
    return Path(path).is_relative_to(folder)


def shown_folder(folder: str) -> str:
    """The absolute path of a folder that sandboxes are to show. Raises `ValueError`."""
    path = os.path.abspath(os.path.expanduser(folder))
    if not os.path.isdir(path):
        raise ValueError(f"harbor_agent_folders: {folder!r} is no folder. Expected folders that agent_command reads.")
    of_sandbox = any(is_in(path, each) for each in OF_SANDBOXES)
    if of_sandbox or any(is_in(each, path) for each in (*OF_SANDBOXES, *WRITTEN)):
        raise ValueError(
            f"harbor_agent_folders: {folder!r} cannot be shown. A sandbox has /usr, /etc, /bin and /lib of this "
            "machine in any case, and folders of its own. Expected folders beside those, or within /opt, /home, /root "
            "or /tmp."
        )
    return path


def load_task_agents(script_args: Any, args: Any, base: type) -> tuple[type, type[AgentTask]]:
    """(class of conversations, class of environments) of a recipe. Raises `ValueError` for one that cannot work."""
    where = "environment: harbor with agent_command"
    check_settings_of("agent", where, script_args, args)
    check_agent_time(script_args, args)
    for name, why in (
        ("agent", "a function runs in the trainer's process, and in no sandbox"),
        ("agent_key", "the key is in the environment of a program that is alone in its sandbox"),
        ("harbor_command_timeout", "the program runs its commands"),
    ):
        check_unset((name,), f"{where}: {why}", script_args)
    if script_args.harbor_docker == "always":
        raise ValueError(
            "harbor_docker: always with agent_command: the program runs by namespaces of this machine, which has it, "
            "and not in images that do not. Remove harbor_docker."
        )
    program = TaskProgram(script_args.agent_command, script_args.harbor_agent_folders or [])
    settings = settings_of_tasks(script_args, args, docker=False)
    check_namespaces(program.shown, program.words[0])
    more = {"images": NamespaceImages(shown=program.shown), "command": program.words}
    environment = type("harbor", (AgentTask,), {**settings, **more, "known": {}, "told": set()})
    others = read_other_models(script_args)
    conversation = agent_conversation(base, program, script_args.agent_timeout, script_args.max_model_calls, **others)
    return type("TaskAgents", (TaskAgents, conversation), {}), environment
