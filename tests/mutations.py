"""Faults put into the code on purpose. Each one must make the test that is named beside it fail.

    bash scripts/test.sh --mutations                 # all of them, two at a time
    bash scripts/test.sh --mutations columns paused  # those whose names contain one of the words

Every mutation is applied to a fresh copy of the tracked files. The named tests must pass on a copy without a mutation,
and fail (not: fail to be collected) on the copy with it. tests/test_mutations.py holds that every anchor still stands
in its file exactly once, so that a mutation cannot rot unnoticed. The faults themselves stand in tests/mutants/, one
module per wing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import warm_python
from mutants import MUTATIONS
from mutants.mutation import Mutation

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 900.0  # seconds that one mutation's tests may take; a hang counts as noticed only where the test says so


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


def start_tests(tests: list[str], root: Path, output: Path) -> int:
    """Run these node ids in a copy of the project, in a forked process; returns its id.

    The libraries are imported once, before the first fork: they take longer than most tests. Nothing of the project
    is imported in the parent.
    """
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # what the tests start ends with them
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [
        str(root),
        *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tests")),
    ]
    import pytest

    code = 3
    try:
        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


@dataclass
class Run:
    """The tests of one mutation, or of none, under way."""

    mutation: Mutation | None
    tests: list[str]

    def __post_init__(self):
        self.began = time.perf_counter()
        self.folder = Path(tempfile.mkdtemp(prefix="mt-grpo-mutation-"))
        copy_tracked(self.folder / "copy")
        if self.mutation is not None:
            apply(self.mutation, self.folder / "copy")
        self.pid = start_tests(self.tests, self.folder / "copy", self.folder / "output")
        self.code: int | None = None

    def poll(self) -> bool:
        """Whether the tests are over; what they left running is ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.perf_counter() - self.began < TIMEOUT:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status) if pid else 124
        self.seconds = time.perf_counter() - self.began
        self.output = (self.folder / "output").read_text(errors="replace")
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    @property
    def as_expected(self) -> bool:
        """Tests pass without a mutation, and fail with one: 1 says so, and 2 to 5 that they did not run.

        A crash of the interpreter is a failure, too, as where numbers of another size reach torch.
        """
        return self.code in ((0,) if self.mutation is None else (1, -signal.SIGSEGV, -signal.SIGABRT))

    @property
    def last_words(self) -> str:
        failed = re.findall(r"^(?:FAILED|ERROR) .*$", self.output, re.M)
        return "\n".join(failed) or self.output[-1500:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutations whose names contain one of them")
    parser.add_argument("--only-mutations", action="store_true", help="not the tests on the code as it is")
    parser.add_argument("--jobs", type=int, default=2, help="copies at the same time")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or any(word in m.name for word in options.words)]
    if not chosen:
        sys.exit(f"error: no mutation's name contains one of {options.words}.")
    for library in warm_python.LIBRARIES:
        importlib.import_module(library)
    warm_python.executable()  # one for all copies
    tests = sorted({test for mutation in chosen for test in mutation.test.split()})
    waiting = [(None, tests)] * (not options.only_mutations) + [(m, m.test.split()) for m in chosen]
    running: list[Run] = []
    survived, done = [], 0
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(Run(*waiting.pop(0)))
        for run in [run for run in running if run.poll()]:
            running.remove(run)
            done += run.mutation is not None
            name = run.mutation.name if run.mutation else "without a mutation"
            verdict = "passed" if run.mutation is None else "noticed"
            verdict = verdict if run.as_expected else "NOT " + verdict
            print(f"{done}/{len(chosen)} {verdict}: {name} ({run.seconds:.0f} s)")
            print("    " + run.last_words.splitlines()[-1][:150] if run.as_expected else run.last_words, flush=True)
            if not run.as_expected:
                survived.append(name)
        time.sleep(0.1)
    noticed = len(chosen) - len([name for name in survived if name != "without a mutation"])
    print(f"{noticed} of {len(chosen)} mutations were noticed.")
    if survived:
        sys.exit("error: not as expected: " + "; ".join(survived))


if __name__ == "__main__":
    main()
