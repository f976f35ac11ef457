"""Task folders by Docker. They run where a daemon answers; the image is made of this machine's own programs.

A daemon for them alone, as root of a container, of Debian's packages docker.io, containerd, runc and tini:
`dockerd --host unix:///tmp/docker --storage-driver vfs --bridge none --iptables=false`, and `DOCKER_HOST` to match.
"""

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from test_harbor import PASSES, archive_of, bash, harbor, play, write_task

from mt_grpo.adapters.harbor.commands import SandboxError
from mt_grpo.adapters.harbor.docker import DockerImages, DockerSandbox, docker_command, docker_problem
from mt_grpo.adapters.harbor.sandbox import SandboxLimits
from mt_grpo.adapters.harbor.tasks import Allowed
from mt_grpo.adapters.harbor.verdict import read_reward_files, rewards_of

pytestmark = pytest.mark.skipif(bool(docker_problem()), reason=f"no Docker: {docker_problem()}")
PROGRAMS = "bash sh cat ls mkdir rm sleep tar head stat base64 echo env ps id touch".split()
LIMITS = SandboxLimits(256, 64)


@pytest.fixture(scope="module")
def image():
    """An image with bash and little else."""
    buffer, seen = io.BytesIO(), set()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in PROGRAMS:
            real = Path(shutil.which(name)).resolve()
            tar.add(real, f"usr/bin/{name}")
            libraries = subprocess.run(["ldd", str(real)], capture_output=True, text=True).stdout.split()
            seen |= {word for word in libraries if word.startswith("/")}
        for library in sorted(seen):
            tar.add(Path(library).resolve(), f"usr{library}" if library.startswith("/lib") else library[1:])
        for link, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        for name in ("tmp", "root", "etc"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(info)
    name = "mt-grpo-harbor-test:base"
    docker_command("import", "-", name, given=buffer.getvalue(), seconds=300)
    yield name
    docker_command("image", "rm", "--force", name)


@pytest.fixture
def container(image):
    made = DockerSandbox(image, LIMITS, cpus=1)
    yield made
    made.close()


def test_commands_keep_their_folder_and_have_a_time(container):
    outcome = container.shell("mkdir -p /app; cd /app; pwd; ls /sys/class/net; false", "/", "/", {"A": "b"}, 60.0)
    assert (outcome.code, outcome.control) == (1, b"/app\n") and outcome.text(99) == "/app\nlo\n"
    assert container.shell("echo $A; read x; echo $?", "/app", "/", {"A": "b"}, 60.0).text(99) == "b\n1\n"
    outcome = container.shell("echo on; sleep 777", "/", "/", {}, 1.0)
    assert (outcome.code, outcome.why, outcome.text(99)) == (None, "time", "on\n")
    assert "sleep 777" not in container.shell("ps -eo args | cat", "/", "/", {}, 60.0).text(999).splitlines()


def test_tests_begin_without_the_policys_processes_and_its_reward(container):
    forge = "while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done"
    container.shell(
        f"({forge}) > /dev/null 2>&1 & mkdir -p /tests; echo 'echo forged' > /tests/other.sh", "/", "/", {}, 60
    )
    outcome = container.judge(archive_of(test_sh="ls /tests; ls -A /logs/verifier"), "/", {}, 60.0)
    assert outcome.text(99) == "test.sh\n" and read_reward_files(outcome.control) == {}
    tests = "kill -s KILL -- -1; echo $X > /logs/verifier/reward.txt; exit 3"
    outcome = container.judge(archive_of(test_sh=tests), "/", {"X": "0.5"}, 60.0)
    assert outcome.code == 3 and rewards_of(read_reward_files(outcome.control)) == ({"reward": 0.5}, "")


def test_a_closed_container_is_gone(image):
    made = DockerSandbox(image, LIMITS)
    made.close()
    made.close()
    assert made._container not in docker_command("ps", "--all", "--quiet", "--no-trunc").decode()
    with pytest.raises(SandboxError, match="it was closed"):
        made.shell("true", "/", "/", {}, 60.0)


def test_a_conversation_by_docker(tmp_path, image):
    """The Dockerfile is built; tasks that need what it has not are said with what Docker says."""
    write_task(
        tmp_path, dockerfile=f"FROM {image}\nWORKDIR /app\nCOPY x .\nENV MODE=fast\n", **{"environment/x": "hi\n"}
    )
    cls = harbor(DockerImages(), allowed=Allowed(docker=True), most_turns=4)
    turns = [bash("pwd; cat x; echo $MODE; touch /usr/bin/mine"), bash("echo right > out"), "<answer>x</answer>"]
    (rollout,) = play(tmp_path, *turns, cls=cls)
    assert rollout.turns[0].observation == "/app\nhi\nfast" and (rollout.reward, rollout.error) == (1.0, None)
    write_task(tmp_path, "two", dockerfile=f"FROM {image}\nRUN no-such-program\n", tests=PASSES)
    with pytest.raises(ValueError, match="the task own/two cannot begin: docker build: .*no-such-program"):
        cls.read_folder(tmp_path, "train")
