"""Checkpoints: which one a run resumes from, what it says of changes, kills, and numbers that are not finite."""

import json
import math
import os
import shutil
import signal
import weakref
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from killed_worker import killed_and_resumed
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from processes import on_two_ranks
from project import ROOT, steps_of
from safetensors.torch import load_file, save_file
from test_trainer import PROMPTS, echo, settings
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
)

from mt_grpo.base.errors import RunError
from mt_grpo.run.checkpoints import CheckpointError, checkpoint_to_resume, load_missing, weights_not_finite
from mt_grpo.run.trainer import NotFinite, train_or_save
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv, main


def length_reward(completion_ids, trainer_state, **kwargs):
    return [(sum(ids) % 17) / 17 + (trainer_state.global_step == 2) for ids in completion_ids]


def make_trainer(model, folder, rewards=([], [length_reward]), prompts=PROMPTS, callbacks=None, trainer=None, **keys):
    sizes = dict(per_device_train_batch_size=4, max_completion_length=16, max_steps=4)
    values = {**sizes, "save_strategy": "steps", "save_steps": 2, **keys}
    return MTGRPOEnvTrainer(
        model,
        MultiTurnToolEnv([echo], system_prompt=None),
        *rewards,
        args=MTGRPOConfig(**settings(folder / "out", **values)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:1]}) if "eval_strategy" in keys else None,
        callbacks=callbacks,
        **(trainer or {}),
    )


@pytest.fixture(scope="module")
def trained(random_model, tmp_path_factory):
    """The folder of a run that is over: checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    make_trainer(random_model, folder).train()
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


# What is whole


@pytest.mark.parametrize("part", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_of_a_model_alone_is_refused(copy, part):
    """`Trainer` would go on with a fresh optimizer."""
    (copy / "out/checkpoint-4" / part).unlink()
    with pytest.raises(ValueError, match="has a model only, without the state of its optimizer"):
        MTGRPOConfig(str(copy / "out"), resume_from_checkpoint="last", bf16=False, use_cpu=True)


# What is otherwise


def warnings_of(caplog, text):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_a_resumed_run_lists_what_differs(random_model, copy, caplog):
    """One warning with all of it; what the optimizer's state keeps, and what changes the order, is marked."""
    trainer = make_trainer(
        random_model, copy, prompts=PROMPTS[:4], max_steps=6, learning_rate=1e-2, seed=8, turn_advantage_coef=0.5,
        credit_assignment="turn_return", save_steps=3, logging_steps=2, num_generations=2, num_iterations=2,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(copy / "out/checkpoint-2"))
    (said,) = warnings_of(caplog, "was trained with other settings")
    lines = [line.strip() for line in said.splitlines()[1:]]
    assert sorted(line.partition(":")[0] for line in lines) == [
        "credit_assignment", "dataset_rows", "dataset_sha256", "learning_rate", "max_steps", "num_generations",
        "num_iterations", "prompts_per_batch", "seed", "steps_per_batch", "turn_advantage_coef",
    ]  # fmt: skip
    assert {"max_steps: 4 -> 6", "credit_assignment: 'mt_grpo' -> 'turn_return'"} < set(lines)
    assert [line.split()[0] for line in lines if "no effect" in line] == ["learning_rate:"]
    assert sum("the order of the prompts changes" in line for line in lines) == 5
    assert [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row][-1] == 1e-3
    assert (copy / "out/checkpoint-3").is_dir()  # by its own save_steps


