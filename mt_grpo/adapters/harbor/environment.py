"""`environment: harbor`: a task folder is the other side of the conversation. Its tests are the reward.

environment: harbor
dataset_name: DIR                     # a folder of task folders, or of train/ and test/ with task folders
harbor_command_timeout: 20            # seconds of one command
harbor_docker: auto                   # whether Docker runs the tasks
harbor_reward: reward                 # which of several rewards counts
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mt_grpo.adapters.harbor.bubblewrap import BubblewrapSandbox
from mt_grpo.adapters.harbor.commands import NotUnpacked, Outcome, SandboxError
from mt_grpo.adapters.harbor.docker import DockerImages, docker_problem
from mt_grpo.adapters.harbor.images import Desk, NamespaceImages, put_step_files
from mt_grpo.adapters.harbor.sandbox import NamespaceSandbox, SandboxLimits
from mt_grpo.adapters.harbor.tasks import Allowed, HarborTask, TaskStep, read_task, read_tasks, task_folders, task_row
from mt_grpo.adapters.harbor.toml_tables import BrokenTask, NeedsMore
from mt_grpo.adapters.harbor.verdict import TestsSaid, outcome_of_steps, read_reward_files, rewards_of
from mt_grpo.rollout import Reply, Rollout, Turn

logger = logging.getLogger(__name__)

SHOWN = 8000  # characters of a command's output; the recipe's max_tool_response_tokens cuts further
SHOWN_OF_TESTS = 2000
MARGIN = 10.0  # seconds of environment_timeout that are left where tests are ended
TOLD_REASONS = 8
NO_MODULE = "ModuleNotFoundError"
HINT_OF_MODULES = (
    "a program of its tests found no module. They run with PYTHONSAFEPATH=1, without the working directory and the "
    'folder of a script: start programs of the policy\'s by $AS_AGENT, or set PYTHONSAFEPATH = "" in [verifier.env]'
)
SIGNALLED = 128  # and its number: the exit code of what a signal has ended


class JudgedTask:
    """One task on a machine of its own. Its tests say the outcome; each step's tests give a reward of their own.

    INVARIANT: tests run in a sandbox in which nothing of the policy's runs any more, on a `/logs/verifier` of their
    own. What they do not say is 0: a policy that breaks or stops its tests has not escaped its loss.

    Attributes:
        task: The task.
        said: What the tests said, per step that is over.
    """

    images: Any = None
    allowed = Allowed()
    command_seconds = 20.0
    verifier_seconds = 110.0
    reward_name = "reward"
    most_turns: int | None = None  # of the conversation
    known: dict[str, HarborTask] = {}
    told: set[str] = set()

    def __init__(self):
        self.task: HarborTask | None = None
        self.said: list[TestsSaid] = []
        self.unjudged = True  # whether a step has begun whose tests have not run
        self._desk: Desk | None = None

    def reset(self, task_folder: str, **row: Any) -> None:
        """Begin a task. The row's prompt is its instruction."""
        self.task = self.task_of(task_folder)
        self.said, self.unjudged = [], True
        self._desk = self.images.open(self.task)
        put_step_files(self._desk, self.task, 0, self.verifier_seconds)

    def get_reward(self) -> float:
        """The outcome: what the tests said, over all steps of the task."""
        if self.unjudged:  # the conversation ended where nobody was asked
            self._judge()
        rewards = [each.reward(self.reward_name) for each in self.said]
        if self.task.steps[0].name:
            return outcome_of_steps(rewards, len(self.task.steps), self.task.strategy)
        return rewards[0]

    def close(self) -> None:
        """End all that runs, and delete the rollout's files."""
        if self._desk is not None:
            self._desk.sandbox.close()

    @property
    def _step(self) -> TaskStep:
        return self.task.steps[min(len(self.said), len(self.task.steps) - 1)]

    def _judge(self) -> TestsSaid:
        """Run the tests of the step that is over."""
        step = self._step
        if len(self.said) == len(self.task.steps):
            return self.said[-1]
        seconds = min(step.verifier_seconds, self.verifier_seconds)
        env = self._desk.judge_env(step)
        outcome = self._desk.sandbox.judge(self.task.tests(step), self._desk.workdir, env, seconds)
        said = said_by_tests(outcome, seconds)
        self.said.append(said)
        self.unjudged = False
        if said.problem:
            printed = said.output[-300:] or "nothing"
            self._tell(f"its tests gave no reward, which counts as 0: {said.problem}. They printed: {printed}")
        elif (reward := said.reward(self.reward_name)) < 0:
            self._tell(
                f"its tests gave the reward {reward:g}. Tests that are stopped count as 0, which is more: a policy "
                "may learn to stop them. Let rewards be at least 0"
            )
        elif NO_MODULE in said.output and env.get("PYTHONSAFEPATH"):
            self._tell(f"{HINT_OF_MODULES}, if it should find it")
        return said

    def _end_step(self, last: bool) -> tuple[float | None, dict[str, Any], bool]:
        """(reward of the step's last turn, what its tests said, whether the next step has begun).

        Args:
            last: Whether no step follows, in any case.
        """
        deadline = time.monotonic() + self.verifier_seconds
        step, said = self._step, self._judge()
        info = {"harbor": {"step": step.name, "rewards": said.rewards, "problem": said.problem, "tests": said.output}}
        reward = said.reward(self.reward_name) if step.name else None
        goes_on = not last and len(self.said) < len(self.task.steps)
        if not goes_on or said.misses(step.min_reward, self.reward_name):
            return reward, info, False
        try:  # one time limit for both: a policy that makes its tests slow has no error of the environment's
            put_step_files(self._desk, self.task, len(self.said), deadline - time.monotonic())
        except NotUnpacked as error:
            info["harbor"]["missed"] = f"step {self._step.name} did not begin: {error}"
            self._tell(f"{info['harbor']['missed']}. So it counts as 0, as one that was not reached")
            return reward, info, False
        self.unjudged = True
        return reward, info, True

    def _tell(self, what: str) -> None:
        """Say something of the task, once of each task."""
        if self.task.name not in self.told:
            self.told.add(self.task.name)
            logger.warning("The task %s: %s.", self.task.name, what)

    # -- the data --

    @classmethod
    def task_of(cls, folder: str) -> HarborTask:
        """A task that was read at the start, or that is read now. Raises `ValueError`."""
        if folder not in cls.known:
            try:
                cls.known[folder] = read_task(Path(folder), cls.allowed)
            except (NeedsMore, BrokenTask, OSError) as error:
                raise ValueError(f"the task {folder}: {error}") from None
        return cls.known[folder]

    @classmethod
    def check_row(cls, row: dict[str, Any]) -> None:
        """Raise `ValueError` for a row that names no task."""
        if not isinstance(row.get("task_folder"), str):
            raise ValueError("it has no task_folder. Expected dataset_name to be a folder of task folders.")
        cls.task_of(row["task_folder"])

    @classmethod
    def read_folder(cls, folder: Path, split: str) -> list[dict[str, Any]]:
        """The rows of a folder of tasks. Raises `ValueError` that names broken tasks."""
        folders = task_folders(folder.resolve(), split)
        tasks, left_out = read_tasks(folders, cls.allowed)
        whole = []
        for task in tasks:
            try:
                cls.images.build(task)
                whole.append(task)
            except NeedsMore as error:
                left_out[error.reason] += 1
            except SandboxError as error:
                raise ValueError(
                    f"dataset_name {str(folder)!r}: the task {task.name} cannot begin: {error}."
                ) from None
        if left_out:
            told = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common(TOLD_REASONS))
            what = f"{left_out.total()} of {len(folders)} tasks of {str(folder)!r} need what is not here: {told}"
            docker = "" if cls.allowed.docker else " Docker runs more of them (harbor_docker)."
            if not whole:
                raise ValueError(f"dataset_name: {what}.{docker}")
            logger.warning("%s. They are left out.%s", what, docker)
        cls.known.update({str(task.folder): task for task in whole})
        return [task_row(task) for task in whole]


