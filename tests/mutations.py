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

CONFIGURATION_AND_DATA: list[Mutation] = [
    Mutation(
        "data that fills no batch is taken",
        SCRIPT,
        "if num_prompts < needed:",
        "if num_prompts < 0:",
        "tests/test_recipes.py::test_fewer_prompts_than_a_batch_needs",
    ),
    Mutation(
        "the plan counts the prompts of one process",
        "scripts/train_plan.py",
        "mt.check_num_prompts(len(rows), whole)",
        "mt.check_num_prompts(len(rows), args)",
        "tests/test_scripts.py::test_the_plan_refuses_what_cannot_train",
    ),
    Mutation(
        "a run without a step ends well",
        SCRIPT,
        "        elif self.state.global_step == 0:",
        "        elif False:",
        "tests/test_recipes.py::test_a_run_without_a_step_fails",
    ),
    Mutation(
        "NaN is in every range",
        SCRIPT,
        "return low < number < high or at_a_bound",
        "return not (number < low or number > high) or at_a_bound",
        "tests/test_recipes.py::test_every_number_has_a_range",
    ),
    Mutation(
        "numbers of generation_kwargs have no range",
        SCRIPT,
        "if key in RANGES and not (fits_type(value, float)",
        "if False and not (fits_type(value, float)",
        "tests/test_recipes.py::test_numbers_of_generation_kwargs_have_the_same_ranges",
    ),
    Mutation(
        "reward weights of Python have no range",
        SCRIPT,
        'if not all(in_range(weight, RANGES[f"{kind}_reward_weights"])',
        'if not all(True or in_range(weight, RANGES[f"{kind}_reward_weights"])',
        "tests/test_recipes.py::test_weights_given_in_python_are_finite_too",
    ),
    Mutation(
        "the last of two equal keys wins",
        SCRIPT,
        "lines.setdefault(key, line) != line",
        "not lines.setdefault(key, line)",
        "tests/test_recipes.py::test_bad_recipe",
    ),
    Mutation(
        "the package of a logger is not looked for",
        SCRIPT,
        'if name not in (*available, "azure_ml", "flyte"):',
        "if name in ():",
        "tests/test_recipes.py::test_bad_recipe",
    ),
    Mutation(
        "--config=FILE is not understood",
        SCRIPT,
        'if a.startswith("--config=")',
        'if a.startswith("--configuration=")',
        "tests/test_recipes.py::test_what_is_given_twice_on_the_command_line_is_said",
    ),
    Mutation(
        "SystemExit in a tools file ends the run without a word",
        SCRIPT,
        "    except BaseException as error:  # SystemExit too, which would end the run without a word\n        raise",
        "    except Exception as error:\n        raise",
        "tests/test_recipes.py::test_bad_tool_or_reward_file",
    ),
    Mutation(
        "SystemExit in CHECK_TOOLS ends the run without a word",
        SCRIPT,
        "    except BaseException as error:  # SystemExit too, which would end the run without a word\n        text",
        "    except Exception as error:\n        text",
        "tests/test_recipes.py::test_bad_tool_or_reward_file",
    ),
    Mutation(
        "a reward's column is looked for only while training",
        SCRIPT,
        "if by_name and parameter.default is",
        "if not by_name and parameter.default is",
        "tests/test_recipes.py::test_bad_tool_or_reward_file",
    ),
    Mutation(
        "columns that the first row lacks are dropped",
        SCRIPT,
        "columns = list(dict.fromkeys(key for row in rows for key in row))",
        "columns = list(rows[0])",
        "tests/test_recipes.py::test_data_that_is_good_in_spite_of_its_looks",
    ),
    Mutation(
        "a misspelt split is trained on",
        SCRIPT,
        'if split not in ("train", "test") or (size',
        "if (size",
        "tests/test_recipes.py::test_dataset_that_is_not_there",
    ),
    Mutation(
        "an answer of null is taken",
        SCRIPT,
        "not question.strip() or answer is None:",
        "not question.strip():",
        "tests/test_recipes.py::test_bad_dataset",
    ),
    Mutation(
        "a tool that changes the folder moves the output",
        SCRIPT,
        "= absolute(self.output_dir), absolute(",
        "= self.output_dir, absolute(",
        "tests/test_scripts.py::test_a_run_outlives_its_output_and_a_tool_that_changes_the_folder",
    ),
    Mutation(
        "a closed pipe ends the run",
        SCRIPT,
        "    keep_output_open()\n    with ExitStack",
        "    with ExitStack",
        "tests/test_scripts.py::test_a_run_outlives_its_output_and_a_tool_that_changes_the_folder",
    ),
]

STOPPING_AND_RESUMING: list[Mutation] = []

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
