"""A rollout's sandbox by Docker, where a daemon answers: images are built of the task's own Dockerfile.

Each rollout has a container, without a network unless the recipe allows it. Commands run as the image's user, which is
root inside the container in most images, without new privileges. Before tests run, all processes of the container are
killed but its first, and `/tests` and `/logs/verifier` are made anew.

Does not protect against: a policy that changes programs of the image (`/usr/bin/python3`) by which the tests run. It
may do so as root of its container, here as in Harbor itself. By namespaces the system's folders cannot be written.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mt_grpo.adapters.harbor.images import Desk
from mt_grpo.adapters.harbor.namespaces import SHELL
from mt_grpo.adapters.harbor.sandbox import Outcome, SandboxError, SandboxLimits, exchange
from mt_grpo.adapters.harbor.tasks import HarborTask
from mt_grpo.base.errors import error_line

logger = logging.getLogger(__name__)

DOCKER_SECONDS = 60.0  # of a command of Docker's that should be quick
LABEL = "mt-grpo-harbor"
# As root of the container. Argument: the folder. The archive is read from stdin.
FILL_ANEW = 'set -e\nrm -rf -- "$1" && mkdir -p -- "$1" && tar -x -C "$1" --no-same-owner\n'
# Of a container: it reaps what commands leave, and goes on where everything else is killed, `sleep` with it.
FIRST_PROCESS = "while true; do sleep 1000 & wait; done"
VERDICT = """
for name in reward.json reward.txt; do
    file=/logs/verifier/$name
    if [ -f "$file" ] && [ ! -L "$file" ]; then
        echo "$name $(stat -c %s "$file")" >&2
        head -c 65536 "$file" | base64 -w 0 >&2
        echo >&2
    fi
done
"""


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
        self._lock, self._running, self._closed = threading.Lock(), set(), False
        words = ["run", "--detach", "--rm", "--label", LABEL, "--pids-limit", "512"]
        words += ["--memory", f"{self.limits.memory_mb}m", "--security-opt", "no-new-privileges"]
        words += ["--network", "bridge" if self.network else "none"]
        words += [] if self.cpus is None else ["--cpus", f"{self.cpus:g}"]
        words += ["--entrypoint", "bash", self.image, "-c", FIRST_PROCESS]
        self._container = docker_command(*words).decode().strip()

    def shell(self, command: str, folder: str, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """As `TaskSandbox.shell`."""
        script = '"$@" < /dev/null 3>&2 2>&1\nexit $?'
        return self._exec(script, ["bash", "-c", SHELL, "bash", folder, workdir, command], env, seconds)

    def unpack(self, archive: bytes, folder: str, seconds: float = DOCKER_SECONDS) -> Outcome:
        """As `TaskSandbox.unpack`."""
        script = '"$@" 2>&1\nexit $?'
        command = ["tar", "-x", "-C", folder, "--no-same-owner", "--no-overwrite-dir"]
        return self._exec(script, command, {}, seconds, archive)

    def judge(self, archive: bytes, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """As `TaskSandbox.judge`."""
        self._kill_all()
        script = FILL_ANEW + "rm -rf /logs/verifier && mkdir -p /logs/verifier /logs/agent /logs/artifacts"
        filled = self._exec(script, ["/tests"], {}, DOCKER_SECONDS, archive, as_root=True)
        if filled.code != 0:
            raise SandboxError(
                f"the tests cannot be put into the container: {filled.control.decode(errors='replace')}"
            )
        # The script itself is what Docker starts: tests may kill all processes but their own.
        outcome = self._exec(
            'cd -- "$1" && exec bash /tests/test.sh < /dev/null 2>&1', [workdir], env, seconds, as_root=True
        )
        if not outcome.why:
            self._kill_all()
            outcome.control = self._exec(VERDICT, [], {}, DOCKER_SECONDS, as_root=True).control
        return outcome

    def solve(self, archive: bytes, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """As `TaskSandbox.solve`."""
        script = FILL_ANEW + 'set +e\nshift\n"$@" < /dev/null 2>&1\nexit $?'
        command = ["/solution", "bash", "-c", 'cd -- "$1" && exec bash /solution/solve.sh', "bash", workdir]
        return self._exec(script, command, env, seconds, archive, as_root=True)

    def _exec(
        self, script: str, command: Sequence[str], env: dict[str, str], seconds: float, given: bytes = b"",
        as_root: bool = False,
    ) -> Outcome:  # fmt: skip
        """What comes of a script in the container. Where it takes too long, everything there is killed."""
        words = ["docker", "exec", "--interactive", *(["--user", "0"] if as_root else [])]
        words += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        words += [self._container, "bash", "-c", script, "run", *command]
        began = time.monotonic()
        with self._lock:
            if self._closed:
                raise SandboxError("it was closed")
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = subprocess.Popen(words, **pipes, start_new_session=True)
            self._running.add(process)
        outcome = Outcome(None, began=began)
        try:
            outcome.why = exchange(process, given, seconds, outcome, whole=False)
            if outcome.why:
                self._kill_all()
                process.kill()
            code = process.wait()
            outcome.code = None if outcome.why else code
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                pipe.close()
            with self._lock:
                self._running.discard(process)
        outcome.seconds = time.monotonic() - began
        if self._closed:
            raise SandboxError("it was closed meanwhile")
        if outcome.code in (125, 126, 137):  # Docker's own, or the container has died: of memory, say
            docker_command("exec", self._container, "true")
        return outcome

    def _kill_all(self) -> None:
        """Kill all processes of the container but its first."""
        docker_command("exec", "--user", "0", self._container, "bash", "-c", "kill -KILL -1; exit 0")

    def close(self) -> None:
        """As `TaskSandbox.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed, running = True, list(self._running)
        for process in running:
            process.kill()
        docker_command("rm", "--force", "--volumes", self._container)


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
        sandbox = DockerSandbox(image, task.limits, task.cpus, self._network)
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
