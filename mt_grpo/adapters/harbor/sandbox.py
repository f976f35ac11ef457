"""Commands of a rollout in a file system of its own, in namespaces of Linux. No Docker, no daemon.

Needs util-linux (`unshare`, `nsenter`, `setpriv`, `prlimit`, `mount`, `pivot_root`), bash and tar.

A *holder* process keeps a rollout's namespaces: a mount namespace whose root is a tmpfs of a limited size, a network
namespace with the loopback alone, one of IPC, one of the host's name. It ends when the pipe that the trainer holds is
closed, also where the trainer is killed; then the kernel drops the tmpfs. Each command enters these namespaces, and
has a namespace of processes and of mounts of its own besides. It has ended, with all that it started, when `run`
returns.

What a command finds:

| path | what it is |
|---|---|
| `/usr`, `/etc`, `/bin`, `/lib`, ... | the machine's own, which nobody may write |
| `/tests`, `/logs/verifier`, `/logs/home`, `/solution` | empty; a verifier has them filled for itself alone |
| `/` | what stood there when it was sealed: behind that, nothing directly in it can be made or replaced |
| everything else | the rollout's own, and writable: it begins with what the task put there |

Commands run without privileges: as root's trainer, as a user that nobody else is at the same time; else as the
trainer's user, in a namespace of users of their own. Nothing else of the machine's files is there: no
home, no data, no sockets.

Does not protect against: faults of the Linux kernel, and memory of several processes together (the limit is one of
each process; tmpfs counts, too): give the container a limit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from mt_grpo.adapters.harbor.archives import kilobytes_of
from mt_grpo.adapters.harbor.commands import (
    OUTPUT_BYTES,
    START_SECONDS,
    Commands,
    Outcome,
    SandboxError,
    is_readable,
)
from mt_grpo.adapters.harbor.namespaces import (
    AS_AGENT,
    JUDGE,
    LISTEN,
    NEW_SPACES,
    PREPARE,
    RUN,
    RUN_PROGRAM,
    RUN_QUIETLY,
    RUN_WITH_INPUT,
    SET_UP,
    SHELL,
    SOLVE,
)
from mt_grpo.adapters.harbor.users import UserNumbers, runtime_folder
from mt_grpo.base.errors import error_line

logger = logging.getLogger(__name__)

PROCESSES = 256  # of a command at the same time, threads too
OPEN_FILES = 1024
INODES = 50_000
NO_LIMIT = 1e6  # seconds; a wait of more than 2**31 ms cannot be
END_SECONDS = 10.0  # that what was killed may take to be gone
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = ("unshare", "nsenter", "setpriv", "prlimit", "mount", "umount", "pivot_root", "bash", "tar")


@dataclass(frozen=True)
class SandboxLimits:
    """What a task's commands may use."""

    memory_mb: int = 2048  # address space of each process
    storage_mb: int = 1024  # of all files


