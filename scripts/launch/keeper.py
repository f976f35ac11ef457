"""The keeper of a launch: it ends whatever `scripts/launch/train.py` started, as soon as the launcher is gone.

    keeper.py MARK SECONDS < PIPE

The launcher starts it first, in a session of its own and with the signals blocked that stop the launcher. On standard
input the launcher tells what it starts, a line `process NAME PID` for the first process of each session. The pipe
reads end-of-file when the launcher has ended, even by a KILL. Then every process of these sessions or with MARK in its
environment gets a SIGTERM, and `GRACE` later, the trainer after SECONDS, a SIGKILL. It imports only psutil, for speed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterable

import psutil

MARK = "MT_GRPO_LAUNCH"  # the environment variable that names the launch
GRACE = 30  # seconds that a server has: vLLM is deaf to SIGTERM while it has requests, and the trainer waits for it
Leader = tuple[str, psutil.Process]  # (what it is, the first process of a session)


def living(leaders: list[Leader], mark: str) -> list[psutil.Process]:
    """The living processes of the launch.

    Both signs are needed: a process that writes its title over its environment, as vLLM's engine does, is known by its
    session, and a process that makes a session of its own is known by the mark.
    """
    # A leader that is gone lends its number to nobody while its session lives: another's number means it has ended.
    sessions = {p.pid for _, p in leaders if p.is_running() or not psutil.pid_exists(p.pid)}

    def is_member(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or another user's
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return False
            if {os.getsid(process.pid), os.getpgid(process.pid)} & sessions:
                return True
            return process.environ().get(MARK) == mark
        return False

    def scan() -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if is_member(process)]

    return scan() or scan()  # the second finds what was born while the first read the list, if its parent has ended


def end(leaders: list[Leader], mark: str, seconds: float) -> None:
    """End all processes of the launch: servers in `GRACE` seconds, the trainer, which saves itself, in `seconds`."""

    def signal_all(method: str) -> None:
        for process in left:  # psutil makes sure that a number is not another process's
            with contextlib.suppress(psutil.Error):
                getattr(process, method)()

    left = living(leaders, mark)
    if left:
        names = dict.fromkeys(name for name, process in leaders if process in left)
        names = names or ["processes that were left behind"]
        say(f"stopping the {' and the '.join(names)}")
    signal_all("terminate")
    servers = [leader for leader in leaders if leader[0] == "server"]
    others = [leader for leader in leaders if leader[0] != "server"]
    began = time.monotonic()
    while (left := living(leaders, mark)) and (took := time.monotonic() - began) < seconds + 10:
        if took > min(GRACE, seconds):
            left = living(servers, "") if took < seconds and living(others, "") else left
            signal_all("kill")
        time.sleep(0.2)
    if left:
        say(f"warning: still running after KILL: {' '.join(str(process.pid) for process in left)}", sys.stderr)


def say(text: str, stream=None) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more; the rest must be done all the same
        print(f"train: {text}", file=stream or sys.stdout, flush=True)


def clean_up(lines: Iterable[str], mark: str, seconds: float) -> None:
    """Wait for the end of the lines, then end the processes that they named."""
    leaders = []
    for line in lines:
        _, name, pid = line.split()
        with contextlib.suppress(psutil.NoSuchProcess):  # ended already, and its parent knows
            leaders.append((name, psutil.Process(int(pid))))
    end(leaders, mark, seconds)


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    clean_up(sys.stdin, sys.argv[1], float(sys.argv[2]))
