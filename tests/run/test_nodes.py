"""Two launchers, as on two nodes: they train as one, stop together, go on exactly, and say what they do not share."""

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest
import torch
import warm_python
from bench.common import free_port
from project import ROOT, steps_of
from safetensors.torch import load_file

from mt_grpo.run.checkpoints import checkpoint_to_resume

CPU = ROOT / "hf_recipes/accelerate/cpu.yaml"
PLUGIN = """
import os
import time


def length_reward(completion_ids, trainer_state, **kwargs):
    with open(os.path.join(os.path.dirname(__file__), f"pid{os.environ['RANK']}"), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(float(os.environ.get("SECONDS_PER_STEP", 0)))
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


OUTCOME_REWARD_FUNCS = [length_reward]
"""
ARGUMENTS = [
    "--config", "hf_recipes/tiny/calculator.yaml", "--max_steps", "4", "--dataset_size", "64",
    "--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "64",
    "--max_turn_tokens", "40", "--disable_tqdm", "true",
]  # fmt: skip


class Nodes:
    """A run on two nodes: a launcher for each, with one process. Both are on this machine."""

    def __init__(self, folder, *arguments, outputs=("out", "out"), seconds_per_step=0.0, more=((), ())):
        folder.mkdir(exist_ok=True)
        (folder / "reward.py").write_text(PLUGIN)
        self.folder, port = folder, free_port()
        self.logs = [folder / f"node{rank}.log" for rank in range(2)]
        self.launchers = []
        for rank, (output, own) in enumerate(zip(outputs, more)):
            command = [
                warm_python.executable(), "-m", "accelerate.commands.launch", "--config_file", str(CPU),
                "--num_machines", "2", "--machine_rank", str(rank), "--num_processes", "2",
                "--main_process_ip", "127.0.0.1", "--main_process_port", str(port),
                "mt_grpo_trainer.py", *ARGUMENTS, "--reward_fn", str(folder / "reward.py"),
                "--output_dir", str(folder / output), *map(str, arguments), *own,
            ]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "SECONDS_PER_STEP": str(seconds_per_step)}
            options = {"cwd": ROOT, "env": environment, "stderr": subprocess.STDOUT, "start_new_session": True}
            with open(self.logs[rank], "w") as log:
                self.launchers.append(subprocess.Popen(command, stdout=log, **options))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for rank, launcher in enumerate(self.launchers):
            launcher.kill()
            launcher.wait()
            with contextlib.suppress(OSError):  # it has a session of its own, and may be stopped
                os.kill(self.trainer(rank), signal.SIGKILL)

    def trainer(self, rank: int) -> int:
        """The process id of the trainer of a node, after its first rewards."""
        return int((self.folder / f"pid{rank}").read_text())

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def wait_for(self, path: str, text: str, seconds: float = 120.0) -> None:
        """Until a file of the folder has the text."""
        file, until = self.folder / path, time.monotonic() + seconds
        while not file.is_file() or text not in file.read_text():
            assert time.monotonic() < until, (self.said(0)[-2000:], self.said(1)[-2000:])
            assert all(launcher.poll() is None for launcher in self.launchers), self.said(0)[-2000:] + self.said(1)
            time.sleep(0.02)

    def exit_codes(self, seconds: float = 120.0) -> list[int]:
        until = time.monotonic() + seconds
        return [launcher.wait(max(0.1, until - time.monotonic())) for launcher in self.launchers]


def train(folder, *arguments, **options):
    with Nodes(folder, *arguments, **options) as nodes:
        assert nodes.exit_codes() == [0, 0], nodes.said(0)[-3000:] + nodes.said(1)[-3000:]
    return nodes


def steps(folder):
    keys = ("loss", "grad_norm", "reward", "num_tokens")
    return {row["step"]: [row[key] for key in keys] for row in steps_of(folder)}


