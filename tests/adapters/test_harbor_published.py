"""Task folders as they are published: with all keys of their files. Whose they are stands in the test of each form."""

import collections
import logging
import os
import time
from pathlib import Path

import pytest
from test_harbor import PASSES, bash, harbor, needs_namespaces, play, write_task

from mt_grpo.adapters.harbor import check, dockerfile
from mt_grpo.adapters.harbor.docker import DockerImages
from mt_grpo.adapters.harbor.dockerfile import has_debian_package, needed_commands
from mt_grpo.adapters.harbor.images import NamespaceImages
from mt_grpo.adapters.harbor.tasks import Allowed, read_task
from mt_grpo.adapters.harbor.toml_tables import BrokenTask, Healthcheck, NeedsMore
from mt_grpo.rollout import StopReason

pytestmark = pytest.mark.faults  # a group of scripts/test.sh

# Terminal-Bench 2.1: an image that was built of the Dockerfile beside it, and tables without a key.
BENCH = """\
schema_version = "1.1"
artifacts = []

[task]
name = "own/count-lines"
description = "Counts the lines of a file."
keywords = ["text", "counting"]
[[task.authors]]
name = "Nobody"
email = "nobody@example.org"

[metadata]
author_name = "Nobody"
author_email = "nobody@example.org"
difficulty = "easy"
category = "text"
tags = ["text"]
expert_time_estimate_min = 5.0
junior_time_estimate_min = 20.0

[verifier]
timeout_sec = 900.0

[agent]
timeout_sec = 800.0

[environment]
build_timeout_sec = 500.0
docker_image = "nobody/count-lines:20260101"
cpus = 1
memory_mb = 2048
storage_mb = 10240
gpus = 0
allow_internet = true
mcp_servers = []

[verifier.env]

[environment.env]

[solution.env]
"""
# The cookbook of Harbor's makers: the version's old name, and few keys.
COOKBOOK = """\
version = "1.0"

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 110.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
skills_dir = "/skills"
"""
# Of the same: steps, each with all that a step may have.
STEPS = """\
schema_version = "1.1"

# Kept at the end of each step.
artifacts = ["/app/sum.sh"]

[task]
name = "own/sum-in-steps"
description = "A script in three steps."
authors = [{ name = "Nobody", email = "nobody@example.org" }]
keywords = ["steps"]

[metadata]
difficulty = "easy"
tags = ["steps"]

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
storage_mb = 10240
gpus = 0
allow_internet = true
mcp_servers = []
workdir = "/app"

[environment.env]
PROJECT = "sums"

[[steps]]
name = "begin"
min_reward = 1.0

[steps.agent]
timeout_sec = 60.0

[steps.verifier]
timeout_sec = 30.0

[[steps]]
name = "add"
dependencies = ["begin"]
min_reward = 0.5

[steps.agent]
timeout_sec = 90.0

[steps.verifier]
timeout_sec = 30.0

[steps.verifier.env]
EXPECTED = "7"

[steps.healthcheck]
command = "test -x /app/sum.sh"
interval_sec = 1
timeout_sec = 5
retries = 3

[[steps]]
name = "tell"
artifacts = ["/app/README.md"]

[steps.agent]
timeout_sec = 60.0

[steps.verifier]
timeout_sec = 30.0
"""
PASS = 'source /tests/helpers.sh\n[ "$({})" = {} ] && pass\nfail\n'
STEP_FILES = {
    "task.toml": STEPS, "instruction.md": None, "tests/test.sh": None,
    "environment/Dockerfile": "FROM ubuntu:24.04\nRUN apt-get update && apt-get install -y --no-install-recommends "
    "bash coreutils \\\n    && rm -rf /var/lib/apt/lists/*\nWORKDIR /app\n",
    "tests/helpers.sh": "pass() { echo 1 > /logs/verifier/reward.txt; exit 0; }\n"
    "fail() { echo 0 > /logs/verifier/reward.txt; exit 0; }\n",
    "steps/begin/instruction.md": "Write sum.sh, which prints 0.",
    "steps/begin/tests/test.sh": PASS.format("/app/sum.sh", "0"),
    "steps/begin/solution/solve.sh": "echo echo 0 > sum.sh; chmod +x sum.sh\n",
    "steps/add/instruction.md": "Let it add the numbers of numbers.txt.",
    "steps/add/workdir/numbers.txt": "3 \n4 \n",
    "steps/add/workdir/setup.sh": 'sed -i "s/ //" numbers.txt\nmkdir -p /logs/artifacts\n'
    'echo set > /logs/artifacts/up\nrm -- "$0"\n',
    "steps/add/tests/test.sh": PASS.format("/app/sum.sh", '"$EXPECTED"'),
    "steps/add/solution/solve.sh": "echo 'echo $(($(paste -sd+ numbers.txt)))' > sum.sh\n",
    "steps/tell/instruction.md": "Write README.md.",
    "steps/tell/tests/test.sh": PASS.format("head -n 1 /app/README.md; /app/sum.sh; ls /app/setup.sh 2> /dev/null",
                                            "$'# '$PROJECT$'\\n7'"),
    "steps/tell/solution/solve.sh": 'echo "# $PROJECT" > README.md\n',
}  # fmt: skip
# A large set of generated tasks: tests that the Dockerfile installs, a link in the system's folders.
GENERATED = """\
FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624

ENV DEBIAN_FRONTEND=noninteractive

# What the tests need
RUN apt-get update && \\
    apt-get install -y bash tar libc-dev && \\
    ln -s {there} {link} && \\
    rm -rf /var/lib/apt/lists/*

RUN mkdir -p /home/user /tests /logs/verifier /solution
COPY data/lines.txt /home/user/lines.txt
RUN chmod +r /home/user/*.txt
WORKDIR /home/user
ENV TEST_DIR=/tests
"""
RETURNS = """\
#!/bin/bash

[ "$(cat $TEST_DIR/right)" = "$(cat out)" ]

_EXIT_CODE=$?
if [ $_EXIT_CODE -eq 0 ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
exit $_EXIT_CODE
"""


