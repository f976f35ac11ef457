"""Training with weights that FSDP2 shards over two gloo processes: against DDP, and against itself, resumed."""

import functools
import math
import os
import shutil
import subprocess

import pytest
import torch
import warm_python
from peft import PeftModel
from project import ROOT, json_lines
from safetensors.torch import load_file
from test_first_batch import recipe_file
from transformers import AutoModelForCausalLM

import mt_grpo_trainer as mt
from mt_grpo.recipe.checks import check_processes

CPU, FSDP2 = (ROOT / f"hf_recipes/accelerate/{name}.yaml" for name in ("cpu", "fsdp2"))
WORKER = str(ROOT / "tests/sharded_worker.py")


def launch(config, script, *arguments, fails=False, python=None, precision="no", **env):
    """Two processes; what they print."""
    command = [python or warm_python.executable(), "-m", "accelerate.commands.launch", "--config_file", str(config),
               "--num_processes", "2", "--mixed_precision", precision, *script, *map(str, arguments)]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "OMP_NUM_THREADS": "1", **env})  # fmt: skip
    try:
        out, err = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its processes, which wait for each other, by SIGKILL after 30 s
        process.communicate(timeout=60)
        raise
    assert bool(process.returncode) == fails, err[-4000:]
    return out + err


def recipe(folder, out, **changes):
    folder.mkdir(exist_ok=True)
    changes = {"per_device_train_batch_size": 8, "output_dir": str(folder / out), **changes}
    return recipe_file(folder, **changes)


def train_and_resume(folder, launch_sharded, **changes):
    """Folders of a run by DDP, of one with sharded weights, and of one that goes on from its checkpoint at step 2."""
    os.chdir(ROOT)
    keys = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, **changes}
    launch(CPU, ["mt_grpo_trainer.py"], "--config", recipe(folder / "a", "ddp", **keys))
    launch_sharded("--config", recipe(folder / "b", "sharded", **keys))
    (folder / "b/sharded").rename(folder / "b/whole")
    (folder / "b/sharded").mkdir()
    (folder / "b/whole/checkpoint-2").rename(folder / "b/sharded/checkpoint-2")
    launch_sharded("--config", folder / "b/recipe.yaml", "--resume_from_checkpoint", "last")
    return folder / "a/ddp", folder / "b/whole", folder / "b/sharded"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    launch_sharded = functools.partial(launch, FSDP2, [WORKER, "train"])
    return train_and_resume(tmp_path_factory.mktemp("sharded"), launch_sharded, max_tokens_per_pass=300)


def steps(folder):
    rows = json_lines(folder / "metrics.jsonl")
    return {row["step"]: [row[name] for name in ("loss", "grad_norm", "reward")] for row in rows if "reward" in row}


@pytest.mark.contract("FSDP2")
def test_fsdp2_trains_as_ddp_does(trained):
    assert_trains_as_ddp_does(trained, atol=1e-5)  # passes add up in another order


def assert_trains_as_ddp_does(trained, atol):
    """Up to rounding: behind two steps of Adam, of 6e-4 each, it may decide what is sampled."""
    ddp, whole, resumed = trained
    for step in (1, 2):
        assert steps(whole)[step] == pytest.approx(steps(ddp)[step], rel=1e-5), step
    first, second = (load_file(folder / "checkpoint-2/model.safetensors") for folder in (ddp, resumed))
    start = load_file(ROOT / "hf_recipes/tiny/calculator-model/model.safetensors")
    assert second.keys() - first.keys() <= {"lm_head.weight"}  # FSDP2's has both names of the tied weights
    embedding = second["model.embed_tokens.weight"]
    assert torch.equal(second.get("lm_head.weight", embedding), embedding)
    for name, value in first.items():
        apart = (second[name] - value).abs()
        assert apart.max() <= atol and (apart > 1e-6).float().mean() < 2e-4, name
        assert not torch.equal(value, start[name].float())


def test_fsdp2_goes_on_exactly(trained):
    assert_goes_on_exactly(trained)


def assert_goes_on_exactly(trained):
    _, whole, resumed = trained
    assert list(steps(whole)) == [1, 2, 3, 4, 5] and list(steps(resumed)) == [3, 4, 5]
    assert steps(resumed) == {step: values for step, values in steps(whole).items() if step > 2}
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, resumed))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_fsdp2_keeps_float32_weights_beside_bf16(tmp_path):
    """Its own mixed precision. Steps of 1e-5 are smaller than the spacing of most weights in bf16, and add up."""
    keys = {"bf16": True, "learning_rate": 1e-5, "max_steps": 3, "max_tokens_per_pass": 300}
    launch(FSDP2, [WORKER, "train"], "--config", recipe(tmp_path / "x", "out", **keys), precision="bf16")
    rows = steps(tmp_path / "x/out")
    assert list(rows) == [1, 2, 3] and all(map(math.isfinite, sum(rows.values(), [])))
    start = load_file(ROOT / "hf_recipes/tiny/calculator-model/model.safetensors")["model.embed_tokens.weight"].float()
    trained = load_file(tmp_path / "x/out/model.safetensors")["model.embed_tokens.weight"]
    assert trained.dtype == torch.float32
    moved = (trained - start).abs()
    assert 1e-5 < moved.max() < 1e-4 and (moved > 0).float().mean() > 0.5
    assert (moved > 0)[trained.bfloat16() == start.bfloat16()].float().mean() > 0.5  # what bf16 alone would have lost


ODD = """
def odd(completions, rollout_turns, **kwargs):
    return [float(sum(turns[0].token_ids) % 3) for turns in rollout_turns]

OUTCOME_REWARD_FUNCS = [odd]
"""