class HarborEnvironment(JudgedTask):
    """A task on which the policy works by the tool `bash`."""

    def __init__(self):
        super().__init__()
        self._folder, self._spent, self._failure = "/", 0.0, None
        self._turn: Turn | None = None  # the last one

    def reset(self, task_folder: str, **row: Any) -> None:
        """Begin a task. The row's prompt is its instruction."""
        super().reset(task_folder, **row)
        self._folder, self._spent, self._turn = self._desk.workdir, 0.0, None

    def bash(self, command: str) -> str:
        """Run a command in bash. Each call is a new shell, in the folder where the last one ended.

        Args:
            command: One line or several. It cannot ask for input.

        Returns:
            What it printed.
        """
        step = self._step
        left = float("inf") if step.agent_seconds is None else step.agent_seconds - self._spent
        if left <= 0:
            return "[the time of this task is over]"
        seconds = min(self.command_seconds, left)
        try:
            outcome = self._desk.sandbox.shell(command, self._folder, self._desk.workdir, self._desk.env, seconds)
        except SandboxError as error:
            self._failure = error  # `respond` raises it: no fault of the policy's
            raise
        self._spent += outcome.seconds
        self._folder = folder_of(outcome.control) or self._folder
        return told_output(outcome, seconds)

    def respond(self, rollout: Rollout, turn: Turn) -> Reply | None:
        """Nothing where the policy goes on with its step. Else what the step's tests said, and the next step."""
        if self._failure is not None:
            raise self._failure
        self._turn = turn
        cut = turn.finish_reason == "length" and not turn.calls  # a call that was cut off is answered, too
        last = cut or (self.most_turns is not None and len(rollout.turns) >= self.most_turns)
        limit = self._step.agent_seconds
        spent = limit is not None and self._spent >= limit
        if turn.calls and not last and not spent:
            return None
        named, (reward, info, goes_on) = bool(self._step.name), self._end_step(last)
        if goes_on:
            self._spent, self._folder = 0.0, self._desk.workdir
            message = {"role": "user", "content": self._step.instruction}
            return Reply(messages=[message], reward=reward, info=info)
        return Reply(stop=not cut and (named or spent), reward=reward, info=info)

    def get_reward(self) -> float:
        """As of a task, where its sandbox was not lost."""
        if self._failure is not None:
            raise self._failure
        if self.unjudged and self._turn is not None and not self._turn.info:  # there was no room behind it
            self._turn.reward, self._turn.info, _ = self._end_step(last=True)
        return super().get_reward()


