"""Python programs that the model writes, each in a process of its own: `tools_script: tools/python_sandbox.py`.

Needs: Linux with util-linux (`setpriv`, `prlimit`, `unshare`), and psutil. Environment variables are read when the
file is loaded:

| variable | meaning | default |
|---|---|---|
| `PYTHON_SANDBOX_SECONDS` | seconds that a program may take | 10 |
| `PYTHON_SANDBOX_CPU_SECONDS` | of them, seconds that each of its processes may compute | 10 |
| `PYTHON_SANDBOX_MEMORY_MB` | memory that each of its processes may reserve (its address space) | 1024 |
| `PYTHON_SANDBOX_OUTPUT` | characters of what it prints that the model reads: the first and the last ones | 4000 |
| `PYTHON_SANDBOX_PYTHON` | the interpreter | this one, or `/usr/bin/python3` where other users cannot run it |
| `PYTHON_SANDBOX_REQUIRE` | what must be there, else the run does not start: some of `user,network,processes` | none |

Every call is a new process in a new, empty folder, which is deleted behind it. Nothing is kept from call to call. The
value of a last line that is an expression is printed, as in a notebook. `max_concurrent_tools` of the recipe says how
many programs run at the same time (about one per core; a program's wait for its turn is not counted). `tool_timeout`
should be longer than `PYTHON_SANDBOX_SECONDS`, so that the model reads what was printed until then.

Protects against, always:
- programs that do not end, compute without end, or print without end (`FILE_BYTES` per file, what they print too)
- memory that one process reserves, core dumps, setuid programs (no new privileges), and the trainer's environment
  variables: the program sees none of them

Protects against, where it can be had. What cannot is said when the run starts:
- `user`: the trainer runs as root, and each program as a user that no other program is at the same time. It can
  read and write what all users may, at most `PROCESSES` processes run, and all of them are killed behind it. A program
  never runs as root, whom the limit of processes (RLIMIT_NPROC) would not bind.
- `network`: it has no network, not even this machine's own (a network namespace).
- `processes`: it sees no other processes, and none of its own stays behind (a process namespace with its own /proc).

Does not protect against:
- reading files that all users may read
- without `user`: reading, writing and deleting your files; without `processes`, too: any number of processes, signals
  to the trainer, and reading its memory
- many files, which may fill the disk of the temporary folder or /dev/shm, and memory of several processes together (at
  most `PROCESSES` times the limit): give the container a limit
- faults of the Linux kernel: programs that somebody means ill with belong into a virtual machine

Errors: a program that fails raises `ProgramError` with what it printed, which the model reads.
"""

import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO

import psutil

FILE_BYTES = 2**20  # of each file that a program writes, what it prints too
PROCESSES = 32  # of a program at the same time, threads too; not without both `user` and `processes`
FILES = 64  # open at the same time
FIRST_USER, USERS = 64000, 1000  # user numbers that Debian gives to no one by itself
PROBE_SECONDS = 60.0  # for the first program, on a busy machine
END_SECONDS = 5.0  # that what was killed may take to be gone

NAMESPACES = {  # the first that this machine allows
    ("network", "processes"): ["--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"],
    ("network",): ["--net", "--ipc"],
}
WITHOUT = {
    "user": "programs run as you, and can do to your files what you can",
    "network": "programs reach the network",
    "processes": "programs see which processes run; as you, they may start any number and leave some behind",
}
# Run as a file of its own, so that an error's lines are those of the model's program.
RUNNER = """
import ast, sys, traceback
source = open("program.py", encoding="utf-8").read()
try:
    tree = ast.parse(source, "program.py")
except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    traceback.print_exception(type(error), error, None)
    sys.exit(1)
if tree.body and isinstance(tree.body[-1], ast.Expr):
    show = ast.copy_location(ast.Name("__show__", ast.Load()), tree.body[-1])
    tree.body[-1].value = ast.copy_location(ast.Call(show, [tree.body[-1].value], []), tree.body[-1])
sys.excepthook = lambda kind, error, trace: traceback.print_exception(kind, error, trace and trace.tb_next)
scope = {"__name__": "__main__", "__builtins__": __builtins__}
scope["__show__"] = lambda value: None if value is None else print(repr(value))
exec(compile(ast.fix_missing_locations(tree), "program.py", "exec"), scope)
"""

logger = logging.getLogger(__name__)


class ProgramError(Exception):
    """A program failed, or was stopped. Its text is what the model reads."""