def test_a_sharded_reference_has_the_kl_of_a_whole_one(tmp_path):
    check_the_kl(functools.partial(launch, FSDP2, [WORKER, "train"]), tmp_path)


def check_the_kl(launch_sharded, folder):
    """A loss with a KL term is that of a run by DDP; the reference is the policy before the first step alone."""
    (folder / "odd.py").write_text(ODD)
    keys = {"reward_fn": str(folder / "odd.py"), "beta": 0.04, "max_steps": 2, "save_strategy": "no",
            "credit_assignment": "outcome", "turn_advantage_coef": 1.0}  # fmt: skip
    launch(CPU, ["mt_grpo_trainer.py"], "--config", recipe(folder / "a", "ddp", **keys))
    launch_sharded("--config", recipe(folder / "b", "sharded", **keys))
    expected, found = steps(folder / "a/ddp"), steps(folder / "b/sharded")
    assert len(expected) == 2 and found.keys() == expected.keys()
    for step in (1, 2):
        assert found[step] == pytest.approx(expected[step], abs=1e-5)
    for out in (folder / "a/ddp", folder / "b/sharded"):
        rows = json_lines(out / "metrics.jsonl")
        first, second = (next(row["kl"] for row in rows if row.get("step") == step and "kl" in row) for step in (1, 2))
        assert first == pytest.approx(0.0, abs=1e-6) and second > 1e-4


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_what_is_pushed_is_whole(lora, tmp_path):
    """Names, tied ones too; merged adapters; noise."""
    check_pushed(functools.partial(launch, FSDP2), lora, tmp_path)


def check_pushed(launch_sharded, lora, folder):
    """What both ranks would push is what was saved: the saved weights, with the saved adapter in them."""
    keys = {"use_peft": True, "lora_r": 4, "lora_alpha": 16, "lora_target_modules": ["q_proj", "down_proj"]}
    path = recipe(folder / "x", "out", max_steps=2, learning_rate=1e-2, **(keys if lora else {}))
    text = launch_sharded([WORKER, "weights"], "--config", path)
    assert text.count("weights are equal") == 2, text[-3000:]
    out = folder / "x/out"
    first, second = (torch.load(out / f"pushed-{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    if lora:
        model = AutoModelForCausalLM.from_pretrained(ROOT / "hf_recipes/tiny/calculator-model", dtype=torch.float32)
        saved = PeftModel.from_pretrained(model, out).merge_and_unload().state_dict()
    else:
        saved = load_file(out / "model.safetensors")
    saved.setdefault("lm_head.weight", saved["model.embed_tokens.weight"])
    assert saved.keys() == first.keys()
    for name, value in saved.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-6)


def test_a_head_that_is_trained_beside_a_lora_by_accelerates_own_settings(tmp_path):
    """TRL reads the weight of the head, and does not call it. Of shards, accelerate's default, a model is saved."""
    base, folder = ROOT / "hf_recipes/tiny/calculator-model", str(tmp_path / "untied")
    shutil.copytree(base, folder)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.lm_head.weight, model.config.tie_word_embeddings = torch.nn.Parameter(model.lm_head.weight.clone()), False
    model.save_pretrained(folder)
    keys = {"use_peft": True, "lora_target_modules": ["q_proj", "down_proj"], "lora_modules_to_save": ["lm_head"]}
    keys |= {"lora_r": 4, "model_name_or_path": folder, "max_steps": 1, "max_tokens_per_pass": 300}
    launch(CPU, ["mt_grpo_trainer.py"], "--config", recipe(tmp_path / "a", "out", **keys))
    shards = ["--fsdp_state_dict_type", "SHARDED_STATE_DICT", WORKER, "train"]
    launch(FSDP2, shards, "--config", recipe(tmp_path / "b", "out", **keys))
    assert steps(tmp_path / "b/out")[1] == pytest.approx(steps(tmp_path / "a/out")[1], rel=1e-5)
    assert len(load_file(tmp_path / "b/out/adapter_model.safetensors")) > 2


PUSH_THAT_FAILS = """
import sys
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo.generation.weight_sync import WeightSync
from mt_grpo_trainer import VLLMServerClient

accelerator = Accelerator(cpu=True)

def named_weights():
    for name in "abc":
        yield name, accelerator.reduce(torch.ones(1))
        if name == "b" and accelerator.process_index == int(sys.argv[1]):
            raise MemoryError("none left")

client = VLLMServerClient("127.0.0.1", 9, timeout=2.0, sync_dir=sys.argv[2])
client.transfer.resolve = lambda device: "disk"
weights = SimpleNamespace(sharded=True, expected={}, named_weights=named_weights)
WeightSync(ServerPool([client]), None, weights, accelerator, [1])._push("v-1")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gather_that_fails_on_one_rank_ends_the_run(rank, tmp_path):
    """The other rank would wait in the next gather, and rank 0 tells errors in a broadcast."""
    script = tmp_path / "push.py"
    script.write_text(PUSH_THAT_FAILS)
    text = launch(CPU, [str(script)], rank, tmp_path, fails=True, PYTHONPATH=str(ROOT))
    assert "MemoryError: none left" in text and "The run ends without saving itself." in text


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path, monkeypatch):
    """Each would train alone, and write into one folder."""
    args = mt.parse_arguments(["--config", recipe(tmp_path / "x", "out")])[1]
    check_processes(args)
    with monkeypatch.context() as mixed, pytest.raises(ValueError, match="bf16: false, and accelerate .* bf16, which"):
        mixed.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        check_processes(args)
    with monkeypatch.context() as four, pytest.raises(ValueError, match="One process sees 4 GPUs"):
        four.setattr(args, "_n_gpu", 4)
        check_processes(args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were launched.* counts 1"):
        check_processes(args)
