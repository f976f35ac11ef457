"""Try the tasks of a folder here: which can be run, what an untouched machine gets, and what their own solutions get.

    python -m mt_grpo.adapters.harbor.check hf_recipes/tiny/harbor

It prints a line for each task, and ends with 1 where a solution gets no more than an untouched machine, a task is
broken, or its tests give no reward. Tasks that need what is not here are listed with the reason.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_grpo.adapters.harbor.bubblewrap import BubblewrapSandbox
from mt_grpo.adapters.harbor.commands import SandboxError
from mt_grpo.adapters.harbor.docker import DockerImages
from mt_grpo.adapters.harbor.environment import (
    HINT_OF_MODULES,
    NO_MODULE,
    check_namespaces,
    said_by_tests,
    uses_docker,
)
from mt_grpo.adapters.harbor.images import NamespaceImages, put_step_files
from mt_grpo.adapters.harbor.tasks import Allowed, HarborTask, read_task, task_folders
from mt_grpo.adapters.harbor.toml_tables import BrokenTask, NeedsMore
from mt_grpo.adapters.harbor.verdict import TestsSaid

STEP_SECONDS = 300.0


@dataclass(frozen=True)
class TaskTrial:
    """What the tests of a task said, step by step: of an untouched machine, and behind the task's own solution.

    `solved` is empty where the task has no solution.
    """

    untouched: list[TestsSaid]
    solved: list[TestsSaid]

    def problems(self, name: str) -> list[str]:
        """What is wrong with the task. `name` is the reward's that counts."""
        found = [f"its tests gave no reward: {said.problem}" for said in self.untouched + self.solved if said.problem]
        for before, after in zip(self.untouched, self.solved):
            if not found and after.reward(name) <= before.reward(name):
                found.append(f"its solution gets {after.reward(name):g}, an untouched machine {before.reward(name):g}")
                found += [HINT_OF_MODULES] if NO_MODULE in after.output else []
        return found


def try_task(images: Any, task: HarborTask) -> TaskTrial:
    """Run the tests of a task, without and with its solution. Raises `SandboxError`, `NeedsMore`, `BrokenTask`."""
    solutions = all((step.folder / "solution" / "solve.sh").is_file() for step in task.steps)
    return TaskTrial(said_of(images, task, False), said_of(images, task, True) if solutions else [])


def said_of(images: Any, task: HarborTask, solve: bool) -> list[TestsSaid]:
    """What the tests of all steps say. Where nothing is solved, those of the first step."""
    desk = images.open(task)
    found = []
    try:
        for number, step in enumerate(task.steps if solve else task.steps[:1]):
            put_step_files(desk, task, number, STEP_SECONDS)
            if solve:
                env = {**desk.env, **task.solution_env}
                outcome = desk.sandbox.solve(
                    task.solution(step), desk.workdir, env, step.agent_seconds or STEP_SECONDS
                )
                if outcome.code != 0:
                    why = outcome.why or f"exit code {outcome.code}"
                    raise BrokenTask(f"its solution ended with {why}: {outcome.text(300).strip()}")
            outcome = desk.sandbox.judge(task.tests(step), desk.workdir, desk.judge_env(step), step.verifier_seconds)
            found.append(said_by_tests(outcome, step.verifier_seconds))
    finally:
        desk.sandbox.close()
    return found


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of task folders")
    parser.add_argument("--split", default="train")
    parser.add_argument("--docker", default="auto", choices=("auto", "never", "always"))
    parser.add_argument("--reward", default="reward", help="which of several rewards counts")
    given = parser.parse_args(argv)
    try:
        docker = uses_docker(given.docker)
        folders = task_folders(given.folder.resolve(), given.split)
        kind = None if docker else check_namespaces()
    except ValueError as error:
        sys.exit(f"error: {error}")
    images, bad = DockerImages() if kind is None else NamespaceImages(kind), 0
    way = "Docker" if kind is None else "bubblewrap" if kind is BubblewrapSandbox else "namespaces"
    print(f"by {way}:")
    for number, folder in enumerate(folders):
        try:
            task = read_task(folder, Allowed(docker=docker))
            trial = try_task(images, task)
            problems = trial.problems(given.reward)
            rewards = [[f"{said.reward(given.reward):g}" for said in each] for each in (trial.untouched, trial.solved)]
            said = f"untouched {' '.join(rewards[0])}, solved {' '.join(rewards[1]) or '(no solution)'}"
            print(f"{number:4} {folder.name}: {said}", *problems, sep=". ")
            bad += bool(problems)
        except NeedsMore as error:
            print(f"{number:4} {folder.name}: left out, it needs {error.reason}")
        except (BrokenTask, SandboxError, ValueError) as error:
            print(f"{number:4} {folder.name}: {error}")
            bad += 1
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