def test_the_last_whole_checkpoint_and_a_run_that_is_resumed_at_its_end(random_model, copy, caplog):
    trainer = make_trainer(random_model, copy, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    (said,) = warnings_of(caplog, "Nothing was trained")
    assert f"{copy / 'out/checkpoint-4'} is of step 4, and the run ends at step 3." in said
    whole = load_file(copy / "out/checkpoint-4/model.safetensors")
    assert all(torch.equal(each, whole[name]) for name, each in trainer.model.named_parameters())
    assert checkpoint_to_resume(True, str(copy / "out")) == str(copy / "out/checkpoint-4")
    os.utime(copy / "out/checkpoint-4/trainer_state.json", (0, 0))  # of an older run that went on for longer
    assert checkpoint_to_resume("last", str(copy / "out")) == str(copy / "out/checkpoint-2")
    shutil.copytree(copy / "out/checkpoint-2", copy / "out/checkpoint-of-somebody")  # the newest

    def cut(step):
        path = copy / f"out/checkpoint-{step}/trainer_state.json"
        path.write_bytes(path.read_bytes()[:-20])

    cut(4)
    assert checkpoint_to_resume("last", str(copy / "out")) == str(copy / "out/checkpoint-2")
    cut(2)
    with pytest.raises(ValueError, match="There is none in output_dir"):
        checkpoint_to_resume("last", str(copy / "out"))


def test_a_state_of_adafactor_is_that_of_adafactor(random_model, tmp_path):
    """torch adds to an optimizer's defaults as it loads."""
    make_trainer(random_model, tmp_path, optim="adafactor", max_steps=2).train()
    trainer = make_trainer(random_model, tmp_path, optim="adafactor", max_steps=3)
    trainer.train(resume_from_checkpoint="last")
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_the_state_of_another_optimizer_ends_a_resumed_run_before_it_samples(random_model, copy, capsys, optim):
    """The same method in another implementation goes on. The first line says where from."""
    trainer = make_trainer(random_model, copy, optim=optim, max_steps=3)
    resume = {"resume_from_checkpoint": str(copy / "out/checkpoint-2")}
    if optim == "adamw_torch":
        trainer.train(**resume)
        assert trainer.state.global_step == 3
        assert f"resumed from {copy / 'out/checkpoint-2'}, after step 2" in capsys.readouterr().out
        return
    trainer._roll_out = None
    with pytest.raises(CheckpointError, match="optim is another one"):
        trainer.train(**resume)


class Asked(TrainerCallback):
    """Keeps the prompt of each step, and may end the first epoch."""

    def __init__(self, ends_at=None):
        self.ends_at, self.prompts, self.trainer = ends_at, [], None

    def on_step_end(self, args, state, control, **kwargs):
        self.prompts.append(self.trainer.batch.rows[0]["prompt"][0]["content"])
        control.should_epoch_stop = state.global_step == self.ends_at


def test_an_epoch_that_a_callback_ends_does_not_give_the_next_one_its_order(random_model, tmp_path):
    """Nor a part of it: the next epoch begins with its own first batch, for all of its two passes."""
    orders = []
    for end in (None, 3):
        asked = Asked(end)
        trainer = make_trainer(
            random_model, tmp_path, callbacks=[asked], max_steps=-1, num_train_epochs=2, save_strategy="no",
            num_iterations=2,
        )  # fmt: skip
        asked.trainer = trainer
        trainer.train()
        orders.append(asked.prompts)
    whole, ended = orders
    assert len(whole) == 24 and whole[:12] != whole[12:]
    assert ended == whole[:3] + whole[12:]


def test_an_evaluation_without_any_score_is_not_the_best_one(random_model, tmp_path):
    trainer = make_trainer(random_model, tmp_path, eval_strategy="steps", metric_for_best_model="reward")
    assert not trainer._determine_best_metric({"eval_reward": None}, None)
    assert trainer._determine_best_metric({"eval_reward": 0.5}, None) and trainer.state.best_metric == 0.5


# Kills


def test_a_kill_in_mid_save_leaves_no_whole_checkpoint(random_model, copy):
    """An older run in the same folder left a whole one of this step: its state would stand for both."""
    trainer = make_trainer(random_model, copy)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    trainer.save_model = killed
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not (copy / "out/checkpoint-2/trainer_state.json").exists()


SMALL = (
    f"--config {ROOT}/hf_recipes/tiny/calculator.yaml --save_strategy steps --save_steps 2 --dataset_size 8 "
    "--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 96 --max_turn_tokens 40 "
    "--disable_tqdm true --max_steps 8"
).split()
SLOW_PLACES = [pytest.param(place, marks=pytest.mark.slow) for place in ("optimizer step", "between steps")]
PLACES = ["rollouts", "save", *SLOW_PLACES]


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory):
    """The log of a run that nobody kills."""
    folder = tmp_path_factory.mktemp("unkilled")
    main([*SMALL, "--output_dir", str(folder)])
    return steps_of(folder)


