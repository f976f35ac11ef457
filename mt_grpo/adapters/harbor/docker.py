"""A rollout's sandbox by Docker, where a daemon answers: images are built of the task's own Dockerfile.

Each rollout has a container, without a network unless the recipe allows it. Commands run as the image's user, which is
root inside the container in most images, without new privileges. Before tests run, all processes of the container are
killed but its first, and `/tests` and `/logs/verifier` are made anew. Where the trainer is killed, a process that
watches it removes its containers.

INVARIANT: what a container cannot do while Docker answers, the policy may have made impossible (it may remove `bash`,
or start as many processes as there may be). So it is a failed command, or tests without a reward, and no error.

Does not protect against: a policy that changes programs of the image (`/usr/bin/python3`) by which the tests run. It
may do so as root of its container, here as in Harbor itself. By namespaces the system's folders cannot be written.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from mt_grpo.adapters.harbor.commands import Commands, Outcome, SandboxError
from mt_grpo.adapters.harbor.images import Desk
from mt_grpo.adapters.harbor.namespaces import BEGIN, RUN, RUN_WITH_INPUT, SHELL, TELL_REWARD
from mt_grpo.adapters.harbor.sandbox import SandboxLimits
from mt_grpo.adapters.harbor.tasks import HarborTask
from mt_grpo.base.errors import error_line

logger = logging.getLogger(__name__)

DOCKER_SECONDS = 60.0  # of a command of Docker's that should be quick
LABEL = "mt-grpo-harbor"
UNABLE = 126  # the exit code of what a container could not begin
# Of a process beside the trainer, whose stdin ends with it. More than once: a container may be about to start.
WATCH = """
cat > /dev/null
for seconds in 0 5 30; do
    sleep "$seconds"
    docker ps --all --quiet --no-trunc --filter "label=$1" | while read -r each; do
        docker rm --force --volumes "$each" < /dev/null
    done
done
"""
# As root of the container. Argument: the folder. The archive is read from stdin.
FILL_ANEW = 'set -e\nrm -rf -- "$1" && mkdir -p -- "$1" && tar -x -C "$1" --no-same-owner\n'
# Of a container: it reaps what commands leave, and goes on where everything else is killed, `sleep` with it.
FIRST_PROCESS = "while true; do sleep 1000 & wait; done"


def docker_command(*words: str, given: bytes = b"", seconds: float = DOCKER_SECONDS) -> bytes:
    """What a command of Docker's prints. Raises `SandboxError`."""
    try:
        found = subprocess.run(["docker", *words], input=given, capture_output=True, timeout=seconds)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"docker {words[0]}: {error_line(error)}") from error
    if found.returncode:
        said = b" ".join(found.stderr.split()).decode(errors="replace")[-500:]
        raise SandboxError(f"docker {words[0]}: {said or f'exit code {found.returncode}'}")
    return found.stdout


def docker_problem() -> str:
    """Why Docker cannot be used here; empty where it can."""
    if not shutil.which("docker"):
        return "there is no program docker"
    try:
        docker_command("version", "--format", "{{.Server.Version}}", seconds=20.0)
    except SandboxError as error:
        return str(error)
    return ""


@functools.cache
def watched_label(process: int) -> str:
    """The label of the containers of a process, this one: they are removed where it ends, however it does."""
    label = f"{LABEL}={process}-{secrets.token_hex(8)}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    watching.append(
        subprocess.Popen(["bash", "-c", WATCH, "watch", label], stdin=subprocess.PIPE, start_new_session=True, **quiet)
    )
    return label


watching: list[subprocess.Popen] = []  # whose stdin is open as long as this process is there


