"""Other processes of a test: what they may import, and whether they have ended.

psutil and not /proc: between the look whether a process's file exists and the reading of it the process may end.
"""

import os
import time
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parent
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