def to_trainer_1(nodes):
    os.kill(nodes.trainer(1), signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on two nodes that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder / "out"


def stopped_by(stop, folder, *arguments, outputs=("out", "out"), **options):
    """A run that is stopped after its second step, and saves one checkpoint in each directory."""
    with Nodes(folder, *arguments, outputs=outputs, seconds_per_step=0.7, **options) as nodes:
        nodes.wait_for(f"{outputs[0]}/metrics.jsonl", '"step": 2')
        stopped = time.monotonic()
        stop(nodes)
        assert nodes.exit_codes(60) == [1, 1]  # a launcher's; the trainers' is 143
        assert time.monotonic() - stopped < 30
    for rank, output in enumerate(outputs):
        (saved,) = (folder / output).glob("checkpoint-*")
        said = nodes.said(rank)
        assert "stopped by SIGTERM" in said and f"--resume_from_checkpoint {saved}\n" in said, said[-3000:]
    assert "exitcode  : 143" in nodes.said(0) + nodes.said(1)
    return nodes


def stop_and_go_on(whole, folder, stop, *arguments, outputs=("out", "out")):
    """Stop and resume a run: steps, losses and weights are those of the uninterrupted one, bit for bit."""
    stopped_by(stop, folder, *arguments, outputs=outputs)
    train(folder, *arguments, "--resume_from_checkpoint", "last", outputs=outputs)
    resumed = folder / outputs[0]
    assert list(steps(whole)) == [1, 2, 3, 4] and steps(resumed) == steps(whole)
    first, second = (load_file(each / "model.safetensors") for each in (whole, resumed))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_signal_to_one_node_stops_both_and_they_go_on_exactly(whole, tmp_path):
    stop_and_go_on(whole, tmp_path, to_trainer_1)
    assert {path.name for path in (tmp_path / "out").glob("rollouts.*")} == {f"rollouts.rank{r}.jsonl" for r in (0, 1)}


@pytest.mark.slow
def test_nodes_without_a_shared_disk_keep_a_checkpoint_each(whole, tmp_path):
    """Both go on from their own; without node 1's they do not go on at all."""
    outputs, each = ("disk0", "disk1"), ("--save_on_each_node", "true")
    stop_and_go_on(whole, tmp_path, to_trainer_1, *each, outputs=outputs)
    for rank in range(2):
        assert [path.name for path in (tmp_path / outputs[rank]).glob("rollouts.*")] == [f"rollouts.rank{rank}.jsonl"]
    (saved,) = (tmp_path / "disk1").glob("checkpoint-*")
    saved.rename(saved.with_name("gone"))
    message = "error: rank 1 on .*: resume_from_checkpoint='last' is no whole checkpoint"
    refused(tmp_path, message, *each, "--resume_from_checkpoint", "last", outputs=outputs)


def refused(folder, message, *arguments, **options):
    """Both nodes end with this message, before weights are loaded."""
    with Nodes(folder, *arguments, **options) as nodes:
        assert nodes.exit_codes(60) == [1, 1]
    for rank in range(2):
        assert re.search(message, nodes.said(rank), re.S), nodes.said(rank)[-3000:]
        assert "Loading weights" not in nodes.said(rank)


@pytest.mark.parametrize("arguments, outputs, message", [
    ((), ("disk0", "disk1"), "output_dir='.*' is shared by 1 of 2 ranks. .*save_on_each_node: true"),
    (("--save_on_each_node", "true"), ("out", "out"), "save_on_each_node: true, but nodes share output_dir"),
])  # fmt: skip
def test_nodes_whose_output_does_not_fit_are_refused(tmp_path, arguments, outputs, message):
    refused(tmp_path, f"error: rank 0 on .*: {message}", *arguments, outputs=outputs)


def test_nodes_that_would_train_differently(tmp_path):
    """Such as one with another copy of the recipe: its gradients would be averaged with the others'."""
    with Nodes(tmp_path, more=((), ("--turn_advantage_coef", "0.5", "--learning_rate", "1e-5"))) as nodes:
        assert nodes.exit_codes(60) == [1, 1]
    for rank in range(2):
        said = " ".join(nodes.said(rank).split())
        differs = r"error: rank 1 on .*: learning_rate: 0.0006 -> 1e-05 turn_advantage_coef: 1.0 -> 0.5"
        assert re.search(differs, said), said[-3000:]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_node_that_is_killed_ends_the_other(tmp_path, rank):
    """It closes its connections. The last checkpoint is whole."""
    saving = "--save_strategy", "steps", "--save_steps", "1"
    with Nodes(tmp_path, *saving, seconds_per_step=0.7) as nodes:
        nodes.wait_for("out/checkpoint-1/trainer_state.json", "}")
        nodes.wait_for("out/metrics.jsonl", '"step": 1')
        began = time.monotonic()
        nodes.launchers[rank].kill()
        os.kill(nodes.trainer(rank), signal.SIGKILL)
        assert nodes.launchers[1 - rank].wait(60) == 1
        assert time.monotonic() - began < 30
    said = nodes.said(1 - rank)
    assert re.search("Connection (closed|reset) by peer|Broken pipe", said), said[-3000:]
    assert checkpoint_to_resume("last", str(tmp_path / "out"))
