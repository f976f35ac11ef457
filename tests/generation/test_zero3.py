"""Training with weights that DeepSpeed shards by ZeRO-3 over two gloo processes, in an environment of its own.

The configuration is hf_recipes/accelerate/zero3.yaml as it is, but for bf16 where values are compared. `SPLIT` adds
what a model this small needs: DeepSpeed keeps parameters below 100,000 numbers whole, and all of this one's are.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import yaml
from bench.common import VLLMServer, free_port
from safetensors.torch import load_file
from server_run import FLAGS
from test_server import SHARDED_LORA, assert_trained_from_what_the_server_held, sharded_recipe
from test_sharded import (
    ROOT,
    WORKER,
    assert_goes_on_exactly,
    assert_trains_as_ddp_does,
    check_pushed,
    check_the_kl,
    launch,
    recipe,
    steps,
    train_and_resume,
)

ZERO3 = ROOT / "hf_recipes/accelerate/zero3.yaml"
SPLIT = {
    "zero_optimization": {
        "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True,
    },
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_allow_untested_optimizer": True,
}  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # of the first one a minute or more is DeepSpeed's compiler
    pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles an op for the CPU: needs g++"),
]


@pytest.fixture(scope="module")
def launch_zero3(tmp_path_factory):
    """`launch` with a Python that has DeepSpeed, besides all that this one has."""
    folder = tmp_path_factory.mktemp("deepspeed")
    command, names = ["bash", "scripts/setup.sh", "--deepspeed-in", str(folder / "env")], {"PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **names})
    assert done.returncode == 0, done.stdout + done.stderr
    env = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder / "ops"), "PYTHONPATH": str(ROOT)}
    # The op is compiled once, outside the time that a run may take: one that is ended there leaves a lock for ever.
    build = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    command = [str(folder / "env/bin/python"), "-c", build]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0 and any((folder / "ops").glob("**/*.so")), done.stdout + done.stderr
    return functools.partial(launch, python=str(folder / "env/bin/python"), **env)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """A configuration under which each rank holds half of every parameter."""
    folder = tmp_path_factory.mktemp("split")
    (folder / "ds.json").write_text(json.dumps(SPLIT))
    config = yaml.safe_load(ZERO3.read_text())
    config["deepspeed_config"] = {"deepspeed_config_file": str(folder / "ds.json"), "zero3_init_flag": True}
    del config["mixed_precision"]  # accelerate takes it from the file
    (folder / "split.yaml").write_text(yaml.safe_dump(config))
    return folder / "split.yaml"


@pytest.fixture(scope="module")
def trained(launch_zero3, tmp_path_factory):
    launch_sharded = functools.partial(launch_zero3, ZERO3, ["mt_grpo_trainer.py"])
    return train_and_resume(tmp_path_factory.mktemp("zero3"), launch_sharded)


@pytest.mark.contract_slow("ZeRO-3")
def test_zero3_trains_as_ddp_does(trained):
    """It adds gradients in another order. Where one is about as small as Adam's epsilon, the step depends on that: 9
    of 600,000 weights were more than 1e-6 apart, one of them 1.7e-5, after steps of 9e-4 on average."""
    assert_trains_as_ddp_does(trained, atol=1e-4)


def test_zero3_goes_on_exactly(trained):
    assert_goes_on_exactly(trained)


def test_two_launchers_train_as_one(trained, launch_zero3, tmp_path):
    """As on two nodes, with accelerate's own launcher in place of DeepSpeed's: every step and the weights, exactly."""
    path = recipe(tmp_path / "x", "out", save_strategy="steps", save_steps=2, max_steps=5)
    place = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()),
             "--deepspeed_multinode_launcher", "standard"]  # fmt: skip

    def node(rank):
        return launch_zero3(ZERO3, [*place, "--machine_rank", rank, "mt_grpo_trainer.py"], "--config", path)

    with ThreadPoolExecutor(2) as nodes:
        list(nodes.map(node, "01"))
    _, whole, _ = trained
    assert list(steps(tmp_path / "x/out")) == [1, 2, 3, 4, 5] and steps(tmp_path / "x/out") == steps(whole)
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "x/out"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_reference_that_zero3_shards_has_the_kl_of_a_whole_one(launch_zero3, split, tmp_path):
    check_the_kl(functools.partial(launch_zero3, split, [WORKER, "train"]), tmp_path)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_what_is_pushed_is_whole(lora, launch_zero3, split, tmp_path):
    """Names, tied ones too; merged adapters; noise."""
    check_pushed(functools.partial(launch_zero3, split), lora, tmp_path)


def test_bf16_loses_no_small_steps(launch_zero3, tmp_path):
    """The configuration as it is. One step is below half the spacing of bf16 numbers, and five together are not."""
    keys = {"dtype": "bfloat16", "bf16": True, "gradient_checkpointing": True}
    keys |= {"learning_rate": 5e-5, "lr_scheduler_type": "constant", "max_steps": 5}
    launch_zero3(
        ZERO3, ["--mixed_precision", "bf16", WORKER, "train"], "--config", recipe(tmp_path / "x", "out", **keys)
    )
    first = load_file(ROOT / "hf_recipes/tiny/calculator-model/model.safetensors")
    saved = load_file(tmp_path / "x/out/model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    before = torch.cat([first[name].bfloat16().flatten() for name in saved])
    after = torch.cat([value.flatten() for value in saved.values()])
    large = (before.abs() > 2**-5) & (before.abs() < 2**-4)  # their spacing is 2**-12
    assert (before != after)[large].float().mean() > 0.05


@pytest.fixture(scope="module")
def port():
    with VLLMServer(ROOT / "hf_recipes/tiny/calculator-model", *FLAGS) as server:
        yield server.port


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_weights_that_zero3_shards_reach_the_server(lora, launch_zero3, split, port, tmp_path, monkeypatch):
    """The second step's push fails half-way, and is repeated."""
    monkeypatch.setenv("FAULT", "server lost")
    path = sharded_recipe(tmp_path, port, **SHARDED_LORA if lora else {})
    text = launch_zero3(split, [WORKER, "train"], "--config", path)
    assert "lost after 5 weights. The run waits for the server, then pushes the weights again." in text
    assert_trained_from_what_the_server_held(tmp_path / "out", 3)