@dataclass(eq=False)
class DockerSandbox:
    """A container.

    Args:
        image: Its name or id.
        limits: What it may use.
        cpus: How many; None: no limit.
        network: Whether it has one.

    Raises:
        SandboxError: Docker cannot start it.
    """

    image: str
    limits: SandboxLimits
    cpus: float | None = None
    network: bool = False

    def __post_init__(self):
        self._commands = Commands(end_client)
        words = ["run", "--detach", "--rm", "--label", watched_label(os.getpid()), "--pids-limit", "512"]
        words += ["--memory", f"{self.limits.memory_mb}m", "--security-opt", "no-new-privileges"]
        words += ["--network", "bridge" if self.network else "none"]
        words += [] if self.cpus is None else ["--cpus", f"{self.cpus:g}"]
        words += ["--entrypoint", "bash", self.image, "-c", FIRST_PROCESS]
        self._container = docker_command(*words).decode().strip()

    def shell(self, command: str, folder: str, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """As `TaskSandbox.shell`."""
        return self._exec(RUN, ["bash", "-c", SHELL, "bash", folder, workdir, command], env, seconds)

    def unpack(self, archive: bytes, folder: str, seconds: float = DOCKER_SECONDS) -> Outcome:
        """As `TaskSandbox.unpack`."""
        command = ["tar", "-x", "-C", folder, "--no-same-owner", "--no-overwrite-dir"]
        return self._exec(RUN_WITH_INPUT, command, {}, seconds, archive)

    def judge(self, archive: bytes, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """As `TaskSandbox.judge`."""
        if why := self._kill_all():
            return unable(why)
        script = FILL_ANEW + "rm -rf /logs/verifier /logs/home\n"
        script += "mkdir -p /logs/verifier /logs/home /logs/agent /logs/artifacts"
        filled = self._exec(BEGIN + script, ["/tests"], {}, DOCKER_SECONDS, archive, as_root=True)
        if filled.code != 0:
            said = (filled.head + filled.control).decode(errors="replace")
            return unable(f"the tests cannot be put into the container: {said}")
        # The script itself is what Docker starts: tests may kill all processes but their own.
        script = BEGIN + 'cd -- "$1" && exec bash /tests/test.sh < /dev/null 2>&1'
        outcome = self._exec(script, [workdir], env, seconds, as_root=True)
        outcome.control = b""
        if not outcome.why and not self._kill_all():
            outcome.control = self._exec(BEGIN + TELL_REWARD, [], {}, DOCKER_SECONDS, as_root=True).control
        return outcome

    def solve(self, archive: bytes, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """As `TaskSandbox.solve`."""
        script = BEGIN + FILL_ANEW + 'set +e\nshift\n"$@" < /dev/null 2>&1\nexit $?'
        command = ["/solution", "bash", "-c", 'cd -- "$1" && exec bash /solution/solve.sh', "bash", workdir]
        return self._exec(script, command, env, seconds, archive, as_root=True)

    def _exec(
        self,
        script: str,
        command: Sequence[str],
        env: dict[str, str],
        seconds: float,
        given: bytes = b"",
        as_root: bool = False,
    ) -> Outcome:
        """What comes of a script in the container, which says `BEGUN`. Too long: everything there is killed."""
        words = ["docker", "exec", "--interactive", *(["--user", "0"] if as_root else [])]
        words += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        words += [self._container, "bash", "-c", script, "run", *command]
        outcome = (self._commands.run_alone if as_root else self._commands.run)(words, None, given, seconds)
        if outcome.why:
            self._kill_all()
        if outcome.began is None:
            docker_answers()
            return unable(outcome.why_not_begun())
        return outcome

    def _kill_all(self) -> str:
        """Kill all processes of the container but its first. Why that cannot be; empty where it was.

        Where none can be started to do it, the container is started anew, with its files.
        """
        kill = ["exec", "--user", "0", self._container, "bash", "-c", "kill -KILL -1; exit 0"]
        for words in (kill, ["restart", "--time", "0", self._container]):
            try:
                docker_command(*words)
                return ""
            except SandboxError as error:
                why = str(error)
        docker_answers()
        return why

    def close(self) -> None:
        """As `TaskSandbox.close`."""
        if self._commands.close():
            docker_command("rm", "--force", "--volumes", self._container)


def docker_answers() -> None:
    """Raise `SandboxError` where it does not: then what failed is no doing of a container."""
    docker_command("version", "--format", "{{.Server.Version}}")


def unable(why: str) -> Outcome:
    """What comes of a command that a container could not begin."""
    said = f"the container cannot do this: {why}\n".encode()
    return Outcome(UNABLE, said, size=len(said))


def end_client(process: subprocess.Popen) -> None:
    """End a command of Docker's on this machine."""
    process.kill()
    process.wait()


class DockerImages:
    """Desks by Docker.

    Args:
        network: Whether containers have one.
    """

    def __init__(self, network: bool = False):
        self._network, self._lock = network, threading.Lock()
        self._images: dict[str, str] = {}  # by the task's folder

    def build(self, task: HarborTask) -> None:
        """Build, or pull, the image of a task, once. Raises `SandboxError` with what Docker says."""
        self._image(task)

    def _image(self, task: HarborTask) -> str:
        with self._lock:
            if str(task.folder) not in self._images:
                if task.image is not None:
                    if not docker_has(task.image):
                        docker_command("pull", "--quiet", task.image, seconds=task.build_seconds)
                    self._images[str(task.folder)] = task.image
                else:
                    name = f"{LABEL}:{hashlib.sha256(str(task.folder).encode()).hexdigest()[:16]}"
                    folder = str(task.folder / "environment")
                    docker_command("build", "--quiet", "--tag", name, folder, seconds=task.build_seconds)
                    self._images[str(task.folder)] = name
            return self._images[str(task.folder)]

    def open(self, task: HarborTask) -> Desk:
        """A desk of a task's own. Raises `SandboxError`."""
        image = self._image(task)
        sandbox = DockerSandbox(image, task.limits, task.cpus, self._network and task.network)
        workdir = task.workdir or workdir_of_image(image)
        try:
            outcome = sandbox.shell('mkdir -p -- "$PWD"', "/", "/", {}, DOCKER_SECONDS)
            if outcome.code != 0:
                raise SandboxError(f"it has no bash that works: {outcome.text(300).strip()}")
        except BaseException:
            sandbox.close()
            raise
        return Desk(sandbox, workdir, dict(task.env))


def docker_has(image: str) -> bool:
    """Whether an image is here already."""
    try:
        docker_command("image", "inspect", image)
    except SandboxError:
        return False
    return True


@functools.cache
def workdir_of_image(image: str) -> str:
    """Where commands begin in an image."""
    return docker_command("image", "inspect", "--format", "{{.Config.WorkingDir}}", image).decode().strip() or "/"