@pytest.mark.contract("kill")
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_run_loses_what_follows_its_last_checkpoint(unkilled, tmp_path, place):
    """Killed by `kill -9` in its second epoch, it goes on from step 4 as a run that nobody killed."""
    log, prompts = killed_and_resumed(tmp_path, place, [*SMALL, "--output_dir", tmp_path / "out"])
    for key in ("loss", "reward", "num_tokens"):
        assert [row[key] for row in log] == pytest.approx([row[key] for row in unkilled], abs=1e-5) and len(log) == 8
    for epoch in (0, 4):
        trained = [prompt for step in range(epoch, epoch + 4) for prompt in prompts[step]]
        assert len(trained) == len(set(trained)) == 8


TWO_RANK_WORKER = """
import os, time
from pathlib import Path
import mt_grpo_trainer as m

original = m.MTGRPOEnvTrainer._save_rng_state


def save_rng(self, folder):
    if os.environ["RANK"] == "1":
        time.sleep(2)
        print("too early" if (Path(folder) / "trainer_state.json").exists() else "in time", flush=True)
    original(self, folder)


m.MTGRPOEnvTrainer._save_rng_state = save_rng
m.main()
"""


def test_the_state_is_written_after_the_files_of_all_ranks(random_model, tmp_path):
    (tmp_path / "worker.py").write_text(TWO_RANK_WORKER)
    code, said = on_two_ranks(
        tmp_path / "worker.py", "--config", ROOT / "hf_recipes/tiny/calculator.yaml", "--model_name_or_path",
        random_model, "--output_dir", tmp_path / "out", "--max_steps", 1, "--dataset_size", 16,
        "--per_device_train_batch_size", 4, "--max_completion_length", 32, "--max_turn_tokens", 12,
        "--max_tool_response_tokens", 10, "--disable_tqdm", "true", "--save_strategy", "steps", "--save_steps", 1,
    )  # fmt: skip
    assert code == 0, said[-4000:]
    assert "in time" in said and "too early" not in said
    assert (tmp_path / "out/checkpoint-1/rng_state_1.pth").is_file()


# Numbers that are none, and tensors that are missing


@pytest.mark.parametrize("fault", ["missing", "latest", "model.safetensors", "optimizer.pt"])
def test_a_checkpoint_that_is_damaged_ends_the_run_in_one_line(random_model, copy, fault):
    """Nothing is saved, and it is not offered for going on. transformers only warns of a tensor that is missing."""
    folder, name, says = copy / "out/checkpoint-2", "model.layers.1.mlp.up_proj.weight", "cannot be loaded: "
    if fault == "missing":
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        says = f"lacks 1 weights of the model, such as {name}"
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    elif fault == "latest":
        says += "ValueError: its optimizer is DeepSpeed's"
        (folder / "optimizer.pt").rename(folder / fault)
    else:
        (folder / fault).write_bytes((folder / fault).read_bytes()[:-2000])
    trainer = make_trainer(random_model, copy)
    trainer.args.resume_from_checkpoint = str(folder)
    with pytest.raises(SystemExit, match=f"^error: .*checkpoint-2' {says}[^\n]*$") as ended:
        train_or_save(trainer)
    assert "Continue with" not in str(ended.value) and not (copy / "out/model.safetensors").exists()


def test_lora_goes_on_only_from_a_whole_adapter(random_model, copy, tmp_path_factory):
    """Nor does a run with LoRA go on from one without, or one without from one with."""
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
    with pytest.raises(CheckpointError, match="checkpoint-2' lacks .* weights of the model"):
        make_trainer(random_model, copy, trainer=lora).train(resume_from_checkpoint=str(copy / "out/checkpoint-2"))
    folder = tmp_path_factory.mktemp("lora")
    make_trainer(random_model, folder, trainer=lora, max_steps=2).train()
    checkpoint = folder / "out/checkpoint-2"
    with pytest.raises(CheckpointError, match="checkpoint-2'"):
        make_trainer(random_model, folder).train(resume_from_checkpoint=str(checkpoint))
    path = checkpoint / "adapter_model.safetensors"
    whole = load_file(path)
    make_trainer(random_model, folder, trainer=lora, max_steps=3).train(resume_from_checkpoint="last")
    name = next(name for name in whole if "v_proj.lora_B" in name)
    save_file({key: value for key, value in whole.items() if key != name}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"checkpoint-2.*lacks 1 weights of the LoRA, such as {name}"):
        make_trainer(random_model, folder, trainer=lora).train(resume_from_checkpoint=str(checkpoint))


