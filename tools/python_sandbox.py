"""Runs Python programs that the model writes, each in its own process: `tools_script: tools/python_sandbox.py`.

Needs: Linux with util-linux (`setpriv`, `prlimit`, `unshare`), and psutil. Environment variables are read when the
file is loaded:

| variable | meaning | default |
|---|---|---|
| `PYTHON_SANDBOX_SECONDS` | seconds that a program may take | 10 |
| `PYTHON_SANDBOX_CPU_SECONDS` | CPU seconds of each of its processes | 10 |
| `PYTHON_SANDBOX_MEMORY_MB` | memory that each of its processes may reserve (its address space) | 1024 |
| `PYTHON_SANDBOX_OUTPUT` | characters of its output that the model reads: the first and the last ones | 4000 |
| `PYTHON_SANDBOX_PYTHON` | the interpreter | this one; as root, if other users cannot run it, `/usr/bin/python3` |
| `PYTHON_SANDBOX_REQUIRE` | required isolation, else the run does not start: some of `user,network,processes` | none |

Every call is a new process in a new folder, which is deleted afterwards. The value of a last line that is an
expression is printed, as in a notebook. `tool_timeout` of the recipe should be longer than `PYTHON_SANDBOX_SECONDS`,
so that the model reads what was printed until then. A program that fails raises `ProgramError` with its output.

Protects always against programs that do not end, compute or print without end (`FILE_BYTES` per file, output too),
address space that one process reserves, open files, core dumps and setuid programs. Programs do not inherit the
trainer's environment variables. If the machine allows it, also (what is missing is logged when the run starts):
- `user`: the trainer runs as root, and each program as a user of its own. It can read and write what all users may.
  At most `PROCESSES` processes run, and all of them are killed afterwards. It never runs as root.
- `network`: it has no network, not even loopback (a network namespace).
- `processes`: it sees no other processes, and none of its own stays behind, even if the trainer is killed (a PID
  namespace). With `user` as well, /tmp, /var/tmp, /dev/shm and /run/lock are its own, `SHARED_MB` each.

Does not protect against reading files, devices and Unix sockets that all users may use; memory of several processes
together, or many files in its folder (give the container a limit); vulnerabilities of the Linux kernel (run hostile
programs in a virtual machine). Without `user`, against changes to your files; without `user` and `processes`, against
signals to the trainer and reading its memory; without `processes` (Docker's default), against programs that outlive a
killed trainer until their user number is used again.
"""

import contextlib
import fcntl
import logging
import math
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO

import psutil

FILE_BYTES = 2**20  # limit of each file that a program writes, and of its output
PROCESSES = 32  # of a program at the same time, including threads; not without both `user` and `processes`
FILES = 64  # open at the same time
FIRST_USER, USERS = 64000, 1000  # user ids that Debian does not assign
SHARED_MB = 64  # of each folder that all users may write to
PROBE_SECONDS = 60.0  # for the first program, on a busy machine
DELETE_SECONDS = 60.0  # for a program's folder; files that are left then stay
END_SECONDS = 5.0  # that killed processes may take to be gone

# The first that this machine allows. The program cannot see, stop or trace the first process of the outer namespace.
OWN_PROCESSES = ["--pid", "--fork", "--kill-child"]
NAMESPACES = {
    ("network", "processes"): [["--net", "--ipc", *OWN_PROCESSES], [*OWN_PROCESSES, "--mount-proc"]],
    ("network",): [["--net", "--ipc"]],
}
# In a mount namespace of root's: folders that all users may write to are the program's own.
OWN_FOLDERS = (
    f"for d in /tmp /var/tmp /dev/shm /run/lock; do [ ! -d $d ] || mount -t tmpfs -o size={SHARED_MB}m,mode=1777 "
    'tmpfs $d || exit 1; done; exec "$@"'
)
WITHOUT = {
    "user": "programs run as your user, and can read and change your files",
    "network": "programs can use the network",
    "processes": "programs see other processes; as your user, they may start any number and leave some behind",
}
# Makes the program `__main__`, and keeps its own lines out of tracebacks.
RUNNER = """
import ast, os, sys, traceback, types
try:
    open("/proc/self/oom_score_adj", "w").write("1000")
except OSError:
    pass
sys.stdout.reconfigure(line_buffering=True)  # what was printed is there when the time is over
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
runner, main = sys.modules["__main__"], types.ModuleType("__main__")
sys.modules["__main__"], sys.argv = main, ["program.py"]
sys.path.insert(0, os.getcwd())
vars(main).update(__file__="program.py", __show__=lambda value: None if value is None else print(repr(value)))
exec(compile(ast.fix_missing_locations(tree), "program.py", "exec"), vars(main))
"""

logger = logging.getLogger(__name__)


class ProgramError(Exception):
    """A program failed, or was stopped. The model reads its text."""