@needs_namespaces
def test_a_task_of_terminal_benchs_form(tmp_path):
    """Its image cannot be pulled here; the Dockerfile that it was built of can be read."""
    files = {"environment/setup.sh": "cp -r resources/. .\n", "environment/resources/lines.txt": "a\nb\n"}
    docker = (
        "FROM python:3.13-slim-bookworm\n\nWORKDIR /app\n\nRUN apt-get update && apt-get install -y bash\n\n"
        "COPY setup.sh ./\n\nCOPY resources /app/resources\n\n"
        "RUN bash /app/setup.sh && rm -rf /app/resources /app/setup.sh\n\nWORKDIR /app/site\n"
    )
    write_task(tmp_path, dockerfile=docker, tests=PASSES.replace("/app", "/app/site"), **{"task.toml": BENCH, **files})
    task = read_task(tmp_path / "one", Allowed())
    (step,) = task.steps
    assert (task.name, task.cpus, task.limits.memory_mb, task.limits.storage_mb) == ("own/count-lines", 1, 2048, 1024)
    assert (step.agent_seconds, step.verifier_seconds, task.build_seconds) == (800, 900, 500)
    assert (task.env, step.env, task.solution_env, task.image) == ({}, {}, {}, "nobody/count-lines:20260101")
    (rollout,) = play(tmp_path, bash("pwd; ls ..; echo right > out"), "<answer>x</answer>")
    assert rollout.turns[0].observation == "/app/site\nlines.txt\nsite" and rollout.reward == 1.0


def test_by_docker_it_is_its_image(tmp_path):
    write_task(tmp_path, **{"task.toml": BENCH})
    task = read_task(tmp_path / "one", Allowed(docker=True))
    assert (task.image, task.build) == ("nobody/count-lines:20260101", None)


def test_a_task_of_the_cookbooks_form(tmp_path):
    folder = write_task(tmp_path, "hello", **{"task.toml": COOKBOOK})
    task = read_task(folder, Allowed())
    assert (task.name, task.steps[0].agent_seconds, task.limits.memory_mb) == ("hello", 110, 2048)
    folder = write_task(tmp_path, "two", tests="#!/bin/bash\n\napt-get update\napt-get install -y curl\n\ncurl -LsSf "
                        "https://example.org/install.sh | sh\n", **{"task.toml": COOKBOOK})  # fmt: skip
    with pytest.raises(NeedsMore, match=r"the network for its tests \(apt-get\)"):
        read_task(folder, Allowed())


