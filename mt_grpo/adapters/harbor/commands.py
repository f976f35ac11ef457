"""Commands of a sandbox as processes of this machine, and what comes of them."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mt_grpo.adapters.harbor.namespaces import BEGUN

OUTPUT_BYTES = 4 * 2**20  # that a command may print; then it is stopped
KEPT_BYTES = 16_000  # of what it prints, at the beginning and at the end
CONTROL_BYTES = 2**17  # of what is read beside the output
START_SECONDS = 60.0  # until a command begins, on a busy machine


class SandboxError(Exception):
    """A sandbox cannot be had, or is gone: nothing that a command has done."""


class NotUnpacked(SandboxError):
    """Files could not be put into a sandbox, or their `setup.sh` failed. What a policy has left may be the cause."""


@dataclass
class Outcome:
    """What came of a command.

    Attributes:
        code: Its exit code; None: it was stopped at its time, or since it printed too much.
        head, tail: The first and the last bytes that it printed, errors too.
        size: How many bytes it printed.
        control: What was said beside the output.
        began: When the command did, by `time.monotonic`. What is said before, None, is an error of the sandbox.
        seconds: That it took, from when it began.
        why: Why it was stopped; empty where it was not.
    """

    code: int | None
    head: bytes = b""
    tail: bytes = b""
    size: int = 0
    control: bytes = b""
    began: float | None = None
    seconds: float = 0.0
    why: str = ""

    def text(self, most: int) -> str:
        """What it printed, in at most about so many characters: the middle is left out where it is long.

        >>> Outcome(0, b"0123", b"89", 10).text(4), Outcome(0, b"01\\xff").text(9)
        ('01\\n... [6 bytes left out] ...\\n89', '01\\ufffd')
        """
        if self.size <= most and self.size <= len(self.head) + len(self.tail):
            return (self.head + self.tail).decode(errors="replace")
        head, tail = self.head[: most // 2], (self.head + self.tail)[-(most // 2) :]
        left_out = self.size - len(head) - len(tail)
        parts = (head.decode(errors="replace"), tail.decode(errors="replace"))
        return f"{parts[0]}\n... [{left_out} bytes left out] ...\n{parts[1]}"

    def why_not_begun(self) -> str:
        """What was said in place of `BEGUN`."""
        said = b" ".join(self.control.split()).decode(errors="replace")[-500:]
        return said or (f"it took longer than {START_SECONDS:g} s" if self.why else f"exit code {self.code}")


class Commands:
    """The commands of a sandbox that run, each as a process. They end with it.

    Args:
        end: What ends a process, with all that it started, and waits for it.
    """

    def __init__(self, end: Callable[[subprocess.Popen], None]):
        self._end, self._lock, self.closed = end, threading.Lock(), False
        self._starting = threading.RLock()  # held while one runs alone
        self.running: set[subprocess.Popen] = set()

    def run(
        self,
        words: Sequence[str],
        env: dict[str, str] | None,
        given: bytes,
        seconds: float,
        whole: bool = False,
        most: float = OUTPUT_BYTES,
    ) -> Outcome:
        """What comes of a command.

        Args:
            words: The command. It says `BEGUN` on its stderr.
            env: Its variables; None: those of this process.
            given: What it reads from stdin.
            seconds: That it may take, from when it has begun.
            whole: Whether all of the output is kept, as the head.
            most: Bytes that it may print, where not all is kept.

        Raises:
            SandboxError: the sandbox was closed.
        """
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with self._starting, self._lock:
            if self.closed:
                raise SandboxError("it was closed")
            process = subprocess.Popen(words, env=env, start_new_session=True, cwd="/", **pipes)
            self.running.add(process)
        outcome = Outcome(None)
        try:
            outcome.why = exchange(process, given, seconds, outcome, whole, most)
            if outcome.why:
                self._end(process)
            outcome.code = None if outcome.why else process.wait()
        finally:
            if process.poll() is None:
                self._end(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):  # what was not written is no longer wanted
                    pipe.close()
            with self._lock:
                self.running.discard(process)
        if self.closed:
            raise SandboxError("it was closed meanwhile")
        outcome.seconds = 0.0 if outcome.began is None else time.monotonic() - outcome.began
        return outcome

    def run_alone(self, *words: Any, **more: Any) -> Outcome:
        """`run`, when all others were ended. None begins meanwhile: one that was given up may be on its way."""
        with self._starting:
            self.end_running()
            return self.run(*words, **more)

    def end_running(self) -> None:
        """End all that run."""
        with self._lock:
            running = list(self.running)
        for process in running:
            self._end(process)

    def close(self) -> bool:
        """End all, and let none begin. False: it was closed before."""
        with self._lock:
            if self.closed:
                return False
            self.closed, running = True, list(self.running)
        for process in running:
            self._end(process)
        return True


def exchange(
    process: Any, given: bytes, seconds: float, outcome: Outcome, whole: bool, most: float = OUTPUT_BYTES
) -> str:
    """Write what a process reads, and read what it says, until it says no more.

    Args:
        process: With pipes.
        given: What it reads.
        seconds: That it may take, from when it has begun; until then, `START_SECONDS`.
        outcome: Is filled.
        whole: Whether all of the output is kept.
        most: Bytes that it may print, where not all is kept.

    Returns:
        Why it must be stopped; empty where it need not.
    """
    writing, parts = memoryview(given), []
    deadline = time.monotonic() + START_SECONDS
    with selectors.DefaultSelector() as waiting:  # `select` knows no file beyond the first 1,024
        waiting.register(process.stdout, selectors.EVENT_READ, "output")
        waiting.register(process.stderr, selectors.EVENT_READ, "control")
        os.set_blocking(process.stdin.fileno(), False)
        if given:
            waiting.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while process.stdout in waiting.get_map() or process.stderr in waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready or time.monotonic() > deadline:  # it may say something without end
                return "time"
            for pipe, _ in ready:
                if pipe.fileobj is process.stdin:
                    try:
                        writing = writing[os.write(pipe.fd, writing[: 2**16]) :]
                    except BrokenPipeError:  # it reads no more
                        writing = writing[:0]
                    if not writing:
                        waiting.unregister(process.stdin)
                        process.stdin.close()
                    continue
                part = os.read(pipe.fd, 2**16)
                if not part:
                    waiting.unregister(pipe.fileobj)
                elif pipe.data == "control":
                    outcome.control += part
                    if outcome.began is None and BEGUN in outcome.control:
                        outcome.began, outcome.control = time.monotonic(), outcome.control.partition(BEGUN)[2]
                        deadline = outcome.began + seconds
                    outcome.control = outcome.control[-CONTROL_BYTES:]
                elif whole:
                    parts.append(part)
                else:
                    outcome.size += len(part)
                    outcome.head, outcome.tail = kept_ends(outcome.head, outcome.tail, part)
                    if outcome.size > most:
                        return "output"
    outcome.head = b"".join(parts) if whole else outcome.head
    return ""


def is_readable(pipe: Any, seconds: float) -> bool:
    """Whether there is something to read, or the end, within so many seconds."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(pipe, selectors.EVENT_READ)
        return bool(waiting.select(seconds))


def kept_ends(head: bytes, tail: bytes, part: bytes, most: int = KEPT_BYTES) -> tuple[bytes, bytes]:
    """The first and the last bytes of a stream, where another part of it has come.

    >>> kept_ends(b"01", b"", b"23456", most=3), kept_ends(b"012", b"456", b"7", most=3)
    ((b'012', b'456'), (b'012', b'567'))
    """
    room = max(0, most - len(head))
    return head + part[:room], (tail + part[room:])[-most:]