class TaskSandbox(Protocol):
    """Where a task is worked on. Methods block; `close` may be called from another thread meanwhile."""

    def shell(self, command: str, folder: str, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """Run a line of bash. The last line of `control` is the folder in which it ended."""

    def unpack(self, archive: bytes, folder: str, seconds: float = START_SECONDS) -> Outcome:
        """Unpack an archive of tar into a folder, as the user of the commands."""

    def judge(self, archive: bytes, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """Run `/tests/test.sh` of an archive. `control` has the reward files.

        Raises `SandboxError` where the tests could not begin, as each method does.
        """

    def solve(self, archive: bytes, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """Run `/solution/solve.sh` of an archive."""

    def close(self) -> None:
        """End it, with everything that runs in it."""


class ProgramSandbox(TaskSandbox, Protocol):
    """A sandbox in which a program of the user's can work, too."""

    def listener(self) -> socket.socket:
        """A socket that listens on a free port of the sandbox's own loopback address, for this process to answer on.

        Raises `SandboxError`.
        """

    def program(
        self, command: Sequence[str], workdir: str, env: dict[str, str], secrets: dict[str, str], given: bytes
    ) -> Outcome:
        """Run a program until it ends, or is ended.

        Args:
            command: The program and its arguments.
            workdir: Where it begins.
            env: Variables of the task.
            secrets: Variables that no other user of the machine may read.
            given: What it reads from stdin.
        """

    def end_programs(self) -> None:
        """End all that runs, and wait until it is gone. More may begin."""


@functools.cache
def numbers_of_users() -> UserNumbers | None:
    """Numbers for the commands of root's trainer; None where the trainer is not root's."""
    return UserNumbers(runtime_folder("python-sandbox")) if os.geteuid() == 0 else None


@dataclass(eq=False)
class NamespaceSandbox:
    """A rollout's file system and its commands, by namespaces.

    Args:
        limits: What it may use.
        as_user: Whether commands run as a user of their own, which needs root. Else they run as the trainer's user, in
            a namespace of users.
        shown: Folders of the machine that are there, too, at their own paths. Nobody may write them.

    Raises:
        SandboxError: the machine allows no such namespaces.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    as_user: bool = field(default_factory=lambda: os.geteuid() == 0)
    shown: Sequence[str] = ()

    def __post_init__(self):
        if missing := [name for name in TOOLS if not shutil.which(name, path=PATH)]:
            raise SandboxError(f"{', '.join(missing)} of Linux (util-linux, bash, tar) cannot be found in {PATH}")
        self._commands = Commands(end_namespace)
        self._user = numbers_of_users().take() if self.as_user else None
        self._owner = self._user or 0  # in the namespace of users, the trainer's user is 0
        try:
            self._holder = self._hold()
        except BaseException:
            self._give_back()
            raise

    def _hold(self) -> subprocess.Popen:
        """The process that keeps the namespaces."""
        users = [] if self.as_user else ["--user", "--map-root-user"]
        spaces = ["--mount", "--net", "--ipc", "--uts"]
        folder = runtime_folder("harbor-sandbox")
        sizes = (str(self.limits.storage_mb), str(INODES), str(self._owner))
        command = ["unshare", *users, *spaces, "bash", "-c", SET_UP, "set-up", str(folder), *sizes, *self.shown]
        try:
            # No parent-death signal: it would come when the thread ends that starts this. The pipe's end ends it.
            holder = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": PATH},
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise SandboxError(error_line(error)) from error
        wait_for(holder, b"ready\n")
        return holder

    def seal(self) -> None:
        """Let nothing directly in `/` be made or replaced any more. Files of the task are there by now.

        Raises `SandboxError`.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            self._holder.stdin.write(b"seal\n")
            self._holder.stdin.flush()
        wait_for(self._holder, b"sealed\n")

    def shell(self, command: str, folder: str, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """As `TaskSandbox.shell`."""
        return self._run(RUN, ["bash", "-c", SHELL, "bash", folder, workdir, command], env, seconds)

    def unpack(self, archive: bytes, folder: str, seconds: float = START_SECONDS) -> Outcome:
        """As `TaskSandbox.unpack`."""
        command = ["tar", "-x", "-C", folder, "--no-same-owner", "--no-overwrite-dir"]
        return self._run(RUN_WITH_INPUT, command, {}, seconds, archive)

    def pack(self, seconds: float) -> bytes:
        """An archive of all files of the rollout, which `unpack` puts into another sandbox.

        Raises `SandboxError`.
        """
        command = (
            "cd / && tar -c --one-file-system $(for name in * .[!.]*; do "
            'if [ -e "$name" ] && [ ! -L "$name" ] && ! mountpoint -q "$name"; then printf "%s " "$name"; fi; done)'
        )
        outcome = self._run(RUN_QUIETLY, ["bash", "-c", command], {}, seconds, whole=True)
        if outcome.code != 0:
            raise SandboxError(f"its files could not be packed ({outcome.why or f'exit code {outcome.code}'})")
        return outcome.head

    def judge(self, archive: bytes, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """As `TaskSandbox.judge`. Tests start programs of the policy's by `$AS_AGENT`."""
        env = {"AS_AGENT": "" if no_nested_namespaces(type(self), self.as_user) else AS_AGENT, **env}
        return self._with_folder("/tests", JUDGE, "/tests/test.sh", archive, workdir, env, seconds)

    def solve(self, archive: bytes, workdir: str, env: dict[str, str], seconds: float) -> Outcome:
        """As `TaskSandbox.solve`."""
        return self._with_folder("/solution", SOLVE, "/solution/solve.sh", archive, workdir, env, seconds)

    def listener(self) -> socket.socket:
        """As `ProgramSandbox.listener`. A socket is of the namespace in which it was made, wherever it is used."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            words = [*self._entering("--net"), sys.executable, "-I", "-S", "-c", LISTEN, str(theirs.fileno())]
            try:
                said = subprocess.run(
                    words,
                    env={"PATH": PATH},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=START_SECONDS,
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise SandboxError(f"nothing can listen in it: {error_line(error)}") from error
            if said.returncode:
                raise SandboxError(f"nothing can listen in it: {said.stderr.decode(errors='replace').strip()[-300:]}")
            return socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])

    def program(
        self, command: Sequence[str], workdir: str, env: dict[str, str], secrets: dict[str, str], given: bytes
    ) -> Outcome:
        """As `ProgramSandbox.program`.

        Of its memory that counts which it may write: an engine of JavaScript reserves far more.
        """
        words = ["bash", "-c", 'cd -- "$1" && shift && exec "$@"', "bash", workdir, *command]
        return self._run(RUN_PROGRAM, words, env, NO_LIMIT, given, secrets=secrets)

    def end_programs(self) -> None:
        """As `ProgramSandbox.end_programs`."""
        self._commands.end_running()

    def _with_folder(
        self, folder: str, script: str, file: str, archive: bytes, workdir: str, env: dict[str, str], seconds: float
    ) -> Outcome:
        first = [folder, str(kilobytes_of(archive)), str(self._owner)]
        command = ["bash", "-c", 'cd -- "$1" && exec /bin/bash "$2"', "bash", workdir, file]
        return self._run(script, command, env, seconds, archive, first=first, alone=True)

    def _run(
        self,
        script: str,
        command: Sequence[str],
        env: dict[str, str],
        seconds: float,
        given: bytes = b"",
        first: Sequence[str] = (),
        whole: bool = False,
        alone: bool = False,
        secrets: dict[str, str] | None = None,
        beginning: Sequence[str] | None = None,
    ) -> Outcome:
        """What comes of a command in the namespaces.

        Args:
            script: Of the namespaces' root. It says `BEGUN`, and runs the command as `"$@"`.
            command: As the user.
            env: Its environment variables, beside PATH and the like.
            seconds: That it may take, from when it has begun.
            given: What the script reads from stdin.
            first: Arguments of the script before the command.
            whole: Whether all of the output is kept, as the head.
            alone: Whether the others are ended first, and none begins meanwhile.
            secrets: Variables that no argument may show. None: it is no program of the user's.
            beginning: What stands before it, None: as before any command.
        """
        words = list(self._beginning() if beginning is None else beginning)
        # INVARIANT: a task's variables are those of the command alone. With its PATH, the programs before it,
        # which root runs, could be the policy's own.
        own = ["/usr/bin/env", *(f"{name}={value}" for name, value in env.items())]
        command = ["/bin/bash" if command[0] == "bash" else command[0], *command[1:]]
        words += ["bash", "-c", PREPARE + script, "run", *first, *self._as_user(secrets is not None), *own, *command]
        variables = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", **(secrets or {})}
        run = self._commands.run_alone if alone else self._commands.run
        outcome = run(words, variables, given, seconds, whole, OUTPUT_BYTES if secrets is None else float("inf"))
        self._check_held()
        if outcome.began is None:
            raise SandboxError(f"a command could not begin: {outcome.why_not_begun()}")
        return outcome

    def _beginning(self) -> list[str]:
        """What stands before any command: a namespace of processes of its own, in those of the holder."""
        entering = self._entering("--mount", "--net", "--ipc", "--uts")
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        return ["setpriv", "--pdeathsig", "KILL", *entering, *own]

    def _check_held(self) -> None:
        """Raise `SandboxError` where the namespaces are gone."""
        if self._holder.poll() is not None:
            raise SandboxError(f"the process that holds it has ended with code {self._holder.returncode}")

    def _entering(self, *spaces: str) -> list[str]:
        """What stands before a command that is to run in the holder's namespaces."""
        users = [] if self.as_user else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._holder.pid), *users, *spaces]

    def _as_user(self, program: bool) -> list[str]:
        """What stands before a command, so that it has no privileges and keeps to its limits."""
        memory = f"{'data' if program else 'as'}={self.limits.memory_mb * 2**20}"
        limits = [f"--{memory}", f"--nproc={PROCESSES}", f"--nofile={OPEN_FILES}", "--core=0"]
        if self.as_user:
            who = ["setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--clear-groups"]
        else:  # 0 of a namespace of users has all capabilities of it, and could undo the mounts
            who = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "setpriv"]
        return [*who, "--no-new-privs", "prlimit", *limits]

    def close(self) -> None:
        """As `TaskSandbox.close`."""
        if not self._commands.close():
            return
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            pipe.close()
        self._give_back()

    def _give_back(self) -> None:
        if self._user is not None:
            numbers_of_users().give_back(self._user)


@functools.cache
def no_nested_namespaces(kind: Callable[..., NamespaceSandbox], as_user: bool) -> bool:
    """Whether this machine allows a command of a sandbox no namespaces of its own; a warning says so."""
    sandbox = kind(SandboxLimits(), as_user)
    try:
        outcome = sandbox.shell(f"{NEW_SPACES} true", "/", "/", {}, START_SECONDS)
    finally:
        sandbox.close()
    if outcome.code != 0:
        logger.warning(
            "Tests of task folders run programs of the policy's with all that the tests may, also by $AS_AGENT: this "
            "machine allows them no namespaces of users (%s). Such a program can write the reward.",
            outcome.text(200).strip() or outcome.why,
        )
    return outcome.code != 0


def wait_for(holder: subprocess.Popen, word: bytes) -> None:
    """Wait until a holder has said a word. Raises `SandboxError` with what it said in place of it."""
    said = b""
    while word not in said:
        part = os.read(holder.stdout.fileno(), 4096) if is_readable(holder.stdout, START_SECONDS) else b""
        said += part
        if part:
            continue
        holder.kill()
        errors = b" ".join(holder.communicate()[1].split()).decode(errors="replace")
        raise SandboxError(errors[-500:] or f"the namespaces were not there within {START_SECONDS:g} s")


def end_namespace(process: subprocess.Popen) -> None:
    """Kill a command with its namespace of processes, and wait until all of them are gone.

    `unshare` is killed last: it waits for the first process of the namespace, which nobody else may do in a container.
    """
    deadline = time.monotonic() + END_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children():  # none yet, where it has only just begun
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