@needs_namespaces
def test_a_task_of_steps_with_all_that_steps_have(tmp_path):
    """Helpers of all steps, variables, files, a set-up, a health check and a least reward of each."""
    folder = write_task(tmp_path, **STEP_FILES)
    task = read_task(folder, Allowed())
    assert [step.healthcheck for step in task.steps] == [
        None,
        Healthcheck("test -x /app/sum.sh", 1, 5, retries=3),
        None,
    ]
    trial = check.try_task(NamespaceImages(), task)
    assert [said.rewards for said in trial.solved] == [{"reward": 1.0}] * 3 and trial.problems("reward") == []
    turns = [bash("echo echo 0 > sum.sh; chmod +x sum.sh"), "<answer>1</answer>", bash("cat numbers.txt; ls"),
             "<answer>2</answer>"]  # fmt: skip
    (rollout,) = play(tmp_path, *turns)
    assert rollout.turns[2].observation == "3\n4\nnumbers.txt\nsum.sh"
    assert [turn.reward for turn in rollout.turns] == [None, 1.0, None, 0.0] and rollout.reward == pytest.approx(1 / 3)


@needs_namespaces
def test_a_step_whose_health_check_the_policy_breaks_is_missed(tmp_path, caplog, monkeypatch):
    """It waits between its tries, and is not tried on and on."""
    pauses = []
    monkeypatch.setattr(time, "sleep", lambda seconds: pauses.append(seconds) if seconds >= 1 else None)
    tests = {"steps/begin/tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}
    write_task(tmp_path, **{**STEP_FILES, **tests})
    with caplog.at_level(logging.WARNING):
        (rollout,) = play(tmp_path, "<answer>1</answer>", "<answer>2</answer>")
    assert [turn.reward for turn in rollout.turns] == [1.0] and rollout.reward == pytest.approx(1 / 3)
    assert rollout.stop_reason == StopReason.ANSWERED and pauses == [1, 1]
    missed = "step add did not begin: health check fails (exit code 1: )"
    assert rollout.turns[0].info["harbor"]["missed"] == missed and missed in caplog.text


@needs_namespaces
@pytest.mark.parametrize("command, left_out", [
    ("test -d /app", {}), ("test -e /app/server", {"a machine on which its health check fails (exit code 1: )": 1}),
])  # fmt: skip
def test_a_task_whose_health_check_fails_on_an_untouched_machine_is_left_out(tmp_path, caplog, command, left_out):
    """As one that asks for a server, which nobody starts here."""
    write_task(tmp_path, "fine")
    toml = f'[environment.healthcheck]\ncommand = "{command}"\nretries = 1\n'
    write_task(tmp_path, "two", toml=toml)
    with caplog.at_level(logging.WARNING):
        rows = harbor().read_folder(tmp_path, "train")
    assert len(rows) == 2 - len(left_out) and all(f"1 {reason}" in caplog.text for reason in left_out)


@needs_namespaces
def test_a_task_of_a_generated_form(tmp_path):
    """A link that this machine has need not be made; folders that a sandbox has are there."""
    there = next(path for path in ("/bin/sh", "/usr/bin/sh") if Path(path).is_symlink())
    link = GENERATED.format(there=os.path.realpath(there), link=there)
    files = {"task.toml": COOKBOOK, "environment/data/lines.txt": "a\n", "tests/right": "right\n"}
    write_task(tmp_path, dockerfile=link, tests=RETURNS, **files)
    (rollout,) = play(tmp_path, bash("pwd; cat lines.txt; echo right > out"), "<answer>x</answer>")
    assert (rollout.turns[0].observation, rollout.reward) == ("/home/user\na", 1.0)
    (rollout,) = play(tmp_path, "<answer>x</answer>")
    assert (rollout.reward, rollout.error) == (0.0, None)


def test_bases_of_the_same_images_elsewhere():
    for name in ("public.ecr.aws/docker/library/python:3.11-slim", "docker.io/library/debian", "docker.io/debian:12",
                 "mirror.gcr.io/library/ubuntu:24.04", "library/alpine"):  # fmt: skip
        assert dockerfile.BASES.fullmatch(name), name
    for name in ("public.ecr.aws/docker/library/golang:1.22", "public.ecr.aws/debian", "somebody/debian"):
        assert not dockerfile.BASES.fullmatch(name), name


def test_what_another_package_provides_is_there(monkeypatch):
    """`libc-dev` is no package of its own."""
    said = (
        "ii |libc6-dev, libc-dev\nrc |nginx, httpd\nii |bash, \nii |postfix, default-mta (= 3), mail-transport-agent\n"
    )
    monkeypatch.setattr(dockerfile.subprocess, "run", lambda *words, **more: type("", (), {"stdout": said}))
    dockerfile.debian_packages.cache_clear()
    try:
        names = "libc6-dev libc-dev nginx httpd bash default-mta mail-transport-agent libc-dev:amd64 libc".split()
        assert [name for name in names if not has_debian_package(name)] == ["nginx", "httpd", "libc"]
        assert needed_commands("apt-get install -y libc-dev=2.36-9") == ""
    finally:
        dockerfile.debian_packages.cache_clear()


NETWORKS = [
    ("", True), ("[environment]\nallow_internet = true\n", True), ("[environment]\nallow_internet = false\n", False),
    ('[environment]\nnetwork_mode = "no-network"\nallow_internet = true\n', False),
    ('[environment]\nnetwork_mode = "public"\nallow_internet = false\n', True),
    ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["x.org"]\n', "a network of some hosts alone"),
    ('[agent]\nnetwork_mode = "no-network"\n', "a network for a part of the task alone"),
    ('[environment]\nnetwork_mode = "no-network"\n[agent]\nnetwork_mode = "no-network"\n', False),
]  # fmt: skip


@pytest.mark.parametrize("toml, network", NETWORKS)
def test_a_task_that_wants_no_network_has_none_where_the_recipe_gives_one(tmp_path, monkeypatch, toml, network):
    """Without a network of the recipe's, all are the same: they have none."""
    folder = write_task(tmp_path, **{"task.toml": f"{toml}\n[metadata]\n"})
    assert read_task(folder, Allowed()).network is False
    allowed = Allowed(docker=True, network=True)
    if isinstance(network, str):
        with pytest.raises(NeedsMore, match=network):
            read_task(folder, allowed)
        return
    task, started = read_task(folder, allowed), []

    def command(*words, **more):
        started.extend(words if words[0] == "run" else [])
        raise dockerfile.BrokenTask("no container is needed")

    monkeypatch.setattr("mt_grpo.adapters.harbor.docker.docker_command", command)
    images = DockerImages(network=True)
    images._images[str(folder)] = "image"
    with pytest.raises(BrokenTask):
        images.open(task)
    assert task.network is network and started[started.index("--network") + 1] == ("bridge" if network else "none")


@pytest.mark.skipif(not os.environ.get("HARBOR_TASKS"), reason="HARBOR_TASKS names no folder of published tasks")
@pytest.mark.timeout(3600)
def test_a_folder_of_published_tasks_is_read_and_each_is_counted(capsys):
    """`HARBOR_TASKS=DIR pytest -s`: which can be worked on here, and what the others need."""
    folders = sorted({path.parent for path in Path(os.environ["HARBOR_TASKS"]).rglob("task.toml")})
    found = collections.Counter()
    for folder in folders:
        try:
            read_task(folder, Allowed())
            found["can be worked on here"] += 1
        except NeedsMore as error:
            found[f"needs {error.reason}"] += 1
        except BrokenTask as error:
            found[f"is broken: {folder.name}: {error}"] += 1
    with capsys.disabled():
        print(
            f"\n{len(folders)} task folders", *(f"{count:6} {what}" for what, count in found.most_common()), sep="\n"
        )
    assert folders and found.total() == len(folders)
