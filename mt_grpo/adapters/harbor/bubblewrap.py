"""A rollout's file system and its commands by bubblewrap (`bwrap`), where no namespaces of our own can be made.

Some machines allow it alone to make namespaces without root: those with a profile of AppArmor for it, or where it is
installed with the rights of root. So nothing here enters a namespace, or mounts anything by itself: each command is a
`bwrap` of its own, which sees a rollout's folder as its root.

What is the same as by namespaces of our own: what a command finds, what it cannot write, that it has no network, and
that all of it has ended when `run` returns. What is not: files are in a folder of the machine's, on its disk, and
`storage_mb` bounds each of them alone; a process in the background reaches no other command, not even by the network;
no program of the user's can work in it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from mt_grpo.adapters.harbor.commands import START_SECONDS, Commands, Outcome, SandboxError
from mt_grpo.adapters.harbor.namespaces import AS_AGENT, AS_AGENT_FILE, FOLDERS, JUDGE_ALONE, SOLVE_ALONE
from mt_grpo.adapters.harbor.sandbox import PATH, NamespaceSandbox, end_namespace
from mt_grpo.adapters.harbor.users import runtime_folder

TOOLS = ("bwrap", "setpriv", "prlimit", "bash", "tar")
SYSTEM = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
EMPTY = ("tests", "solution", "logs/verifier", "logs/home")  # for a command that is not the tests' own


class BubblewrapSandbox(NamespaceSandbox):
    """A rollout's folder and its commands, by bubblewrap.

    Args:
        limits: What it may use.

    Raises:
        SandboxError: bubblewrap is not there.
    """

    def __post_init__(self):
        if missing := [name for name in TOOLS if not shutil.which(name, path=PATH)]:
            raise SandboxError(f"{', '.join(missing)} cannot be found in {PATH}")
        self.as_user, self._user, self._owner, self._sealed = False, None, 0, False
        self._commands = Commands(end_namespace)
        remove_left_over(runtime_folder("harbor-bubblewrap"))
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._folder = runtime_folder("harbor-bubblewrap") / name
        self._files, self._empty = self._folder / "files", self._folder / "empty"
        for folder in (*FOLDERS, "var/tmp", "var/log"):
            (self._files / folder).mkdir(parents=True, exist_ok=True)
        self._empty.mkdir()
        for folder in ("tmp", "var/tmp"):
            (self._files / folder).chmod(0o1777)
        for name in SYSTEM:
            if (source := Path("/") / name).is_symlink():
                (self._files / name).symlink_to(os.readlink(source))

    def seal(self) -> None:
        """As by namespaces. It holds from the next command on."""
        self._sealed = True

    def _beginning(self) -> list[str]:
        return self._with_folders({})

    def _with_folders(self, own: dict[str, Path], written: Sequence[str] = ()) -> list[str]:
        """What stands before a command.

        Args:
            own: Folders of the machine in place of those that are empty, by their paths in the sandbox.
            written: Those of them that can be written.
        """
        if self._commands.closed:
            raise SandboxError("it was closed")
        self._check_held()
        # Of a rollout's folder nothing is bound that is a link here: it would lead to files of the machine.
        words = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent"]
        words += ["--unshare-user", "--uid", "1000", "--gid", "1000"] if os.geteuid() == 0 else ["--unshare-user-try"]
        words += ["--as-pid-1", "--cap-drop", "ALL", "--chdir", "/", "--bind", str(self._files), "/"]
        for name in SYSTEM:
            if (source := Path("/") / name).is_dir() and not source.is_symlink():
                words += ["--ro-bind", str(source), f"/{name}"]
        words += ["--proc", "/proc", "--dev", "/dev", "--size", str(2**26), "--perms", "1777", "--tmpfs", "/dev/shm"]
        words += ["--remount-ro", "/dev"]
        beneath = [each.name for each in self._files.iterdir() if each.name not in ("proc", "dev", "logs", *SYSTEM)]
        for name in sorted(beneath) if self._sealed else ():
            if stat.S_IFMT(os.lstat(self._files / name).st_mode) in (stat.S_IFDIR, stat.S_IFREG):
                words += ["--bind", str(self._files / name), f"/{name}"]
        words += ["--ro-bind", str(self._files / "logs"), "/logs"]
        for name in ("logs/agent", "logs/artifacts"):
            words += ["--bind", str(self._files / name), f"/{name}"]
        for name in EMPTY:
            kind = "--bind" if name in written else "--ro-bind"
            words += [kind, str(own.get(name, self._empty)), f"/{name}"]
        return [*words, *(["--remount-ro", "/"] if self._sealed else [])]

    def _with_folder(
        self, folder: str, script: str, file: str, archive: bytes, workdir: str, env: dict[str, str], seconds: float
    ) -> Outcome:
        """As by namespaces, with folders of the machine's that only this command sees."""
        name, judges = folder.lstrip("/"), folder == "/tests"
        with tempfile.TemporaryDirectory(dir=self._folder) as made:
            own = {each: Path(made) / each for each in (name, *(["logs/verifier", "logs/home"] if judges else []))}
            for each in own.values():
                each.mkdir(parents=True)
            command = ["tar", "-x", "-C", str(own[name]), "--no-same-owner"]
            said = subprocess.run(command, input=archive, capture_output=True, timeout=START_SECONDS)
            if said.returncode:
                raise SandboxError(f"a command could not begin: {said.stderr.decode(errors='replace').strip()[-300:]}")
            if judges:
                program = own["logs/home"] / Path(AS_AGENT).name
                program.write_text(AS_AGENT_FILE)
                program.chmod(0o755)
            alone = JUDGE_ALONE if judges else SOLVE_ALONE
            command = ["bash", "-c", 'cd -- "$1" && exec /bin/bash "$2"', "bash", workdir, file]
            words = self._with_folders(own, ("logs/verifier", "logs/home"))
            return self._run(alone, command, env, seconds, alone=True, beginning=words)

    def _check_held(self) -> None:
        if not self._files.is_dir():
            raise SandboxError(f"its folder {self._files} is gone")

    def _as_user(self, program: bool) -> list[str]:
        limits = super()._as_user(program)
        return [*limits[limits.index("setpriv") :], f"--fsize={self.limits.storage_mb * 2**20}"]

    def listener(self) -> None:
        """Raises `SandboxError`: each command has a loopback address of its own."""
        raise SandboxError("bubblewrap gives each command a network of its own, in which nobody else can listen")

    def close(self) -> None:
        """As `TaskSandbox.close`."""
        if self._commands.close():
            remove_tree(self._folder)


def remove_tree(folder: Path) -> None:
    """Delete a folder with all that is in it, also what its owner has made unreadable."""
    for where, folders, _ in os.walk(folder):
        for name in folders:
            path = Path(where, name)
            if not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def remove_left_over(folder: Path) -> None:
    """Delete what trainers have left that were killed."""
    for each in folder.iterdir():
        process = each.name.partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            remove_tree(each)