def folder_of(control: bytes) -> str | None:
    """The folder in which a shell ended, by what it said; None where it did not say so.

    >>> folder_of(b"noise\\n/app/src\\n"), folder_of(b""), folder_of(b"app\\n")
    ('/app/src', None, None)
    """
    last = control.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
    return last if last.startswith("/") and len(last) < 4096 and "\0" not in last else None


def told_output(outcome: Outcome, seconds: float) -> str:
    """What the policy reads of a command.

    >>> told_output(Outcome(2, b"no\\n", size=3), 20), told_output(Outcome(0), 20)
    ('no\\n[exit code 2]', '[no output]')
    """
    text = outcome.text(SHOWN).rstrip()
    if outcome.why == "time":
        text += f"\n[stopped after {seconds:g} seconds]"
    elif outcome.why:
        text += "\n[stopped: it printed too much]"
    elif outcome.code:
        text += f"\n[exit code {outcome.code}]"
    return text.lstrip("\n") or "[no output]"


def said_by_tests(outcome: Outcome, seconds: float) -> TestsSaid:
    """What tests said, by how they ended and by their files."""
    output = outcome.text(SHOWN_OF_TESTS)
    if outcome.why:
        why = f"they took longer than {seconds:g} s" if outcome.why == "time" else "they printed too much"
        return TestsSaid(problem=why, output=output)
    if outcome.code is None or outcome.code > SIGNALLED:  # what they have written is not their last word
        return TestsSaid(problem=f"they were ended by a signal (exit code {outcome.code})", output=output)
    rewards, problem = rewards_of(read_reward_files(outcome.control))
    if not rewards and not read_reward_files(outcome.control):
        problem += f", and ended with exit code {outcome.code}"
    return TestsSaid(rewards, problem, output)


# -- what a recipe says --


def load_harbor_conversation(script_args: Any, args: Any, base: type) -> tuple[type, type[HarborEnvironment]]:
    """(class of conversations, class of environments) of a recipe. Raises `ValueError` for one that cannot work."""
    seconds = script_args.harbor_command_timeout
    if seconds >= args.tool_timeout:
        raise ValueError(
            f"harbor_command_timeout={seconds:g} is not below tool_timeout={args.tool_timeout:g}: the model would not "
            "read what a command printed until its end. Raise tool_timeout, or lower harbor_command_timeout."
        )
    docker = uses_docker(script_args.harbor_docker)
    settings = settings_of_tasks(script_args, args, docker)
    settings |= {
        "images": DockerImages(settings["allowed"].network) if docker else NamespaceImages(check_namespaces()),
        "command_seconds": seconds,
        "most_turns": args.max_env_steps + 1,
    }
    return base, type("harbor", (HarborEnvironment,), {**settings, "known": {}, "told": set()})