def test_an_adapter_of_ones_own_goes_on_beside_its_reference(random_model, tmp_path):
    """PEFT saves the reference of `beta` in a folder inside the checkpoint. transformers reads that folder alone."""
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)

    def trainer(**changes):
        torch.manual_seed(3)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32), config)
        own = {"processing_class": AutoTokenizer.from_pretrained(random_model)}
        return make_trainer(model, tmp_path, trainer=own, beta=0.1, learning_rate=1e-2, **changes)

    trainer(max_steps=2).train()
    folder = tmp_path / "out/checkpoint-2"
    assert (folder / "ref/adapter_model.safetensors").is_file()
    saved, loaded = load_file(folder / "adapter_model.safetensors"), []
    resumed, after_load = trainer(max_steps=3), TrainerCallback()
    first = get_peft_model_state_dict(resumed.model, adapter_name="default")
    assert not all(torch.equal(first[name], saved[name]) for name in saved)
    after_load.on_train_begin = lambda args, state, control, model=None, **kwargs: loaded.append(
        {name: each.clone() for name, each in get_peft_model_state_dict(model, adapter_name="default").items()}
    )
    resumed.add_callback(after_load)
    resumed.train(resume_from_checkpoint=str(folder))
    assert loaded[0].keys() == saved.keys() and all(torch.equal(loaded[0][name], saved[name]) for name in saved)


def test_a_model_with_experts_goes_on_from_its_own_weights(random_model, tmp_path):
    """transformers saves each expert by itself, and resumes by the name of all of them: it would keep the base's."""
    config = Qwen3MoeConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True,
    )  # fmt: skip
    tokenizer = {"processing_class": AutoTokenizer.from_pretrained(random_model)}
    model = Qwen3MoeForCausalLM(config).float()
    make_trainer(deepcopy(model), tmp_path, trainer=tokenizer, max_steps=2).train()
    path = tmp_path / "out/checkpoint-2/model.safetensors"
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    tensors = load_file(path)
    loaded, after_load = [], TrainerCallback()
    after_load.on_train_begin = lambda args, state, control, model=None, **kwargs: loaded.append(
        model.get_parameter("model.layers.0.mlp.experts.down_proj")[3].clone()
    )
    resumed = make_trainer(deepcopy(model), tmp_path, callbacks=[after_load], trainer=tokenizer, max_steps=3)
    resumed.train(resume_from_checkpoint=str(path.parent))
    assert torch.equal(loaded[0], tensors[name])
    experts = resumed.model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert not torch.equal(experts[3], tensors[name])  # a step further
    kept = resumed.model.get_parameter("model.layers.0.input_layernorm.weight")
    resumed.model.bfloat16()
    head = resumed.model.get_parameter("model.norm.weight")
    head.data = head.data.float()  # as `cast_lm_head_to_fp32` keeps a part in more bits than the rest
    load_missing(str(path.parent), resumed.model, ["model.layers.0.mlp.experts.down_proj"])
    assert torch.equal(head, tensors["model.norm.weight"])
    assert (head.dtype, kept.dtype) == (torch.float32, torch.bfloat16)
    resumed.model.float()
    resumed.state.best_model_checkpoint = str(path.parent)
    resumed._load_best_model()
    assert torch.equal(resumed.model.get_parameter("model.layers.0.mlp.experts.down_proj")[3], tensors[name])
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="checkpoint-2' cannot be loaded"):
        make_trainer(deepcopy(model), tmp_path, trainer=tokenizer).train(resume_from_checkpoint=str(path.parent))


def finite_files(folder):
    """Whether each tensor of each file of weights below a folder is finite."""
    files = list(folder.rglob("*.safetensors"))
    return all(bool(tensor.isfinite().all()) for path in files for tensor in load_file(path).values()), len(files)


def large(factor, of_turns=False):
    """A reward of 16 times the factor at most, in step 2 alone if it is 2e37."""

    def reward(completion_ids, trainer_state, **kwargs):
        now = 1.0 if factor == 2e37 and trainer_state.global_step != 2 else factor
        return [[now * (sum(ids) % 17)] if of_turns else now * (sum(ids) % 17) for ids in completion_ids]

    return ([reward], []) if of_turns else ([], [reward])


