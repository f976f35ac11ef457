"""The lock of a run's output directory, and output streams that work on after their reader has ended."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mt_grpo.locks import open_lock

logger = logging.getLogger(__name__)


@contextmanager
def output_lock(path: str) -> Iterator[None]:
    """Lock the output directory for this run; only rank 0 takes the lock.

    Raises `ValueError` if another run holds the lock, or if the directory cannot be written.
    """
    if int(os.environ.get("RANK", 0)):
        yield
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        lock = open_lock(Path(path) / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        what = f"{error.strerror} ({error.filename})" if error.strerror else error
        raise ValueError(
            f"output_dir={path!r} cannot be written to: {what}. Expected a folder, which may be new."
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"output_dir={path!r} is in use by another run{file.read()}. Set another output_dir, or wait for it."
            ) from None
        except OSError as error:  # a file system without locks
            logger.warning(f"output_dir={path!r} cannot be locked ({error}): keep other runs out of it.")
        file.truncate(0)
        file.write(f" (process {os.getpid()})")
        file.flush()
        yield


class LastingOutput(io.FileIO):
    """Standard output or error that never ends the run: once its reader has ended, the output goes to /dev/null.

    Otherwise the run would end at its first line after `| head` has ended, or after the terminal was closed.
    """

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # so that threads and child processes use it too
            os.close(null)
            name, other = ("standard output", 2) if self.fileno() == 1 else ("standard error", 1)
            with suppress(OSError):  # not through its buffer, which may be in the middle of a write
                os.write(other, f"{name} cannot be written to any more ({error}): training goes on.\n".encode())
            return super().write(data)


def keep_output_open() -> None:
    """Let the run survive a closed pipe. Streams that another program has replaced, as a notebook does, are kept."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the process started
            setattr(sys, name, open(os.devnull, "w"))
        elif stream is getattr(sys, f"__{name}__") and not isinstance(stream.buffer, LastingOutput):
            with suppress(OSError):
                stream.flush()
            raw = LastingOutput(stream.fileno(), "w", closefd=False)
            lasting = io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw), encoding=stream.encoding,
                errors=stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through,
            )  # fmt: skip
            setattr(sys, name, lasting)
