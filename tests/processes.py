"""Other processes of a test: what they may import, whether they have ended, and two ranks.

psutil and not /proc: between the look whether a process's file exists and the reading of it the process may end.
"""

import os
import socket
import subprocess
import threading
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

import psutil
import warm_python

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# As PYTHONPATH: what a test can import (pyproject.toml's pythonpath).
FOLDERS = sorted(each for each in TESTS.iterdir() if each.is_dir())
IMPORTS = os.pathsep.join(map(str, [TESTS.parent, TESTS.parent / "scripts", TESTS, *FOLDERS]))


def alive(pid: int) -> bool:
    """Whether it runs; what nobody has waited for (a zombie) does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ends(pid: int, seconds: float = 60.0) -> bool:
    """Whether it ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for_port(port: int) -> None:
    """Return once something listens there, which has half a minute."""
    for _ in range(300):
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens at port {port}")


def on_two_threads(function) -> list:
    """What `function(rank, gather)` gives on each of two ranks, which are threads that meet in `gather(value)`."""
    barrier, slots = threading.Barrier(2, timeout=20), [None, None]

    def run(rank):
        def gather(value):
            slots[rank] = value
            barrier.wait()
            values = list(slots)
            barrier.wait()
            return values

        return function(rank, gather)

    with ThreadPool(2) as pool:  # its threads are daemons: two that wait for each other hold no process
        return pool.map(run, range(2))


def on_two_ranks(script, *arguments, **env) -> tuple[int, str]:
    """(exit code, what was printed) of a script that accelerate launches on two ranks."""
    command = [warm_python.executable(), "-m", "accelerate.commands.launch", "--config_file",
               ROOT / "hf_recipes/accelerate/cpu.yaml", script, *arguments]  # fmt: skip
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr
