"""Task folders by Docker where it fails: a stand-in for its command says what Docker would. It runs nothing."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_harbor import archive_of

from mt_grpo.adapters.harbor.commands import SandboxError
from mt_grpo.adapters.harbor.docker import DockerSandbox
from mt_grpo.adapters.harbor.environment import said_by_tests
from mt_grpo.adapters.harbor.sandbox import SandboxLimits

pytestmark = pytest.mark.faults  # a group of scripts/test.sh

ROOT = Path(__file__).resolve().parents[2]
# A file `no-WORD` beside it has a command of Docker's fail, with what the file holds.
DOCKER = """#!/bin/bash
here=$(dirname "$0")
echo "$*" | tr '\\n' ' ' >> "$here/log"
echo >> "$here/log"
if [ -e "$here/no-$1" ]; then cat "$here/no-$1" >&2; exit 1; fi
case $1 in
    run) echo c0ffee ;;
    ps) echo c0ffee ;;
    exec) cat > /dev/null; echo begun >&2 ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The folder of the stand-in."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def log(folder):
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []


def test_a_container_is_removed_where_its_trainer_is_killed(stand_in):
    program = (
        "import threading\nfrom mt_grpo.adapters.harbor.docker import DockerSandbox\n"
        "from mt_grpo.adapters.harbor.sandbox import SandboxLimits\n"
        "sandbox = DockerSandbox('image', SandboxLimits())\nprint('up', flush=True)\nthreading.Event().wait()\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "up\n"
    (started,) = log(stand_in)
    label = started.split("--label ")[1].split()[0]
    assert label.startswith(f"mt-grpo-harbor={trainer.pid}-") and "--pids-limit 512" in started
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    while len(log(stand_in)) < 3:
        threading.Event().wait(0.01)
    assert [line.strip() for line in log(stand_in)[1:3]] == [
        f"ps --all --quiet --no-trunc --filter label={label}", "rm --force --volumes c0ffee"
    ]  # fmt: skip


def test_a_container_that_can_start_no_process_is_started_anew_before_it_is_judged(stand_in):
    """As behind a fork bomb. What runs in it would go on beside the tests, or the policy be rid of its rollout."""
    sandbox = DockerSandbox("image", SandboxLimits())
    (stand_in / "no-exec").write_text("OCI runtime exec failed: resource temporarily unavailable\n")
    outcome = sandbox.judge(archive_of(test_sh="true"), "/app", {}, 60.0)
    said = said_by_tests(outcome, 60.0)
    assert said.rewards == {} and said.problem.endswith("and ended with exit code 126")
    assert "resource temporarily unavailable" in said.output
    assert [line.strip() for line in log(stand_in) if line.startswith("restart")] == ["restart --time 0 c0ffee"]
    outcome = sandbox.shell("true", "/", "/", {}, 60.0)
    assert outcome.code == 126 and "OCI runtime exec failed" in outcome.text(999)
    sandbox.close()


def test_a_container_that_cannot_be_judged_has_no_reward_while_docker_answers(stand_in):
    """A policy may have removed its `bash`. Where Docker itself is gone, that is no doing of the policy's."""
    sandbox = DockerSandbox("image", SandboxLimits())
    for word in ("exec", "restart"):
        (stand_in / f"no-{word}").write_text("no bash\n")
    assert said_by_tests(sandbox.judge(archive_of(test_sh="true"), "/app", {}, 60.0), 60.0).rewards == {}
    (stand_in / "no-version").write_text("Cannot connect to the Docker daemon\n")
    for attempt in (sandbox.judge, lambda *words: sandbox.shell("true", "/", "/", {}, 60.0)):
        with pytest.raises(SandboxError, match="docker version: Cannot connect to the Docker daemon"):
            attempt(archive_of(test_sh="true"), "/app", {}, 60.0)
    sandbox.close()


def test_a_container_without_a_fault_is_judged(stand_in):
    """Each command of Docker's that judging takes, in its order."""
    sandbox = DockerSandbox("image", SandboxLimits())
    outcome = sandbox.judge(archive_of(test_sh="true"), "/app", {"A": "b"}, 60.0)
    assert (outcome.code, outcome.why, outcome.control) == (0, "", b"")
    first, kill, fill, tests, again, verdict = log(stand_in)
    assert first.startswith("run --detach --rm") and kill == again
    assert "kill -KILL -1" in kill and "tar -x -C" in fill and "reward.json" in verdict
    assert "--env A=b" in tests and "exec bash /tests/test.sh" in tests and "--user 0" in tests
    sandbox.close()
    assert log(stand_in)[-1].strip() == "rm --force --volumes c0ffee"
