"""Numbers of users that nobody else has at the same time: each rollout's commands run as a user of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
import threading
from pathlib import Path

FIRST_USER, USERS = 64000, 1000  # as the Python sandbox has them: Debian gives these to no one by itself


def runtime_folder(name: str) -> Path:
    """A folder that belongs to this user alone, for what lives as long as the machine.

    Raises:
        RuntimeError: what is there belongs to somebody else, or others may write into it.
    """
    base = "/run" if os.geteuid() == 0 and os.access("/run", os.W_OK) else tempfile.gettempdir()
    folder = Path(base) / f"{name}-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o711)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise RuntimeError(f"{folder} must be a folder of this user alone: delete what is there.")
    return folder


class UserNumbers:
    """Numbers of users, each held by a lock on a file until this process ends or gives it back.

    The folder and its files are those of the Python sandbox: no number is in use there and here at the same time.

    INVARIANT: what runs as a user runs in a namespace of processes, which has ended before its number is given back.

    Args:
        folder: Of the lock files.
    """

    def __init__(self, folder: Path):
        self._folder, self._lock = folder, threading.Lock()
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # a child has copies of the parent's files, not its numbers

    def _forget(self) -> None:
        self._held: dict[int, int] = {}  # number -> its open file
        self._next, self._lock = secrets.randbelow(USERS), threading.Lock()

    def take(self) -> int:
        """A number. Raises `RuntimeError` where all are taken."""
        with self._lock:
            for _ in range(USERS):
                number, self._next = FIRST_USER + self._next, (self._next + 1) % USERS
                if number in self._held:
                    continue
                file = os.open(self._folder / f"{number}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(file)
                    continue
                self._held[number] = file
                return number
        raise RuntimeError(f"All {USERS} users for sandboxes are taken on this machine.")

    def give_back(self, number: int) -> None:
        """Let others have a number."""
        with self._lock:
            if (file := self._held.pop(number, None)) is not None:
                os.close(file)