def setting(name: str, default: float) -> float:
    """Read a number from an environment variable. Raises `ValueError` unless it is above 0."""
    value = float(os.environ.get(f"PYTHON_SANDBOX_{name}") or default)
    if not 0 < value < math.inf:
        raise ValueError(f"PYTHON_SANDBOX_{name} is {value}, expected a number above 0.")
    return value


class Users:
    """Numbers of users that nobody else has at the same time, also no other process of this machine.

    A number is held by a lock on a file until this process ends: so it is free again after a kill.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # a child has the parent's locks

    def _forget(self) -> None:
        self._free: list[int] = []
        self._held: dict[int, int] = {}  # the file of each
        self._next, self._lock = secrets.randbelow(USERS), threading.Lock()  # another container may begin elsewhere

    def take(self, ended: bool = False) -> int:
        """Return a number of which no process runs. Raises `RuntimeError` if all are taken.

        `ended`: it is known that nothing runs any more, and the machine's processes need not be looked through.
        """
        with self._lock:
            for number in self._free:
                if ended or not processes_of(number):  # a zombie counts for the limit of processes
                    self._free.remove(number)
                    return number
            for _ in range(USERS):
                number, self._next = FIRST_USER + self._next, (self._next + 1) % USERS
                file = os.open(self._folder / f"{number}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(file)
                    continue
                self._held[number] = file
                if processes_of(number):  # a trainer that was killed has left them
                    Sandbox.kill_user(number)
                return number
        raise RuntimeError(f"all {USERS} users of the Python sandbox are taken on this machine")

    def give_back(self, number: int) -> None:
        with self._lock:
            self._free.append(number)


def processes_of(user: int) -> list[psutil.Process]:
    """The processes of a user, including zombies."""
    return [p for p in psutil.process_iter(["uids", "status"]) if p.info["uids"] and p.info["uids"].real == user]


def own_folder() -> Path:
    """The parent of the programs' folders, which no program may write to. Raises `RuntimeError` if it is unsafe."""
    root = os.geteuid() == 0
    base = "/run" if root and os.access("/run", os.W_OK) else tempfile.gettempdir()
    folder = Path(base) / f"python-sandbox-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o711)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise RuntimeError(f"the Python sandbox needs {folder} as a folder that only it writes to. Delete it.")
    return folder


