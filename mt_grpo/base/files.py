"""Files that several processes touch: locks, the output directory of a run, streams; and YAML without a key twice."""

from __future__ import annotations

import collections.abc
import errno
import fcntl
import io
import json
import logging
import os
import re
import stat
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

logger = logging.getLogger(__name__)


def absolute(path: str | None) -> str | None:
    """The absolute path: it names the same file after a tool or a reward has changed the working directory."""
    return path and os.path.abspath(os.path.expanduser(path))


def read_json(path: Path) -> dict | None:
    """The object in a JSON file; None if the file is missing, is not valid JSON, or holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# The lock of a run's output directory, and output streams that work on after their reader has ended.


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
                f"output_dir={path!r} is in use by another run{file.read()}. Set another one, or wait for that run."
            ) from None
        except OSError as error:  # a file system without locks
            logger.warning(f"output_dir={path!r} cannot be locked ({error}). Do not start another run in it.")
        file.truncate(0)
        file.write(f" (process {os.getpid()})")
        file.flush()
        yield


class LastingOutput(io.FileIO):
    """Standard output or error that never ends the run: once its reader has ended, the output goes to /dev/null.

    Otherwise the run would end at its first line after `| head` has ended, or after the terminal was closed. Of a file
    on a full disk only what does not fit is lost: there may be room for the lines that tell of it.
    """

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return memoryview(data).nbytes
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # so that threads and child processes use it too
            os.close(null)
            name, other = ("standard output", 2) if self.fileno() == 1 else ("standard error", 1)
            with suppress(OSError):  # not through its buffer, which may be in the middle of a write
                os.write(other, f"{name} can no longer be written to ({error}). Training continues.\n".encode())
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
                raw if stream.write_through else io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, lasting)


# Lock files in directories where other users may write.


def open_lock(path: Path, flags: int = os.O_RDWR) -> typing.TextIO:
    """Open a lock file in a directory where other users may write. No link is followed, and the call never waits.

    Raises `OSError` unless it is an ordinary file that belongs to this user or to the owner of the directory.
    """
    # Without O_NONBLOCK the call would wait if the file is a FIFO.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), path.parent.lstat().st_uid):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file of this user. Remove it.")
    return open(descriptor, "r+" if flags & os.O_RDWR else "r")


class RecipeLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that raises `YAMLError` for a key that is set twice; the original uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, collections.abc.Hashable):
                continue
            if key in lines:
                raise yaml.YAMLError(
                    f"{key!r} is set on line {lines[key]} and again on line {line}. Remove one of them."
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def plain_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """A number; `1:30` and `010` stay text, which no number's key takes. YAML 1.1 would read 90 and 8."""
    if ":" in node.value or re.fullmatch(r"[-+]?0[0-9_]+", node.value):
        return node.value
    return {"int": loader.construct_yaml_int, "float": loader.construct_yaml_float}[node.tag.rpartition(":")[2]](node)


for tag in ("int", "float"):
    RecipeLoader.add_constructor(f"tag:yaml.org,2002:{tag}", plain_number)
