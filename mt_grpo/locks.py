"""Lock files in directories where other users may write."""

from __future__ import annotations

import os
import stat
import typing
from pathlib import Path


def open_lock(path: Path, flags: int = os.O_RDWR) -> typing.TextIO:
    """Open a lock file in a directory where other users may write. No link is followed, and the call never waits.

    Raises `OSError` unless it is an ordinary file that belongs to this user or to the owner of the directory.
    """
    # Without O_NONBLOCK the call would wait if the file is a FIFO.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), path.parent.lstat().st_uid):
        os.close(descriptor)
        raise OSError(f"{path} is no ordinary file of this user. Remove it.")
    return open(descriptor, "r+" if flags & os.O_RDWR else "r")
