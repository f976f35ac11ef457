"""What a rollout's file system begins with: built once for each task and process, unpacked for each rollout."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.adapters.harbor.archives import TaskArchive, tree_archive
from mt_grpo.adapters.harbor.commands import START_SECONDS, NotUnpacked, Outcome
from mt_grpo.adapters.harbor.sandbox import NamespaceSandbox, TaskSandbox
from mt_grpo.adapters.harbor.tasks import HarborTask, TaskStep
from mt_grpo.adapters.harbor.toml_tables import Healthcheck, NeedsMore

RUN_SECONDS = 120.0  # of one RUN of a Dockerfile


@dataclass
class Desk:
    """Where one rollout works: its sandbox, where commands begin, and their variables."""

    sandbox: TaskSandbox
    workdir: str
    env: dict[str, str] = field(default_factory=dict)

    def judge_env(self, step: TaskStep) -> dict[str, str]:
        """Variables of the tests of a step, so that a Python of theirs imports nothing of the policy's by itself.

        A task may say otherwise: the home and the working directory are the policy's to write.
        """
        own = {"HOME": "/logs/home", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
        return {**self.env, **own, **step.env}

    def put(self, archive: bytes, folder: str, seconds: float = START_SECONDS) -> None:
        """Unpack an archive into a folder. Raises `SandboxError`."""
        outcome = self.sandbox.unpack(archive, folder, seconds)
        if outcome.code != 0:
            raise NotUnpacked(f"files cannot be put into {folder}: {outcome.why or outcome.text(300).strip()}")


class NamespaceImages:
    """Desks by namespaces, without Docker.

    Args:
        make: What makes a sandbox of limits.
        shown: Folders of the machine that rollouts see, too.
    """

    def __init__(self, make: Callable[..., Any] = NamespaceSandbox, shown: Sequence[str] = ()):
        self._make, self._shown, self._lock = make, shown, threading.Lock()
        self._archives: dict[str, Sequence[bytes]] = {}  # by the task's folder

    def build(self, task: HarborTask) -> None:
        """Run what the task's Dockerfile runs, once. Raises `NeedsMore` for a command that fails here."""
        with self._lock:
            self._build(task)
        if task.healthcheck is not None or task.steps[0].healthcheck is not None:
            desk = self.open(task)
            try:
                put_step_files(desk, task, 0, RUN_SECONDS)
            except NotUnpacked as error:
                raise NeedsMore(f"a machine on which its {error}"[:120]) from None
            finally:
                desk.sandbox.close()

    def _build(self, task: HarborTask) -> Sequence[bytes]:
        if str(task.folder) not in self._archives:
            self._archives[str(task.folder)] = self._run(task) if task.build.runs else task.build.steps
        return self._archives[str(task.folder)]

    def _run(self, task: HarborTask) -> Sequence[bytes]:
        sandbox = self._make(task.limits)
        try:
            desk = Desk(sandbox, "/")
            for step in task.build.steps:
                if isinstance(step, bytes):
                    desk.put(step, "/")
                    continue
                command, folder, env = step
                command = command if task.build.bash else f"sh -c {shlex.quote(command)}"  # whose echo reads \n
                outcome = sandbox.shell(command, folder, folder, env, RUN_SECONDS)
                if outcome.code != 0:
                    why = outcome.why or " ".join(outcome.text(200).split()) or f"exit code {outcome.code}"
                    raise NeedsMore(f"a RUN that fails here ({why:.100})")
            return [sandbox.pack(RUN_SECONDS)]
        finally:
            sandbox.close()

    def open(self, task: HarborTask) -> Desk:
        """A desk of a task's own. Raises `SandboxError`, `NeedsMore`."""
        with self._lock:
            archives = self._build(task)
        workdir = task.workdir or task.build.workdir
        sandbox = self._make(task.limits, shown=self._shown)
        try:
            desk = Desk(sandbox, workdir, {**task.build.env, **task.env})
            for archive in archives:
                desk.put(archive, "/")
            folder = TaskArchive()
            folder.add_folder(workdir.strip("/"))
            desk.put(folder.tar(), "/")
            sandbox.seal()
        except BaseException:
            sandbox.close()
            raise
        return desk


def put_step_files(desk: Desk, task: HarborTask, number: int, seconds: float) -> None:
    """Put what a step brings into the working directory, run its `setup.sh`, and try its health checks.

    Raises `NotUnpacked` where that fails or takes longer, and `SandboxError` where the sandbox is gone.
    """
    step, deadline = task.steps[number], time.monotonic() + seconds
    if step.setup is not None:
        desk.put(tree_archive(step.setup), desk.workdir, seconds)
        if (step.setup / "setup.sh").is_file():
            left = deadline - time.monotonic()
            outcome = desk.sandbox.shell("bash ./setup.sh", desk.workdir, desk.workdir, desk.env, left)
            if outcome.code != 0:
                raise NotUnpacked(f"setup.sh of step {step.name} failed ({why_failed(outcome)})")
    for check in (task.healthcheck if number == 0 else None, step.healthcheck):
        if check is not None:
            wait_for_health(desk, check, deadline)


def wait_for_health(desk: Desk, check: Healthcheck, deadline: float) -> None:
    """Try a health check until it succeeds. Raises `NotUnpacked` where it fails too often, or no time is left."""
    began, failures = time.monotonic(), 0
    while True:
        seconds = min(check.timeout, max(0.0, deadline - time.monotonic()))
        outcome = desk.sandbox.shell(check.command, desk.workdir, desk.workdir, desk.env, seconds)
        if outcome.code == 0:
            return
        starts = time.monotonic() - began < check.start_period
        failures += not starts
        pause = check.start_interval if starts else check.interval
        if failures >= check.retries or time.monotonic() + pause > deadline:
            raise NotUnpacked(f"health check fails ({why_failed(outcome)})")
        time.sleep(pause)


def why_failed(outcome: Outcome) -> str:
    """In words, with what was printed."""
    return outcome.why or f"exit code {outcome.code}: {outcome.text(300).strip()}"
