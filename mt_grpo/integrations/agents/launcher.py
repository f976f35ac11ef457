"""Runs a command of `agent_command` in a process group of its own, and ends that group. Imports no package.

    python -I -S launcher.py FD COMMAND ...

FD is the reading end of a pipe whose other end the trainer holds. If that is closed, as when the trainer is killed,
the group is killed. SIGTERM is passed on. What the command leaves behind when it ends is killed, too: its group, and
daemons that have left it, which this process inherits.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

ROUNDS = 200  # of killing what a command leaves behind


def main() -> None:
    """Run the command, and exit with its exit code.

    It waits for two things: the end of the pipe, and a signal, which `signal.set_wakeup_fd` turns into a byte. A
    handler alone would not do, since a signal may come before the wait begins.
    """
    pipe, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: a daemon of the command becomes a child of this process
    os.set_inheritable(pipe, False)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # A SIGTERM that comes between the fork and its handler would end this process and leave the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    with suppress(OSError):  # on both sides, so that the group is there. The child may run its command, or have ended
        os.setpgid(child, child)
    signal.signal(signal.SIGTERM, lambda *_: end(child, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for stream in (0, 1, 2):  # else a reader of the command's output would wait for this process
        os.close(stream)
    poll = select.poll()  # `select.select` takes no number above 1023, as a trainer with many files gives
    for each in (pipe, woken):
        poll.register(each, select.POLLIN)
    while True:
        ready = [number for number, _ in poll.poll()]
        if pipe in ready:
            end(child, signal.SIGKILL)
        if woken in ready:
            os.read(woken, 512)
        ended, status = os.waitpid(child, 0 if pipe in ready else os.WNOHANG)
        if ended == child:
            end(child, signal.SIGKILL)
            end_inherited()
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def end(group: int, signum: int) -> None:
    """Send a signal to a group of processes that may have ended."""
    with suppress(ProcessLookupError):
        os.killpg(group, signum)


def end_inherited() -> None:
    """Kill the children of this process, which then gets theirs as its own, until none is left."""
    for _ in range(ROUNDS):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in children():  # one that has ended stays until it is waited for
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def children() -> list[int]:
    """The processes whose parent this one is."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(pid))
    return found


if __name__ == "__main__":
    main()
