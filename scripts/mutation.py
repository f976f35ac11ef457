"""Copy the project, run mutmut in the copy for a limited time, report the mutants by file (scripts/mutation.sh)."""

import ast
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

COPY = Path("runs/mutation")
MUTMUT = Path(".venv/bin/mutmut").absolute()
FILES = ["mt_grpo_trainer.py", "mt_grpo/rollout.py"]
FILES += [f"mt_grpo/training/{name}.py" for name in ("further_credit", "batch", "passes")]
# The tests that are to notice faults: no other processes, and of those that train once for each setting only some
# settings, since all of them try a fault that nothing notices. Each mutant of a function has a copy of its doctest.
TESTS = [f"tests/method/test_{name}.py" for name in ("credit", "loss", "rollouts", "batch")]
TESTS += [f"tests/training/test_{name}.py" for name in ("records", "passes", "refill")]
CHOICE = (
    "not two_ranks and not ranks_end_together and not generated_problem and (not refill or asks_for or no_signal) "
    "and (not __mutmut_ or __mutmut_orig) "
    "and (not trains_as_a_whole_one or accumulated-grpo or mask_truncated) "
    "and (not losss_own_pass or sequence_truncate-0.1) and (not clips_around_the_sampled or Unknown) "
    "and (not has_trls_gradient or further and (bnpo or sapo) or dr_grpo-padded "
    "or steps_per_generation and dapo and shared or top_entropy_quantile and padded)"
)
SETTINGS = {
    "source_paths": ["mt_grpo_trainer.py", "mt_grpo"],
    "only_mutate": FILES,
    "also_copy": ["scripts", "rewards", "tools", "hf_recipes"],
    "pytest_add_cli_args": ["--doctest-modules"],
    "pytest_add_cli_args_test_selection": [*FILES, *TESTS, "--doctest-modules", "-k", CHOICE],
    "use_git_change_detection": False,
    "process_isolation": "forkserver",  # a forked child would wait for threads that it does not have
}
STATUS = {0: "survived", 1: "killed", 3: "killed", 5: "no tests", 33: "no tests", None: "not run"}  # others: timed out


def copied(path: str, content: bytes) -> bytes:
    """A file as the copy has it.

    mutmut leaves functions with a decorator alone: there a decorator becomes a call below its function. Of the script
    only section 2 is mutated, without the example of its doctests.
    """
    if path == "pyproject.toml":
        lines = [f"{name} = {json.dumps(value)}" for name, value in SETTINGS.items()]
        return content + "\n".join(["", "[tool.mutmut]", *lines, ""]).encode()
    if path not in FILES:
        return content
    lines = content.decode().splitlines(keepends=True)
    nodes = [node for node in ast.walk(ast.parse(content)) if isinstance(node, ast.FunctionDef)]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        for decorator in node.decorator_list:
            call = f"{node.name} = {ast.unparse(decorator)}({node.name})"
            lines.insert(node.end_lineno, " " * node.col_offset + call + "\n")
            lines[decorator.lineno - 1 : decorator.end_lineno] = ["\n"] * (decorator.end_lineno - decorator.lineno + 1)
    text = "".join(lines)
    if path == "mt_grpo_trainer.py":
        text = re.sub(r"^# (1|3)\. ", r"# pragma: no mutate start\n\g<0>", text, flags=re.M)
        text = re.sub(r"^# 2\. |\Z", r"# pragma: no mutate end\n\g<0>", text, flags=re.M)
        text = re.sub(r"^def doctest_batch.*", r"\g<0>  # pragma: no mutate block", text, flags=re.M)
    return text.encode()


def update_copy() -> None:
    """Copy what git tracks, and new files that it does not ignore; forget survivors where a test has changed."""
    names = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], capture_output=True, check=True).stdout
    tests = hashlib.sha256()
    for name in sorted(name for name in names.decode().split("\0") if name and Path(name).is_file()):
        content, target = copied(name, Path(name).read_bytes()), COPY / name
        if not target.is_file() or target.read_bytes() != content:  # mutmut goes by the time of a change
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        if name.startswith("tests/"):
            tests.update(content)
    stamp = COPY / "tests.sha256"
    for path in filter(Path.is_file, map(meta_of, FILES)):
        if stamp.is_file() and stamp.read_text() != tests.hexdigest():
            meta = json.loads(path.read_text())
            codes = meta["exit_code_by_key"].items()
            meta["exit_code_by_key"] = {key: code if STATUS.get(code) == "killed" else None for key, code in codes}
            path.write_text(json.dumps(meta))
    stamp.write_text(tests.hexdigest())


def meta_of(file: str) -> Path:
    """The path at which mutmut keeps the results of a source file."""
    return COPY / "mutants" / f"{file}.meta"


def patterns(word: str) -> list[str]:
    """mutmut's names of the mutants of a file or a function."""
    files = [file for file in FILES if word in (file, Path(file).name)]
    return [f"{file[:-3].replace('/', '.')}.x*" for file in files] or [f"*.x_{word}__mutmut_*", f"*ǁ{word}__mutmut_*"]


def report() -> None:
    """Print counts by file, then the mutants that no test noticed and the functions that are left."""
    open_ones, left = [], Counter()
    for file in FILES:
        codes = json.loads(meta_of(file).read_text())["exit_code_by_key"] if meta_of(file).is_file() else {}
        kinds = {name: STATUS.get(code, "timed out") for name, code in codes.items()}
        open_ones += [f"{kind}: {name}" for name, kind in kinds.items() if kind not in ("killed", "not run")]
        left.update(name.partition("__mutmut")[0] for name, kind in kinds.items() if kind == "not run")
        count = Counter(kinds.values())
        print(f"{file}: {len(codes)} mutants, " + ", ".join(f"{n} {kind}" for kind, n in sorted(count.items())))
    print(*sorted(open_ones), *(f"not run: {name} ({n})" for name, n in sorted(left.items())), sep="\n")


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    update_copy()
    named = [pattern for word in sys.argv[1:] for pattern in patterns(word)]
    command = [MUTMUT, "run", "--max-children", str(max(1, (os.cpu_count() or 1) // 2)), *named]
    mutmut = subprocess.Popen(command, cwd=COPY, start_new_session=True)
    try:
        mutmut.wait(60 * float(os.environ.get("MUTATION_MINUTES", 90)))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(mutmut.pid, signal.SIGKILL)  # each result is in its file by then
        mutmut.wait()
    report()
    sys.exit(max(0, mutmut.returncode))