@pytest.mark.parametrize("setting, says", [
    ({"rewards": large(2e37)}, "Step 2: the weighted rewards of a rollout add up to [23].*At most 1e"),
    ({"rewards": large(1.0), "outcome_reward_weights": [3e38]}, "the weighted rewards of a rollout add up to "),
    ({"rewards": large(1.0, True), "turn_advantage_coef": 3e38, "credit_assignment": "turn_return",
      "scale_rewards": "none"}, "an advantage to (inf|nan), with turn_advantage_coef=3e"),
])  # fmt: skip
def test_rewards_that_overflow_end_the_run_with_the_last_good_state(random_model, tmp_path, capsys, setting, says):
    """They would vanish in a comparison, or leave no weight that is a number. The steps before are saved."""
    trainer = make_trainer(random_model, tmp_path, **setting)
    with pytest.raises(SystemExit, match=f"(?s)error: .*{says}.*This batch is not trained on"):
        train_or_save(trainer)
    assert finite_files(tmp_path)[0]
    assert not weights_not_finite(trainer.model)
    if says.startswith("Step 2"):
        assert trainer.state.global_step == 2 and finite_files(tmp_path / "out/checkpoint-2") == (True, 1)


def test_a_gradient_that_is_not_finite_takes_no_step(random_model, tmp_path, monkeypatch):
    """What makes the loss NaN in one batch ends the run there, and the checkpoint is of the steps before."""
    trainer = make_trainer(random_model, tmp_path, save_steps=100)
    compute = MTGRPOEnvTrainer.compute_loss

    def poisoned(self, model, inputs, *args, **kwargs):
        loss = compute(self, model, inputs, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 3 else loss

    monkeypatch.setattr(MTGRPOEnvTrainer, "compute_loss", poisoned)
    with pytest.raises(SystemExit, match="(?s)Step 3: the norm of the gradient is nan.*saved at step 3"):
        train_or_save(trainer)
    assert finite_files(tmp_path / "out/checkpoint-3") == (True, 1)
    state = json.loads((tmp_path / "out/checkpoint-3/trainer_state.json").read_text())
    counted = [row["num_tokens"] for row in state["log_history"] if "num_tokens" in row]
    assert len(counted) == 3 and state["num_input_tokens_seen"] == counted[-1]  # the batch is sampled again
    monkeypatch.setattr(MTGRPOEnvTrainer, "compute_loss", compute)
    make_trainer(random_model, tmp_path, save_steps=100).train(resume_from_checkpoint="last")  # it can go on


def test_what_failed_is_let_go_before_the_run_is_saved(random_model, tmp_path, monkeypatch):
    """Of a pass that did not fit into memory: its activations would leave no room for saving."""
    trainer = make_trainer(random_model, tmp_path, save_steps=100)
    compute, save, losses = MTGRPOEnvTrainer.compute_loss, trainer.save_where_it_stopped, []

    def full(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        losses.append(weakref.ref(loss))
        if self.state.global_step == 1:
            raise RunError("full")
        return loss

    monkeypatch.setattr(MTGRPOEnvTrainer, "compute_loss", full)
    trainer.save_where_it_stopped = lambda: f"{losses[-1]()} is left. {save()}"
    with pytest.raises(SystemExit, match="(?s)error: full.*None is left.*saved at step 1"):
        train_or_save(trainer)
    trainer.save_where_it_stopped, trainer._save_checkpoint = save, Mock(side_effect=OSError("No space left"))
    with pytest.raises(SystemExit, match="error: full\nNo space left There is"):
        train_or_save(trainer)


def test_weights_of_8_bits_and_skipped_steps_of_fp16_are_finite(random_model, tmp_path, monkeypatch):
    """torch cannot tell whether they are finite. They are those of a quantised base, which LoRA leaves as they are.
    Its scaler skips a step whose scaled gradient overflows, and finds a scale; without end it is no scale."""
    layer = torch.nn.Linear(2, 2)
    layer.weight = torch.nn.Parameter(layer.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    layer.bias.data[1] = float("inf")
    assert weights_not_finite(layer) == ["bias"]
    layer.bias.ds_tensor, layer.bias.ds_numel = torch.tensor([1.0, math.nan]), 3  # ZeRO-3 pads the last rank's shard
    for rank, names in ((lambda: 1, []), (lambda: 0, ["bias"])):
        layer.bias.ds_process_group = SimpleNamespace(rank=rank)
        assert weights_not_finite(layer) == names
    trainer = make_trainer(random_model, tmp_path)
    trainer.args.fp16, trainer.FP16_SKIPS = True, 3
    norms = iter([1.0, *[float("inf")] * 2, 0.5, *[float("nan")] * 3])
    monkeypatch.setattr(Trainer, "_get_grad_norm", lambda self, model, grad_norm=None: next(norms))
    for _ in range(6):
        trainer._get_grad_norm(trainer.model)
    with pytest.raises(NotFinite, match="the norm of the gradient is nan"):
        trainer._get_grad_norm(trainer.model)


def test_weights_that_are_not_finite_are_saved_nowhere(random_model, tmp_path):
    """An optimizer step made them so: no checkpoint, no trained model, and the message names what there is."""

    class Poison(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:  # the fourth step
                model.get_parameter("model.norm.weight").data[0] = float("inf")

    trainer = make_trainer(random_model, tmp_path, callbacks=[Poison()])
    with pytest.raises(SystemExit, match=r"(?s)Step 4: 1 weights are not finite, such as .*norm.weight.*not saved.*"
                       r"resume_from_checkpoint \S+checkpoint-2"):  # fmt: skip
        train_or_save(trainer)
    assert finite_files(tmp_path) == (True, 1)
    last = make_trainer(random_model, tmp_path / "last", callbacks=[Poison()], save_strategy="no")
    with pytest.raises(SystemExit, match="(?s)error: Step 4: 1 weights are not finite"):
        train_or_save(last)
    assert not list((tmp_path / "last").rglob("*.safetensors"))


def test_a_stop_in_the_second_micro_batch_does_not_matter(random_model, tmp_path):
    """The resumed run is the uninterrupted one. An older run's checkpoint is not taken for its own."""

    def run(name, prepare=lambda trainer: None, **changes):
        settings = dict(gradient_accumulation_steps=2, steps_per_generation=1, save_strategy="no")
        trainer = make_trainer(random_model, tmp_path / name, **settings | changes)
        prepare(trainer)
        train_or_save(trainer)
        keys = ("step", "reward", "loss", "num_tokens")
        return [[row[key] for key in keys] for row in trainer.state.log_history if "reward" in row]

    def stop(trainer):
        calls, score = [], trainer._score

        def stopped(*args):
            calls.append(args)
            if len(calls) == 6:  # two in each step
                os.kill(os.getpid(), signal.SIGTERM)
            return score(*args)

        trainer._score = stopped

    stale = tmp_path / "parts/out/checkpoint-2/trainer_state.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("another run's")
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run("parts", stop)
    assert json.loads(stale.read_text())["global_step"] == 2
    resumed, whole = run("parts", resume_from_checkpoint="last"), run("whole")
    assert len(resumed) == len(whole) == 4
    for row, expected in zip(resumed, whole, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [4, 8])
def test_a_test_row_that_cannot_be_asked_is_a_failed_rollout(random_model, tmp_path, caplog, size):
    """Also where it is a batch alone. One that is trained on ends the run."""
    trainer = make_trainer(random_model, tmp_path, eval_strategy="steps", per_device_eval_batch_size=size)
    trainer.env.max_model_len = 64
    rows = [PROMPTS[0], [{"role": "user", "content": f"{size} long " * 40}]]
    found = trainer.evaluate(Dataset.from_dict({"prompt": rows}))
    alone = trainer.evaluate(Dataset.from_dict({"prompt": rows[:1]}))
    with pytest.raises(ValueError, match="the first row has no prompt"):
        trainer.evaluate([{"question": "2 + 2?"}])
    assert found["eval_stop/environment_error"] == 0.5 and alone["eval_stop/environment_error"] == 0.0
    assert found["eval_reward"] == pytest.approx(alone["eval_reward"], abs=1e-6)
    (said,) = warnings_of(caplog, "cannot be asked")
    assert f"{size} long {size} long" in said and "fills the model's context" in said
    trainer.train_dataset = Dataset.from_dict({"prompt": rows[1:]})
    with pytest.raises(RunError, match="fills the model's context"):
        trainer.train()
