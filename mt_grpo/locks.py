"""Lock files in places where others may write."""

from __future__ import annotations

import os
import stat
import typing
from pathlib import Path


def open_lock(path: Path, flags: int = os.O_RDWR) -> typing.TextIO:
    """A lock file in a place where others may write: no link is followed, and nothing is waited for.

    Raises `OSError` for all that is no ordinary file of this user, or of the folder's owner.
    """
    # A FIFO that is opened without O_NONBLOCK waits for its other end.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), path.parent.lstat().st_uid):
        os.close(descriptor)
        raise OSError(f"{path} is no ordinary file of this user. Remove it.")
    return open(descriptor, "r+" if flags & os.O_RDWR else "r")
