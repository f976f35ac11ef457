"""Faults put into the code on purpose. Each one must make the test that is named beside it fail.

    bash scripts/test.sh --mutations                 # all of them, two at a time
    bash scripts/test.sh --mutations columns paused  # those whose names contain one of the words

Every mutation is applied to a fresh copy of the tracked files. The named tests must pass on a copy without a mutation,
and fail (not: fail to be collected) on the copy with it. tests/test_mutations.py holds that every anchor still stands
in its file exactly once, so that a mutation cannot rot unnoticed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "mt_grpo_trainer.py"
TIMEOUT = 900.0  # seconds that one mutation's tests may take; a hang counts as noticed only where the test says so


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Args:
        name: What is wrong then, as a short phrase.
        file: The file that is changed, relative to the project's root.
        old: Text that stands exactly once in the file.
        new: What takes its place.
        test: The pytest node ids that must notice it, separated by blanks: at least one of them fails.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


REWARDS_AND_CREDIT: list[Mutation] = []

SERVER_AND_WEIGHTS: list[Mutation] = []

CONVERSATION_AND_TOOLS: list[Mutation] = []

CONFIGURATION_AND_DATA: list[Mutation] = []

KEEPER, LAUNCHER = "scripts/keeper.py", "scripts/train.py"
KILLED_LAUNCH = "tests/test_scripts.py::test_a_killed_launch_leaves_nothing_that_is_deaf_or_hidden"
KEEPER_LOST = "tests/test_scripts.py::test_a_launch_outlives_its_keeper_and_ignores_what_nohup_ignores"
ODD_LOCK = "tests/test_scripts.py::test_a_port_with_an_odd_lock_file_is_passed_over"

STOPPING_AND_RESUMING: list[Mutation] = [
    Mutation("keeper: sessions are not looked at", KEEPER,
             "if {os.getsid(process.pid), os.getpgid(process.pid)} & sessions:", "if False:", KILLED_LAUNCH),
    Mutation("keeper: the mark is not looked at", KEEPER,
             "return process.environ().get(MARK) == mark", "return False", KILLED_LAUNCH),
    Mutation("keeper: nothing is killed", KEEPER, 'send("kill", left)', "pass", KILLED_LAUNCH),
    Mutation("keeper: the folder of weights is left", KEEPER,
             "shutil.rmtree(folder, ignore_errors=True)", "pass", KILLED_LAUNCH),
    Mutation("launcher: signals reach the keeper", LAUNCHER,
             "signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)", "signal.pthread_sigmask(signal.SIG_BLOCK, ())",
             KEEPER_LOST),
    Mutation("launcher: a hang-up ends it under nohup", LAUNCHER,
             "if signal.getsignal(number) is not signal.SIG_IGN:", "if True:", KEEPER_LOST),
    Mutation("launcher: nothing is ended without a keeper", LAUNCHER,
             "if self.keeper.wait():", "if self.keeper.wait() is None:", KEEPER_LOST),
    Mutation("launcher: the keeper is told of no process", LAUNCHER,
             'self.tell(f"process {name} {process.pid}")', "pass",
             "tests/test_scripts.py::test_a_stop_during_the_checks_ends_them"),
    Mutation("launcher: any answer is a healthy server", LAUNCHER,
             'return b" 200 " in connection.recv(64)', "return bool(connection.recv(64))",
             "tests/test_scripts.py::test_the_exit_code_is_the_trainers"),
    Mutation("launcher: the server listens everywhere", LAUNCHER,
             'plan["model"], "--host", "127.0.0.1",', 'plan["model"], "--host", "0.0.0.0",',
             "tests/test_scripts.py::test_the_commands_for_gpus"),
    Mutation("port lock: a link is followed", LAUNCHER, " | os.O_NOFOLLOW", "", ODD_LOCK),
    Mutation("port lock: a FIFO is locked", LAUNCHER, "stat.S_ISREG(status.st_mode) and ", "", ODD_LOCK),
    Mutation("port lock: the file is emptied", LAUNCHER,
             "os.O_RDWR | os.O_CREAT |", "os.O_RDWR | os.O_CREAT | os.O_TRUNC |",
             "tests/test_scripts.py::test_a_lock_is_its_owners_alone_and_lasts"),
    Mutation("port lock: a port in use is taken", LAUNCHER,
             "            if is_free(port):", "            if True:", ODD_LOCK),
]  # fmt: skip

MUTATIONS = [
    *REWARDS_AND_CREDIT, *SERVER_AND_WEIGHTS, *CONVERSATION_AND_TOOLS, *CONFIGURATION_AND_DATA,
    *STOPPING_AND_RESUMING,
]  # fmt: skip


def apply(mutation: Mutation, root: Path) -> None:
    """Change the file below `root`. Raises `ValueError` where the anchor does not stand there exactly once."""
    path = root / mutation.file
    text = path.read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: the anchor stands {count} times in {mutation.file}, expected once.")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def copy_tracked(target: Path) -> None:
    """The files that git tracks, and new ones that it does not ignore, as they are in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_tests(tests: list[str], root: Path) -> tuple[int, str]:
    """(pytest's exit code, its output) for these node ids in a copy of the project."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *tests]
    try:
        result = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        return 124, str(error.stdout or "")[-3000:]
    return result.returncode, result.stdout[-3000:]


def try_one(mutation: Mutation | None, tests: list[str]) -> tuple[bool, str, float]:
    """(as expected, pytest's last words, seconds) of one copy; without a mutation the tests must pass."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mt-grpo-mutation-") as folder:
        copy = Path(folder)
        copy_tracked(copy)
        if mutation is not None:
            apply(mutation, copy)
        code, output = run_tests(tests, copy)
    expected = 0 if mutation is None else 1  # 1: tests ran and failed; 2 to 5: they did not run
    failed = re.findall(r"^(?:FAILED|ERROR) .*$", output, re.M)
    return code == expected, "\n".join(failed) or output[-1500:], time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutations whose names contain one of them")
    parser.add_argument("--jobs", type=int, default=2, help="copies at the same time")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or any(word in m.name for word in options.words)]
    if not chosen:
        sys.exit(f"error: no mutation's name contains one of {options.words}.")
    tests = sorted({test for mutation in chosen for test in mutation.test.split()})
    good, words, seconds = try_one(None, tests)
    print(f"without a mutation: {'passed' if good else 'FAILED'} in {seconds:.0f} s", flush=True)
    if not good:
        sys.exit(f"error: the named tests must pass before anything is changed.\n{words}")
    survived = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(try_one, mutation, mutation.test.split()): mutation for mutation in chosen}
        for number, run in enumerate(concurrent.futures.as_completed(runs), 1):
            noticed, words, seconds = run.result()
            print(f"{number}/{len(chosen)} {'noticed ' if noticed else 'SURVIVED'} {runs[run].name} ({seconds:.0f} s)")
            print("    " + words.splitlines()[-1][:150] if noticed else words, flush=True)
            if not noticed:
                survived.append(runs[run].name)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations were noticed.")
    if survived:
        sys.exit("error: nothing noticed: " + "; ".join(survived))


if __name__ == "__main__":
    main()
