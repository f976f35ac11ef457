"""Put small faults into the code that decides what is trained, one at a time, and see whether quick tests notice them.

    pip install -e '.[mutation]'
    python scripts/mutation.py                            # what was not run yet; Ctrl+C ends it, the next call goes on
    python scripts/mutation.py "*.x_norm__*" "*passes*"   # only these mutants, again if need be
    cd runs/mutation && mutmut results                    # what no test noticed; `mutmut show NAME` prints one

mutmut makes the faults (mutants) in a copy of the project, runs/mutation. Delete it to begin anew.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

COPY = Path("runs/mutation")
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


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    os.chdir(Path(__file__).resolve().parents[1])
    # What git tracks, and new files that it does not ignore.
    names = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], capture_output=True, check=True).stdout
    for name in (name for name in names.decode().split("\0") if name and Path(name).is_file()):
        content, target = copied(name, Path(name).read_bytes()), COPY / name
        if not target.is_file() or target.read_bytes() != content:  # mutmut goes by the time of a change
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    children = str(max(1, (os.cpu_count() or 1) // 2))
    os.chdir(COPY)
    os.environ["OMP_NUM_THREADS"] = "1"
    mutmut = str(Path(sys.executable).with_name("mutmut"))
    os.execv(mutmut, [mutmut, "run", "--max-children", children, *sys.argv[1:]])