class Sandbox:
    """Runs programs with the isolation that this machine allows.

    Raises `RuntimeError` if programs cannot be run, or if a required isolation is not available.
    """

    def __init__(self):
        self.seconds, self.output = setting("SECONDS", 10), max(2, int(setting("OUTPUT", 4000)))
        self.cpu_seconds, self.memory = math.ceil(setting("CPU_SECONDS", 10)), setting("MEMORY_MB", 1024)
        required = set(os.environ.get("PYTHON_SANDBOX_REQUIRE", "").replace(" ", "").split(",")) - {""}
        if unknown := required - set(WITHOUT):
            raise ValueError(f"PYTHON_SANDBOX_REQUIRE has {sorted(unknown)}, expected some of {', '.join(WITHOUT)}.")
        self.folder = own_folder()
        self.users = Users(self.folder) if os.geteuid() == 0 else None
        self.namespaces: list[list[str]] = []
        if problem := self.problem():
            user = " as another user, and never runs one as root" if self.users else ""
            raise RuntimeError(
                f"the Python sandbox cannot run a program{user}: {problem}. It needs setpriv, prlimit and unshare of "
                f"util-linux, and an interpreter that all users can run (PYTHON_SANDBOX_PYTHON): {self.interpreter()}."
            )
        if self.interpreter() != sys.executable and not os.environ.get("PYTHON_SANDBOX_PYTHON"):
            logger.warning(
                f"Python sandbox: programs run with {self.interpreter()}, without the packages of {sys.executable}, "
                "which other users cannot run. Set PYTHON_SANDBOX_PYTHON to use another one."
            )
        missing = {} if self.users else {"user": "this needs root"}
        for names, layers in NAMESPACES.items():
            self.namespaces = [[*([] if self.users else ["--user", "--map-current-user"]), *layer] for layer in layers]
            if not (problem := self.problem()):
                for name in names:
                    missing.pop(name, None)
                break
            missing |= dict.fromkeys(names, problem)
        else:
            self.namespaces = []
        self.has = set(WITHOUT) - set(missing)
        for name, reason in missing.items():
            if name in required:
                raise RuntimeError(f"PYTHON_SANDBOX_REQUIRE: {name} is not available ({reason}).")
            logger.warning(f"The Python sandbox runs without {name!r}: {WITHOUT[name]} ({reason}).")

    def problem(self) -> str | None:
        """The problem of running a program with the current settings. None if there is none."""
        try:
            code, printed = self.run("1 + 1", PROBE_SECONDS)
        except OSError as error:
            return str(error)
        return None if (code, printed) == (0, "2\n") else f"exit code {code}: {' '.join(printed.split())[-200:]}"

    def interpreter(self) -> str:
        """The Python interpreter of programs. Other users can often not run one in root's virtual environment."""
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
        limits += [f"--nproc={PROCESSES}"] if user or self.namespaces else []
        run = '"$@" >&0 2>&0 </dev/null'
        run = f"{run}; exit $?" if self.has_processes else f"exec {run}"
        own_folders = ["sh", "-c", OWN_FOLDERS, "sh"] if user and self.has_processes else []
        return [
            *ends, *(word for layer in self.namespaces for word in ("unshare", *layer)), *own_folders,
            *ends, "--no-new-privs", *as_user, "prlimit", *limits,
            "sh", "-c", run, "sh", self.interpreter(), "-I", "-B", "runner.py",
        ]  # fmt: skip

    @property
    def has_processes(self) -> bool:
        """Whether programs have a PID namespace."""
        return any("--pid" in layer for layer in self.namespaces)

    def run(self, code: str, seconds: float) -> tuple[int | None, str]:
        """Run a program. Returns (exit code or None if it was stopped at its time limit, output)."""
        user = self.users.take(self.has_processes) if self.users else None
        folder = self.folder / str(user) if user else Path(tempfile.mkdtemp(prefix="program-", dir=self.folder))
        try:
            if user:
                self.delete(folder)  # a trainer that was killed has left it
                folder.mkdir(mode=0o700)
            (folder / "runner.py").write_text(RUNNER, encoding="utf-8")
            (folder / "program.py").write_text(code, encoding="utf-8", errors="replace")
            if user:  # the folder last: until then it is closed to the user, who could put a link in a file's place
                for path in (*folder.iterdir(), folder):
                    os.chown(path, user, user, follow_symlinks=False)
            # Files, since a pipe would stay open as long as any process of the program.
            with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
                exit_code = self.wait(folder, user, output, errors, seconds)
                return exit_code, self.read(output) or (self.read(errors) if exit_code else "")
        finally:
            try:
                self.delete(folder)
            finally:
                if user:
                    self.users.give_back(user)

    @staticmethod
    def delete(folder: Path) -> None:
        """Delete a program's folder, if it exists. Not with shutil, which recurses and opens a file for each level."""
        if os.path.lexists(folder):
            with contextlib.suppress(subprocess.TimeoutExpired):
                command = ["rm", "-rf", "--one-file-system", "--", str(folder)]
                subprocess.run(command, stderr=subprocess.DEVNULL, timeout=DELETE_SECONDS)

    def wait(self, folder: Path, user: int | None, output: BinaryIO, errors: BinaryIO, seconds: float) -> int | None:
        """Run the program in a folder and return its exit code. Its other processes are killed afterwards."""
        environment = {"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"}
        environment |= {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}  # each thread's would reserve memory
        files = {"stdin": output, "stdout": errors, "stderr": errors}
        process = subprocess.Popen(
            self.command(user), cwd=folder, env=environment, start_new_session=True, umask=0o077, **files
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None or not self.has_processes:  # a namespace of processes ends with its first
                self.kill(process, user)

    def kill(self, process: subprocess.Popen, user: int | None) -> None:
        """Kill the processes that the program started.

        `unshare` is killed last: it reaps the first process of its namespace, which nobody else may do in a container.
        """
        if self.has_processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        elif user:
            self.kill_user(user)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    @staticmethod
    def kill_user(user: int) -> None:
        """Kill all processes of a user: at once, and then those that have stopped the one that does so."""
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            command = [*as_user, "kill", "-KILL", "--", "-1"]
            subprocess.run(command, stderr=subprocess.DEVNULL, timeout=END_SECONDS)
        deadline, left = time.monotonic() + END_SECONDS, processes_of(user)
        while left and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                    process.kill()
                    if os.getpid() == 1 and process.ppid() == 1:  # in a container nobody else reaps
                        os.waitpid(process.pid, os.WNOHANG)
            left = [p for p in processes_of(user) if p.info["status"] != psutil.STATUS_ZOMBIE]

    def ending(self, exit_code: int | None) -> str:
        """Why a failed program ended. A shell returns 128 plus the signal's number, Python the negative number."""
        if exit_code is None:
            return f"stopped after {self.seconds:g} seconds"
        number = -exit_code if exit_code < 0 else exit_code - 128
        if number == signal.SIGXCPU:
            return f"stopped after {self.cpu_seconds} seconds of computing"
        if number in set(signal.Signals):
            return f"killed by {signal.Signals(number).name}"
        return f"exit code {exit_code}"

    def read(self, output: BinaryIO) -> str:
        """Read the program's output, without the middle if it is long."""
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
