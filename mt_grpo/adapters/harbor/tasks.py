"""A task folder in Harbor's format, read and checked."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_grpo.adapters.harbor.archives import tree_archive
from mt_grpo.adapters.harbor.dockerfile import Build, DockerfileReader
from mt_grpo.adapters.harbor.sandbox import SandboxLimits
from mt_grpo.adapters.harbor.toml_tables import BrokenTask, Healthcheck, NeedsMore, TomlTable, text_of

STEP_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
STRATEGIES = ("mean", "final")
VERIFIER_SECONDS = 600.0  # Harbor's default
TOLD = 5  # broken tasks that an error names
# A line of a test script that fetches something: there is no network.
FETCHES = re.compile(
    r"(?:^|[;&|(`]|\bthen\b|\bdo\b)\s*(?:sudo\s+)?"
    r"((?:curl|wget|uvx|npx)\b|uv\s+(?:run|pip|sync|tool|venv|add)|git\s+clone"
    r"|(?:apt|apt-get)\s+(?:\S+\s+)*?(?:install|update)"
    r"|(?:python3?\s+-m\s+)?pip3?\s+install|npm\s+(?:ci|i|install))"
)


@dataclass(frozen=True, eq=False)
class TaskStep:
    """An instruction and its tests. A task without `steps/` has one, whose name is empty.

    Attributes:
        folder: With `instruction.md`, `tests/` and `solution/`.
        env: Variables of the tests.
        agent_seconds: That commands of the policy may take together; None: no limit of the task's.
        verifier_seconds: That the tests may take.
        min_reward: What the reward, or rewards by key, must reach for the next step to begin.
        healthcheck: What must succeed before the step begins.
    """

    name: str
    folder: Path
    instruction: str
    env: dict[str, str] = field(default_factory=dict)
    agent_seconds: float | None = None
    verifier_seconds: float = VERIFIER_SECONDS
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None

    @property
    def setup(self) -> Path | None:
        """The folder whose files are put into the working directory when the step begins."""
        found = self.folder / "workdir"
        return found if self.name and found.is_dir() else None


@dataclass(frozen=True, eq=False)
class HarborTask:
    """A task that can be worked on here.

    Attributes:
        folder: Of the task.
        name: As its `task.toml` says, else its folder's.
        steps: At least one.
        build: What a sandbox begins with; None where Docker builds it.
        limits: What its commands may use.
        env: Variables of all commands.
        strategy: How the rewards of several steps become one.
        solution_env: Variables of `solve.sh`.
        cpus: That Docker may give it.
        image: That Docker runs, in place of building one.
        workdir: Where commands begin; None: where the Dockerfile says.
        build_seconds: That Docker may take to build it.
        network: Whether it may have a network, where the recipe gives tasks one.
        healthcheck: What must succeed before anybody works on it.
    """

    folder: Path
    name: str
    steps: tuple[TaskStep, ...]
    build: Build | None
    limits: SandboxLimits
    env: dict[str, str] = field(default_factory=dict)
    strategy: str = "mean"
    solution_env: dict[str, str] = field(default_factory=dict)
    cpus: float | None = None
    image: str | None = None
    workdir: str | None = None
    build_seconds: float = 600.0
    network: bool = False
    healthcheck: Healthcheck | None = None

    def tests(self, step: TaskStep) -> bytes:
        """The archive of `/tests` of a step: the task's, and over it the step's."""
        folders = [self.folder / "tests"] + ([step.folder / "tests"] if step.name else [])
        return tree_archive(*folders)

    def solution(self, step: TaskStep) -> bytes:
        """The archive of `/solution` of a step. Raises `BrokenTask` where there is no `solve.sh`."""
        if not (step.folder / "solution" / "solve.sh").is_file():
            raise BrokenTask(f"{(step.folder / 'solution').relative_to(self.folder)}/solve.sh is missing.")
        return tree_archive(step.folder / "solution")


@dataclass(frozen=True)
class Allowed:
    """What the recipe allows tasks at most, and by what they run."""

    memory_mb: int = 4096
    storage_mb: int = 1024
    docker: bool = False
    network: bool = False


def read_task(folder: Path, allowed: Allowed) -> HarborTask:
    """A task of a folder.

    Raises:
        BrokenTask: it cannot be run anywhere.
        NeedsMore: it cannot be run here.
    """
    try:
        root = TomlTable(tomllib.loads(text_of(folder / "task.toml", folder)), "the file")
    except tomllib.TOMLDecodeError as error:
        raise BrokenTask(f"task.toml is no TOML: {error}.") from None
    environment, agent, verifier = root.table("environment"), root.table("agent"), root.table("verifier")
    check_schema(root)
    networks = [table.network() for table in (environment, agent, verifier)]
    found = {
        "steps": read_steps(folder, root),
        "name": root.table("task").text("name") or folder.name,
        "strategy": root.choice("multi_step_reward_strategy", STRATEGIES) or "mean",
        "cpus": environment.number("cpus"),
        "image": environment.text("docker_image"),
        "workdir": environment.text("workdir"),
        "build_seconds": environment.number("build_timeout_sec") or 600.0,
        "healthcheck": environment.healthcheck(),
    }
    if found["workdir"] is not None and not found["workdir"].startswith("/"):
        raise BrokenTask(f"task.toml: [environment] workdir is {found['workdir']!r:.60}, expected an absolute path.")
    memory, storage = environment.megabytes("memory_mb", "memory"), environment.megabytes("storage_mb", "storage")
    check_files(folder, found["image"])
    # What is whole, and needs more than there is:
    of_steps = [each.table(name) for each in root.tables("steps") for name in ("agent", "verifier")]
    for table in (agent, verifier, *of_steps):
        table.user()
        if table.text("environment_mode") == "separate" or table.has("environment"):
            raise NeedsMore("a separate environment of the verifier")
    if verifier.tables("collect"):
        raise NeedsMore("a hook that collects files")
    check_environment_table(environment, folder)
    found["network"] = may_have_network(*networks) if allowed.network else False
    if memory is not None and memory > allowed.memory_mb:
        raise NeedsMore(f"memory_mb above harbor_memory_mb={allowed.memory_mb}")
    build = None if allowed.docker else read_build(folder, found["image"])
    for step in found["steps"] if not found["network"] else ():
        check_fetches(folder, step)
    limits = SandboxLimits(
        memory or min(2048, allowed.memory_mb), min(storage or allowed.storage_mb, allowed.storage_mb)
    )
    env, solution_env = environment.env(), root.table("solution").env()
    return HarborTask(folder=folder, build=build, limits=limits, env=env, solution_env=solution_env, **found)


def check_schema(root: TomlTable) -> None:
    """Raise `NeedsMore` for a schema that may mean other things by these words: of another first number than 1."""
    version = root.values.get("schema_version", root.values.get("version", "1.0"))
    if str(version).partition(".")[0] not in ("0", "1"):
        raise NeedsMore(f"schema_version {str(version):.20}")


def may_have_network(whole: str | None, *phases: str | None) -> bool:
    """Whether a task may have a network, by its `network_mode`, and those of its phases.

    Raises `NeedsMore` where that is neither yes nor no.
    """
    whole = whole or "public"
    modes = {whole, *(phase or whole for phase in phases)}
    if "allowlist" in modes:
        raise NeedsMore("a network of some hosts alone")
    if len(modes) > 1:
        raise NeedsMore("a network for a part of the task alone")
    return modes == {"public"}


def read_steps(folder: Path, root: TomlTable) -> tuple[TaskStep, ...]:
    """The steps of a task. Raises `BrokenTask` for one without an instruction or tests."""
    agent, verifier = root.table("agent"), root.table("verifier")
    env = verifier.env()
    agent_seconds, verifier_seconds = agent.number("timeout_sec"), verifier.number("timeout_sec")
    tables = root.tables("steps")
    if not tables:
        if (folder / "steps").is_dir() and not (folder / "instruction.md").exists():
            raise BrokenTask("there is a folder steps/, and task.toml has no [[steps]].")
        check_tests(folder, folder / "tests")
        instruction = text_of(folder / "instruction.md", folder)
        return (TaskStep("", folder, instruction, env, agent_seconds, verifier_seconds or VERIFIER_SECONDS),)
    steps = []
    for number, table in enumerate(tables):
        name = table.text("name") or ""
        if not re.fullmatch(STEP_NAME, name) or name in [step.name for step in steps]:
            raise BrokenTask(f"task.toml: the name of step {number} is {name!r:.60}, expected a name of its own.")
        of_step = folder / "steps" / name
        own = of_step / "tests"
        check_tests(folder, own if (own / "test.sh").is_file() else folder / "tests", own)
        steps.append(
            TaskStep(
                name,
                of_step,
                text_of(of_step / "instruction.md", folder),
                {**env, **table.table("verifier").env()},
                table.table("agent").number("timeout_sec") or agent_seconds,
                table.table("verifier").number("timeout_sec") or verifier_seconds or VERIFIER_SECONDS,
                read_min_reward(table),
                table.healthcheck(),
            )
        )
        if setup := steps[-1].setup:
            check_script(setup / "setup.sh", folder, needed=False)
    return tuple(steps)


def read_min_reward(table: TomlTable) -> float | dict[str, float] | None:
    """`min_reward` of a step: a number for the reward that counts, or a table of numbers by key."""
    value = table.values.get("min_reward")
    if value is None:
        return None
    found = value if isinstance(value, dict) else {"": value}
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in found.values()):
        raise BrokenTask(f"task.toml: [steps] min_reward is {value!r:.60}, expected a number, or numbers by key.")
    return {key: float(each) for key, each in value.items()} if isinstance(value, dict) else float(value)


def check_environment_table(table: TomlTable, folder: Path) -> None:
    """Raise `NeedsMore` for what no sandbox here has."""
    if (table.text("os") or "linux") != "linux":
        raise NeedsMore("Windows")
    for name, what in (("gpus", "GPUs"), ("tpu", "a TPU"), ("mcp_servers", "MCP servers")):
        if table.has(name):
            raise NeedsMore(what)
    if any((folder / "environment" / f"docker-compose.{end}").exists() for end in ("yaml", "yml")):
        raise NeedsMore("docker-compose")


def check_files(folder: Path, image: str | None) -> None:
    """Raise `BrokenTask` where nothing says what the environment is."""
    names = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")
    if image is None and not any((folder / "environment" / name).is_file() for name in names):
        raise BrokenTask("environment/Dockerfile is missing.")


def read_build(folder: Path, image: str | None) -> Build:
    """What a sandbox begins with, without Docker. An image that stands beside a Dockerfile was built of it."""
    if image is not None and not (folder / "environment" / "Dockerfile").is_file():
        raise NeedsMore("docker_image")
    return DockerfileReader(folder / "environment", folder).read()


def check_tests(task: Path, tests: Path, also: Path | None = None) -> None:
    """Raise `BrokenTask` unless a folder has a test script that bash can read."""
    if not (tests / "test.sh").is_file():
        other = f" or {(also / 'test.sh').relative_to(task)}" if also is not None and also != tests else ""
        raise BrokenTask(
            f"{(tests / 'test.sh').relative_to(task)}{other} is missing: nothing would say what was reached."
        )
    check_script(tests / "test.sh", task)


def check_script(file: Path, task: Path, needed: bool = True) -> None:
    """Raise `BrokenTask` for a script that bash cannot read. It is not run."""
    if not needed and not file.exists():
        return
    text = text_of(file, task)
    found = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin"}
    )
    if found.returncode:
        said = " ".join(found.stderr.split())
        raise BrokenTask(f"{file.relative_to(task)} is no script of bash: {said[-200:]}")


def check_fetches(folder: Path, step: TaskStep) -> None:
    """Raise `NeedsMore` for a script of tests that fetches something from the network."""
    for tests in {folder / "tests", step.folder / "tests"}:
        script = tests / "test.sh"
        for line in script.read_text(encoding="utf-8").splitlines() if script.is_file() else ():
            if line.lstrip().startswith("#") or re.search(r"localhost|127\.0\.0\.1", line):
                continue
            if match := FETCHES.search(line):
                what = re.sub(r"\s+", " ", match[1])
                raise NeedsMore(f"the network for its tests ({what.split()[0]})")


# A folder of tasks.


def task_folders(folder: Path, split: str) -> list[Path]:
    """The tasks in a folder: those in its folder of the split's name, else, of `train`, those in itself.

    Raises `ValueError` where there are none.
    """
    of_split = folder / split
    where = of_split if tasks_in(of_split) else folder
    found = tasks_in(where) if where == of_split or split == "train" else []
    if not found:
        raise ValueError(
            f"dataset_name: {str(folder)!r} has no tasks for the split {split!r}. Expected folders with a task.toml "
            f"in {of_split}" + (f", or in {folder}." if split == "train" else ".")
        )
    return found


def tasks_in(folder: Path) -> list[Path]:
    """The folders in a folder that are tasks: with a `task.toml`, or with what stands beside one."""
    signs = ("task.toml", "instruction.md", "tests", "environment")
    each = sorted(folder.iterdir()) if folder.is_dir() else []
    return [one for one in each if one.is_dir() and sum((one / sign).exists() for sign in signs) >= 2]


def read_tasks(folders: Iterable[Path], allowed: Allowed) -> tuple[list[HarborTask], Counter]:
    """(tasks that can be worked on here, how many others need what).

    Raises `ValueError` that names broken tasks, each with its number among the folders.
    """
    tasks, left_out, broken = [], Counter(), []
    for number, folder in enumerate(folders):
        try:
            tasks.append(read_task(folder, allowed))
        except NeedsMore as error:
            left_out[error.reason] += 1
        except BrokenTask as error:
            broken.append(f"row {number}, {folder.name}: {error}")
        except OSError as error:
            broken.append(f"row {number}, {folder.name}: {error.strerror}: {error.filename}")
    if broken:
        more = f" And {len(broken) - TOLD} more." if len(broken) > TOLD else ""
        raise ValueError(
            f"{len(broken)} of {number + 1} task folders are broken. {' '.join(broken[:TOLD])}{more} Mend them, or "
            "move them out of the folder."
        )
    return tasks, left_out


def task_row(task: HarborTask) -> dict[str, Any]:
    """The row of a task."""
    return {
        "prompt": [{"role": "user", "content": task.steps[0].instruction}],
        "task": task.name,
        "task_folder": str(task.folder),
    }
