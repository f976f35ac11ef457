"""A Python whose libraries are imported already, for tests that start programs.

To import torch, transformers and TRL takes more CPU seconds than what most tests do behind it. `executable()` is the
path of a command that takes the arguments of `python`. It asks a process that has imported the libraries, and nothing
of the project, for a fork. The fork gets the caller's arguments, environment, folder and open files. Signals and the
exit code go through, and a command that is killed takes its fork with it, a moment later.

What differs from `python`: variables that libraries read at import are those of the tests; the process's id is another
one; `-X`, `-W` and the like are not read. So tests of how the trainer is launched use `sys.executable`.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path

LIBRARIES = (
    "accelerate.commands.launch", "aiohttp", "datasets", "numpy.random", "peft", "psutil", "pydantic", "requests",
    "safetensors.torch", "torch.distributed.run", "transformers", "trl", "trl.trainer.grpo_trainer",
)  # fmt: skip

# The command. It has no library to load, so it is there in some hundredths of a second.
CLIENT = """#!{python} -ISB
import json, os, signal, socket, struct, sys

SIGNALS = {{signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}}
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [file for file in files if file < 3 or os.path.exists(f"/proc/self/fd/{{file}}") and os.get_inheritable(file)]
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
ignored = [int(s) for s in SIGNALS if signal.getsignal(s) == signal.SIG_IGN]
request = {{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "files": files, "ignored": ignored}}
request = json.dumps(request).encode()
socket.send_fds(server, [struct.pack("!I", len(request))], files)
server.sendall(request)
nothing = os.open(os.devnull, os.O_RDWR)
for file in files:  # a pipe must close when the fork closes it
    os.dup2(nothing, file) if file < 3 else os.close(file)
(pid,) = struct.unpack("!i", server.recv(4, socket.MSG_WAITALL))
for number in SIGNALS:  # a fork may handle what it was started to ignore
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
# INVARIANT: no wait without an end. A signal that comes right before a wait is handled behind it.
server.settimeout(0.2)
answer = None
while answer is None:
    try:
        answer = server.recv(4, socket.MSG_WAITALL)
    except TimeoutError:
        pass
(code,) = struct.unpack("!i", answer)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def executable() -> str:
    """The path of the command. The process behind it starts with the first call, and ends with this one.

    `WARM_PYTHON` is the path of one that scripts/test.sh starts for all its groups of files.
    """
    if shared := os.environ.get("WARM_PYTHON"):
        while not os.path.exists(shared):
            time.sleep(0.1)
        return shared
    folder = Path(tempfile.mkdtemp(prefix="mt-grpo-python-"))
    reading, writing = os.pipe()
    command = [sys.executable, __file__, str(folder)]
    server = subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE, cwd="/", start_new_session=True)
    os.close(reading)
    said = server.stdout.readline()
    if said != b"ready\n":
        raise RuntimeError(f"The process behind {folder} said {said!r} and ended with code {server.wait(10)}.")
    executable.keep = server, writing  # the server ends when this pipe closes
    return str(folder / "python")


# ---------------------------------------------------------------------------------------------------------------------
# The process that is forked
# ---------------------------------------------------------------------------------------------------------------------


def serve(folder: str) -> None:
    """Fork for each command of `folder` until standard input closes."""
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.freeze()  # a collection in a fork would copy all pages
    path, client = f"{folder}/socket", f"{folder}/python"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    Path(f"{client}.new").write_text(CLIENT.format(python=sys.executable, path=path))
    Path(f"{client}.new").chmod(0o700)
    os.rename(f"{client}.new", client)  # who waits for it finds it whole
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            shutil.rmtree(folder)
            return
        connection, _ = listener.accept()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            try:
                supervise(connection, client)
            finally:
                os._exit(0)
        connection.close()


def supervise(connection: socket.socket, client: str) -> None:
    """Fork the program, and tell the command its id and its exit code. Without the command it is killed."""
    head, files, _, _ = socket.recv_fds(connection, 4, 250)
    request = json.loads(connection.recv(*struct.unpack("!I", head), socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(request, files, client)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    try:
        connection.sendall(struct.pack("!i", pid))
        readable, _, _ = select.select([ended, connection], [], [])
        if connection in readable:  # the command is gone
            os.killpg(pid, signal.SIGKILL)
    except (BrokenPipeError, ConnectionResetError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))


def become(request: dict, files: list[int], client: str) -> None:
    """Be the program that was asked for; never returns."""
    os.setsid()
    above = max(request["files"]) + 1  # first out of the way of every number that is still to be given
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:  # an end of a pipe that stays open here would keep its other end waiting
        os.close(file)
    for number, file in zip(request["files"], high):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.setdefault("PYTHON_EXEC", client)  # torchrun's workers
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["cwd"])
    code = 1
    try:
        code = run(request["argv"], client)
    finally:
        os._exit(code)


def run(argv: list[str], client: str) -> int:
    """Run a script, `-c code` or `-m module`, as `python` does; returns the exit code."""
    import atexit
    import multiprocessing

    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    multiprocessing.set_executable(client)
    random.seed()
    while argv[0].startswith("-") and argv[0][1] not in "cm":
        argv = argv[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    further = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = further
    code = 0
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        elif argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            sys.path.insert(0, "")
            exec(compile(argv[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            main.__file__ = argv[0]
            exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), main.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    gc.collect()  # what was never awaited says so
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code & 0xFF


if __name__ == "__main__":
    sys.path.pop(0)  # of a fork it is its own program's folder
    serve(*sys.argv[1:])