def settings_of_tasks(script_args: Any, args: Any, docker: bool) -> dict[str, Any]:
    """What a recipe says of tasks, as attributes of `JudgedTask`. Raises `ValueError`."""
    name = script_args.dataset_name
    if not name or not Path(name).is_dir():
        raise ValueError(
            f"environment: harbor: dataset_name is {name!r}, expected a folder of task folders, each with a task.toml."
        )
    if args.environment_timeout <= 2 * MARGIN:
        raise ValueError(
            f"environment_timeout={args.environment_timeout:g} leaves tests no time. Set it above {2 * MARGIN:g}."
        )
    if script_args.harbor_network and not docker:
        raise ValueError("harbor_network: true needs Docker (harbor_docker). Without it no task has a network.")
    network = docker and script_args.harbor_network
    return {
        "allowed": Allowed(script_args.harbor_memory_mb, script_args.harbor_storage_mb, docker, network),
        "verifier_seconds": args.environment_timeout - MARGIN,
        "reward_name": script_args.harbor_reward,
    }


def uses_docker(choice: str) -> bool:
    """Whether tasks run by Docker. Raises `ValueError` where they must, and it is not there."""
    if choice == "never":
        return False
    problem = docker_problem()
    if choice == "always" and problem:
        raise ValueError(f"harbor_docker: always, and Docker cannot be used: {problem}.")
    return not problem


def check_namespaces(shown: Sequence[str] = (), program: str = "") -> type[NamespaceSandbox]:
    """What makes sandboxes on this machine. Raises `ValueError` where nothing does, where they have not a program, or
    where its user cannot read a folder.

    Args:
        shown: Folders of the machine that sandboxes have, too.
        program: What is to be found there; empty: nothing.
    """
    problem, found = try_sandbox(NamespaceSandbox, shown, program)
    if problem and not program and not try_sandbox(BubblewrapSandbox)[0]:
        logger.warning(
            "Task folders run by bubblewrap (bwrap): this machine allows no namespaces of the trainer's own (%s). "
            "Their files are on the disk, and harbor_storage_mb bounds each of them alone.",
            problem,
        )
        return BubblewrapSandbox
    if problem:
        raise ValueError(
            f"environment: harbor: this machine cannot run a sandbox: {problem}. Expected Docker, or namespaces of "
            "Linux. In a container: run it as root with --cap-add SYS_ADMIN and --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined. Not as root: allow namespaces of users (sysctl -w "
            "user.max_user_namespaces=10000; where Ubuntu restricts them, "
            "kernel.apparmor_restrict_unprivileged_userns=0), or install bubblewrap."
        )
    for number, folder in enumerate(shown):
        if f"closed-{number}" in found:
            raise ValueError(
                f"harbor_agent_folders: {folder!r} cannot be read in a sandbox, where the program runs as another "
                f"user. Expected a folder that any user may read (chmod -R a+rX {shlex.quote(folder)})."
            )
    if "found" not in found:
        raise ValueError(
            f"agent_command: a sandbox has no program {program!r}. It has /usr, /bin, /etc and /lib of this machine, "
            f"and the folders of harbor_agent_folders ({', '.join(shown) or 'none'}). Expected a program in one of "
            "those, which any user of the machine may run."
        )
    return NamespaceSandbox


def try_sandbox(
    kind: type[NamespaceSandbox], shown: Sequence[str] = (), program: str = "true"
) -> tuple[str, list[str]]:
    """(why no sandbox of a kind can be had here, empty where one can; what is there, and not).

    `found` is the program; `closed-1` is the second folder, where it cannot be read.
    """
    lines = ["echo $((1 + 1))", f"command -v -- {shlex.quote(program or 'true')} > /dev/null && echo found"]
    for number, folder in enumerate(map(shlex.quote, shown)):
        lines.append(f"[ -r {folder} ] && [ -x {folder} ] || echo closed-{number}")
    find = "\n".join(lines)
    try:
        sandbox = kind(SandboxLimits(), shown=shown)
        try:
            outcome = sandbox.shell(find, "/", "/", {}, 60.0)
        finally:
            sandbox.close()
    except (SandboxError, OSError, RuntimeError) as error:
        return str(error), []
    said = outcome.text(300), outcome.control[-300:].decode(errors="replace")
    return "" if said[0].startswith("2\n") else f"a command gave {said[0]!r}, {said[1]!r}", said[0].split()