def setting(name: str, default: float) -> float:
    """A number of the environment. Raises `ValueError`."""
    text = os.environ.get(f"PYTHON_SANDBOX_{name}") or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"PYTHON_SANDBOX_{name} is {text!r}, expected a number above 0.")
    return value


class Users:
    """Numbers of users that nobody else has at the same time, also no other process of this machine.

    A number is held by a socket of that name until this process ends: so it is free again after a kill.
    """

    def __init__(self):
        self._free: list[int] = []
        self._held: list[socket.socket] = []
        self._next, self._lock = FIRST_USER, threading.Lock()

    def take(self) -> int:
        """A number. Raises `RuntimeError` where all are taken."""
        with self._lock:
            if self._free:
                return self._free.pop()
            while self._next < FIRST_USER + USERS:
                number, held = self._next, socket.socket(socket.AF_UNIX)
                self._next += 1
                try:
                    held.bind(f"\0python-sandbox-{number}")
                except OSError:
                    held.close()
                    continue
                self._held.append(held)
                return number
        raise RuntimeError(f"all {USERS} users of the Python sandbox are taken on this machine")

    def give_back(self, number: int) -> None:
        with self._lock:
            self._free.append(number)


class Sandbox:
    """How programs are run on this machine.

    Raises `RuntimeError` where none can be, or where something that is required cannot be had.
    """

    def __init__(self):
        self.seconds, self.output = setting("SECONDS", 10), int(setting("OUTPUT", 4000))
        self.cpu_seconds, self.memory = math.ceil(setting("CPU_SECONDS", 10)), setting("MEMORY_MB", 1024)
        self.users = Users() if os.geteuid() == 0 else None
        self.options, self.has, why = [], set(), {}
        missing = [name for name in ("setpriv", "prlimit", "unshare") if not shutil.which(name)]
        if missing:
            raise RuntimeError(f"the Python sandbox needs {', '.join(missing)} of util-linux on a Linux machine")
        if problem := self.problem():
            user = f" as user {FIRST_USER}, and it never does as root" if self.users else ""
            raise RuntimeError(
                f"the Python sandbox cannot run a program{user}: {problem}. PYTHON_SANDBOX_PYTHON may name an "
                f"interpreter that all users can run; this was {self.interpreter()}."
            )
        self.has |= {"user"} if self.users else set()
        for names, options in NAMESPACES.items():
            self.options = [*([] if os.geteuid() == 0 else ["--user", "--map-current-user"]), *options]
            if not (problem := self.problem()):
                self.has |= set(names)
                break
            why |= dict.fromkeys(names, problem)
        else:
            self.options = []
        self.tell(why)

    def tell(self, why: dict[str, str]) -> None:
        """Say what cannot be had. Raises `RuntimeError` for what is required."""
        required = {name.strip() for name in os.environ.get("PYTHON_SANDBOX_REQUIRE", "").split(",")} - {""}
        if unknown := required - set(WITHOUT):
            raise ValueError(f"PYTHON_SANDBOX_REQUIRE has {sorted(unknown)}, expected some of {', '.join(WITHOUT)}.")
        for name, text in WITHOUT.items():
            if name not in self.has:
                reason = why.get(name, "this needs root")
                if name in required:
                    raise RuntimeError(f"PYTHON_SANDBOX_REQUIRE: {name} cannot be had ({reason}).")
                logger.warning(f"Python sandbox without {name!r}: {text} ({reason}).")

    def problem(self) -> str | None:
        """What is wrong with running a program by the settings so far; None if nothing is."""
        try:
            code, printed = self.run("1 + 1", PROBE_SECONDS)
        except OSError as error:
            return str(error)
        return None if (code, printed) == (0, "2\n") else f"exit code {code}: {' '.join(printed.split())[-200:]}"

    def interpreter(self) -> str:
        """The Python that programs run by. A virtual environment of root's is often closed to other users."""
        named = os.environ.get("PYTHON_SANDBOX_PYTHON")
        folders = {*Path(sys.executable).parents, *Path(sys.executable).resolve().parents}
        closed = any(not folder.stat().st_mode & 1 for folder in folders)
        return named or ("/usr/bin/python3" if self.users and closed else sys.executable)

    def command(self, user: int | None) -> list[str]:
        """The command of a program in its folder, which has runner.py and program.py. It prints into the stdin.

        It ends with the trainer, also where that is killed (`--pdeathsig`, again behind the change of user, which
        forgets it). In a namespace of processes `sh` is the first, since that one ignores the signal of the CPU limit.
        What `sh` and util-linux say themselves is not the program's output.
        """
        ends = ["setpriv", "--pdeathsig", "KILL"]
        as_user = [f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        size = int(self.memory * 2**20)
        limits = [f"--cpu={self.cpu_seconds}:{self.cpu_seconds + 1}", f"--as={size}", f"--fsize={FILE_BYTES}"]
        limits += [f"--nofile={FILES}", "--core=0"]
        # Counted for a user's processes within a namespace of users, of which you have others outside of it.
        limits += [f"--nproc={PROCESSES}"] if user or "--user" in self.options else []
        run = '"$@" >&0 2>&0 </dev/null'
        run = f"{run}; exit $?" if "--pid" in self.options else f"exec {run}"
        return [
            *ends, *(["unshare", *self.options] if self.options else []),
            *ends, "--no-new-privs", *as_user, "prlimit", *limits,
            "sh", "-c", run, "sh", self.interpreter(), "-I", "-B", "runner.py",
        ]  # fmt: skip

    def run(self, code: str, seconds: float) -> tuple[int | None, str]:
        """(exit code, what it printed) of a program. None: it was stopped at its time."""
        user = self.users.take() if self.users else None
        folder = Path(tempfile.mkdtemp(prefix="python-sandbox-"))
        try:
            (folder / "runner.py").write_text(RUNNER, encoding="utf-8")
            (folder / "program.py").write_text(code, encoding="utf-8", errors="replace")
            if user:
                for path in (folder, *folder.iterdir()):
                    os.chown(path, user, user)
            # Files, since a pipe would stay open as long as any process of the program.
            with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
                exit_code = self.wait(folder, user, output, errors, seconds)
                return exit_code, self.read(output) or (self.read(errors) if exit_code else "")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if user:
                self.users.give_back(user)

    def wait(self, folder: Path, user: int | None, output: BinaryIO, errors: BinaryIO, seconds: float) -> int | None:
        """The exit code of the program in a folder. What it started is killed behind it."""
        environment = {"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"}
        environment["OMP_NUM_THREADS"] = "1"  # numpy's threads each reserve memory
        files = {"stdin": output, "stdout": errors, "stderr": errors}
        process = subprocess.Popen(
            self.command(user), cwd=folder, env=environment, start_new_session=True, umask=0o077, **files
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None or "--pid" not in self.options:  # a namespace of processes ends with its first
                self.kill(process, user)

    def kill(self, process: subprocess.Popen, user: int | None) -> None:
        """Kill what the program started.

        `unshare` is killed last: it reaps the first process of its namespace, which nobody else may do in a container.
        """
        if user:  # all of its processes at once, also those that left the group
            as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            subprocess.run([*as_user, "kill", "-KILL", "--", "-1"], stderr=subprocess.DEVNULL)
        elif "--pid" in self.options:
            for child in psutil.Process(process.pid).children() if process.poll() is None else ():
                child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS if user or "--pid" in self.options else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def ending(self, exit_code: int | None) -> str:
        """Why a program ended that failed. A shell gives 128 and the signal's number, Python the negative number."""
        if exit_code is None:
            return f"stopped after {self.seconds:g} seconds"
        number = -exit_code if exit_code < 0 else exit_code - 128
        if number == signal.SIGXCPU:
            return f"stopped after {self.cpu_seconds} seconds of computing"
        if number in set(signal.Signals):
            return f"killed by {signal.Signals(number).name}"
        return f"exit code {exit_code}"

    def read(self, output: BinaryIO) -> str:
        """What the program printed, the middle left out where it is long."""
        output.seek(0)
        printed = output.read()
        text, half = printed.decode(errors="replace"), self.output // 2
        if len(text) > 2 * half:
            text = f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[-half:]}"
        return text + (f"\n[stopped: more than {FILE_BYTES} bytes of output]" if len(printed) >= FILE_BYTES else "")


SANDBOX = Sandbox()


def code_interpreter(code: str) -> str:
    """Run a Python program and read what it prints. Every call starts anew, without the variables of earlier ones.

    Args:
        code: A Python program. The value of its last line is printed if that line is an expression.

    Returns:
        What the program printed.
    """
    exit_code, printed = SANDBOX.run(code, SANDBOX.seconds)
    if exit_code == 0:
        return printed.rstrip() or "The program printed nothing."
    raise ProgramError(f"{printed.rstrip()}\n[{SANDBOX.ending(exit_code)}]".lstrip())


TOOL_FUNCTIONS = [code_interpreter]
