"""Runs a command for `agent_commands` in a process group of its own, and ends that group. Imports no package.

    python -I -S launcher.py FD[,FD ...] COMMAND ...

The first FD is the reading end of a pipe whose other end the trainer holds. Where that is closed, as when the trainer
is killed, the group is killed. The further ones are for the command alone. SIGTERM is passed on. What the command
leaves behind when it ends is killed, too: its group, and daemons that have left it, which this process inherits.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

ROUNDS = 200  # of killing what a command leaves behind


def main() -> None:
    """Run the command, and exit with its exit code."""
    (pipe, *for_command), command = map(int, sys.argv[1].split(",")), sys.argv[2:]
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

    try:  # on both sides: whoever is first, the group is there before it is signalled
        os.setpgid(child, child)
    except OSError:  # the child runs its command already, or has ended
        pass

    def end(signum: int) -> None:
        try:
            os.killpg(child, signum)
        except ProcessLookupError:  # all have ended
            pass

    signal.signal(signal.SIGTERM, lambda *_: end(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for stream in (0, 1, 2, *for_command):  # else a reader of the command's output would wait for this process
        os.close(stream)
    while True:
        ready, _, _ = select.select([pipe, woken], [], [])
        if pipe in ready:
            end(signal.SIGKILL)
        if woken in ready:
            os.read(woken, 512)
        ended, status = os.waitpid(child, 0 if pipe in ready else os.WNOHANG)
        if ended == child:
            end(signal.SIGKILL)
            end_inherited()
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def end_inherited() -> None:
    """Kill all that descends from this process, again and again: what is killed may have started others."""
    for _ in range(ROUNDS):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # none is left: what has died is gone, and its children are this process's
            return
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


def descendants(root: int) -> list[int]:
    """The ids of all processes below one, by /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):  # it has ended
                continue
            children.setdefault(parent, []).append(int(name))
    found = children.get(root, [])
    for pid in found:  # grows meanwhile
        found += children.get(pid, [])
    return found


if __name__ == "__main__":
    main()
