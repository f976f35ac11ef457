"""Checkpoints: torn ones are refused, full disks cost no weights, and a resumed run tells what is otherwise."""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm_python
from bench.common import free_port
from conftest import files_of_at_most
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
)

from mt_grpo.base.errors import ServerLost
from mt_grpo.base.ranks import RunError
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo.recipe.plugins import load_class, load_rewards, load_tools
from mt_grpo.reports.rollout_log import write_rows
from mt_grpo.run.checkpoints import (
    changed_settings,
    check_tensors,
    checkpoint_damage,
    checkpoint_to_resume,
    class_sha256,
    classes_of,
    load_as_saved,
    trained_settings,
    weights_not_finite,
)
from mt_grpo.run.saved_states import CheckpointError
from mt_grpo.run.trainer import NotFinite, SaveError, train_or_save
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv, VLLMServerClient, main

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[{"role": "user", "content": text}] for text in ("one", "two?", "three...", "4", "five and more", "six")]
TOOLS = '''
def echo(text: str) -> str:
    """Return the text.

    Args:
        text: What to return.
    """
    return text


TOOL_FUNCTIONS = [echo]
'''
REWARDS = """
def length_reward(completion_ids, trainer_state, **kwargs):
    return [(sum(ids) % 17) / 17 + (trainer_state.global_step == 2) for ids in completion_ids]


OUTCOME_REWARD_FUNCS = [length_reward]
"""


def make_trainer(
    model, folder, tools=TOOLS, rewards=REWARDS, prompts=PROMPTS, callbacks=None, trainer=None, **changes
):
    values = dict(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=4, num_generations=4, max_completion_length=16, max_steps=4, logging_steps=1,
        learning_rate=1e-3, disable_tqdm=True, seed=7, lr_scheduler_type="constant", save_strategy="steps",
        save_steps=2,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "tools.py").write_text(tools)
    (folder / "rewards.py").write_text(rewards)
    return MTGRPOEnvTrainer(
        model,
        MultiTurnToolEnv(load_tools(str(folder / "tools.py")), system_prompt=None),
        *load_rewards(str(folder / "rewards.py")),
        args=MTGRPOConfig(**{**values, **changes}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:1]}) if "eval_strategy" in changes else None,
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


# =====================================================================================================================
# What is missing or torn
# =====================================================================================================================


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def empty(path):
    path.write_bytes(b"")


DAMAGES = {"missing": Path.unlink, "empty": empty, "cut": cut}


def test_the_state_is_written_last(trained):
    """It stands for the whole: what a kill cuts off has none."""
    for folder in (trained / "out").glob("checkpoint-*"):
        times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        assert {"mt_grpo_run.json", "optimizer.pt", "rng_state.pth"} < times.keys()
        assert max(times, key=times.get) == "trainer_state.json"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_damaged_part_is_named(copy, part, damage):
    """Before a model is loaded: `Trainer` would go on with a fresh part in place of a missing one."""
    DAMAGES[damage](copy / "out/checkpoint-4" / part)
    for wanted in ("last", str(copy / "out/checkpoint-4")):
        with pytest.raises(ValueError) as raised:
            MTGRPOConfig(str(copy / "out"), resume_from_checkpoint=wanted, bf16=False, use_cpu=True)
        assert f"checkpoint-4/{part} " in str(raised.value)
        assert f"Set resume_from_checkpoint: {copy / 'out/checkpoint-2'}," in str(raised.value)
    DAMAGES[damage](copy / "out/checkpoint-2" / part)
    with pytest.raises(ValueError, match=f"checkpoint-4/{part} .*There is no other one in output_dir"):
        checkpoint_to_resume("last", str(copy / "out"))


def test_what_is_whole_is_not_refused(copy):
    assert checkpoint_to_resume("last", str(copy / "out")) == str(copy / "out/checkpoint-4")
    assert checkpoint_to_resume(True, str(copy / "out")) == str(copy / "out/checkpoint-4")
    (copy / "out/checkpoint-4/mt_grpo_run.json").unlink()  # as an older version saved it
    assert checkpoint_to_resume("last", str(copy / "out")) == str(copy / "out/checkpoint-4")


def pieces(folder, *names, **state):
    """A checkpoint of these files, each of the kind that its name says."""
    folder.mkdir()
    for name in ("trainer_state.json", *names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            save_file({"w": torch.ones(3)}, path)
        elif path.suffix in (".pt", ".pth", ".bin"):
            torch.save({"last_epoch": 2, "python": (), "numpy": (), "cpu": torch.ones(3)}, path)
        elif name == "latest":
            path.write_text("global_step2")
        elif name.endswith("index.json"):
            shards = [n for n in names if n.startswith("model-")]
            path.write_text(json.dumps({"weight_map": {f"w{i}": shard for i, shard in enumerate(shards)}}))
        elif path.suffix == ".json":
            path.write_text(json.dumps({"global_step": 2, **(state if name == "mt_grpo_run.json" else {})}))
        else:
            path.write_bytes(b"something")
    return folder


ONE_RANK = "scheduler.pt", "rng_state.pth"
TWO_RANKS = "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"
FORMS = {
    "sharded": ("model.safetensors.index.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors", "optimizer.pt",
                *ONE_RANK),
    "LoRA": ("adapter_model.safetensors", "optimizer.pt", *ONE_RANK),
    "FSDP, sharded": ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/.metadata",
                      "optimizer_0/__0_0.distcp", *TWO_RANKS),
    "FSDP, whole": ("model.safetensors", "pytorch_model_fsdp.bin", "optimizer.bin", *TWO_RANKS),
    "DeepSpeed": ("latest", "global_step2/mp_rank_00_model_states.pt", "rng_state_0.pth", "rng_state_1.pth"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_checkpoint_is_known(tmp_path, form):
    """None is refused while it is whole; each file that it needs is missed, and each that is empty is named."""
    assert checkpoint_damage(pieces(tmp_path / "whole", *FORMS[form], "mt_grpo_run.json")) is None
    for i, name in enumerate(FORMS[form]):
        folder = pieces(tmp_path / f"checkpoint-{i}", *FORMS[form], "mt_grpo_run.json", world_size=len(
            [n for n in FORMS[form] if n.startswith("rng_state")]))  # fmt: skip
        assert checkpoint_damage(folder) is None
        (folder / name).unlink()
        if name.endswith(".distcp") or (form, name) == ("FSDP, whole", "model.safetensors"):
            continue  # how many there are is known to .metadata only; FSDP reads the model from its own file
        assert checkpoint_damage(folder) is not None, name
        if name != "latest":
            (folder / name).touch()
            assert Path(name).name in checkpoint_damage(folder)


def test_the_state_of_every_rank_is_needed(tmp_path):
    parts = "model.safetensors", "optimizer.pt", "mt_grpo_run.json", "scheduler.pt", "rng_state_0.pth"
    assert checkpoint_damage(pieces(tmp_path / "1", *parts, world_size=2)) == "rng_state_1.pth is missing"
    assert checkpoint_damage(pieces(tmp_path / "2", *parts, world_size=2, save_on_each_node=True)) is None


def test_the_prompts_in_flight_are_needed_where_groups_are_admitted(tmp_path):
    """Without them a resumed run would train some prompts twice, and others not at all."""
    parts = "model.safetensors", "optimizer.pt", "mt_grpo_run.json", *ONE_RANK
    admits = {"late_groups": "admit", "max_staleness": 2}
    assert checkpoint_damage(pieces(tmp_path / "1", *parts, **admits)) == "mt_grpo_in_flight.json is missing"
    folder = pieces(tmp_path / "2", *parts, "mt_grpo_in_flight.json", **admits)
    assert checkpoint_damage(folder) is None
    cut(folder / "mt_grpo_in_flight.json")
    assert checkpoint_damage(folder) == "mt_grpo_in_flight.json cannot be read"
    for number, others in enumerate(({"late_groups": "wait", "max_staleness": 2}, admits | {"max_staleness": 0}), 3):
        assert checkpoint_damage(pieces(tmp_path / str(number), *parts, **others)) is None


# =====================================================================================================================
# What is otherwise
# =====================================================================================================================


def warnings_of(caplog, text):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_a_resumed_run_lists_what_differs(random_model, copy, caplog):
    """One warning with all of it; what the optimizer's state keeps, and what changes the order, is marked."""
    trainer = make_trainer(
        random_model, copy, TOOLS + "# changed", REWARDS + "# changed", PROMPTS[:4], max_steps=6, learning_rate=1e-2,
        seed=8, turn_advantage_coef=0.5, credit_assignment="turn_return", save_steps=3, logging_steps=2,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(copy / "out/checkpoint-2"))
    (said,) = warnings_of(caplog, "was trained with other settings")
    lines = [line.strip() for line in said.splitlines()[1:]]
    assert sorted(line.partition(":")[0] for line in lines) == [
        "credit_assignment", "dataset_rows", "dataset_sha256", "learning_rate", "max_steps", "rewards_sha256", "seed",
        "tools_sha256", "turn_advantage_coef",
    ]  # fmt: skip
    assert {"max_steps: 4 -> 6", "credit_assignment: 'mt_grpo' -> 'turn_return'"} < set(lines)
    assert [line.split()[0] for line in lines if "no effect" in line] == ["learning_rate:"]
    assert sum("the order of the prompts changes" in line for line in lines) == 3
    assert [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row][-1] == 1e-3


def test_a_run_that_is_resumed_at_its_end_says_so(random_model, copy, caplog):
    """With the same settings nothing is said to differ. A lower `max_steps` is no reason to train."""
    for max_steps, checkpoint in ((4, "checkpoint-4"), (3, "checkpoint-4")):
        caplog.clear()
        trainer = make_trainer(random_model, copy, max_steps=max_steps)
        trainer.train(resume_from_checkpoint=True)
        (said,) = warnings_of(caplog, "Nothing was trained")
        assert f"{copy / 'out' / checkpoint} is of step 4, and the run ends at step {max_steps}." in said
        assert len(warnings_of(caplog, "was trained with other settings")) == (max_steps == 3)
        assert trainer.state.global_step == 4
        whole = load_file(copy / "out/checkpoint-4/model.safetensors")
        assert all(torch.equal(p, whole[n]) for n, p in trainer.model.named_parameters())
    (copy / "out/checkpoint-4/mt_grpo_run.json").write_text("{")
    stopping = TrainerCallback()
    stopping.stop = False  # of whoever wrote it: nothing to call
    make_trainer(random_model, copy, callbacks=[stopping]).train(resume_from_checkpoint=True)
    assert len(warnings_of(caplog, "has no mt_grpo_run.json, so its settings cannot be compared")) == 1


SIZES = {
    "world_size": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "steps_per_generation": 1,
    "generation_batch_size": 8,
    "num_generations": 4,
}


@pytest.mark.parametrize(
    "changes, is_other_order",
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2}, False),
        ({"world_size": 2, "per_device_train_batch_size": 4}, False),
        ({"num_generations": 8, "generation_batch_size": 16, "per_device_train_batch_size": 16}, False),
        ({"world_size": 2, "generation_batch_size": 16}, True),
        ({"num_generations": 2}, True),
        ({"num_iterations": 2}, True),
        ({"gradient_accumulation_steps": 2}, True),
    ],
)
def test_prompts_come_in_another_order_where_a_batch_of_rollouts_has_another_size(changes, is_other_order):
    """In another number of prompts, or of the optimizer steps that it serves."""
    lines = changed_settings(SIZES, SIZES | changes)
    assert len(lines) == len(changes)
    assert any("the order of the prompts changes" in line for line in lines) == is_other_order


def test_the_last_checkpoint_is_the_last_one_that_was_written_to_its_end(copy, caplog):
    cut(copy / "out/checkpoint-4/trainer_state.json")
    assert checkpoint_to_resume("last", str(copy / "out")) == str(copy / "out/checkpoint-2")
    (said,) = warnings_of(caplog, "is incomplete")
    assert str(copy / "out/checkpoint-4") in said
    cut(copy / "out/checkpoint-2/trainer_state.json")
    with pytest.raises(ValueError, match="There is none in output_dir"):
        checkpoint_to_resume("last", str(copy / "out"))


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_torch"])
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
    with pytest.raises(CheckpointError, match="another optimizer .* same optim"):
        trainer.train(**resume)


class Asked(TrainerCallback):
    """Keeps the prompt of each step, and may end the first epoch."""

    def __init__(self, ends_at=None):
        self.ends_at, self.prompts, self.trainer = ends_at, [], None

    def on_step_end(self, args, state, control, **kwargs):
        self.prompts.append(self.trainer.batch.rows[0]["prompt"][0]["content"])
        control.should_epoch_stop = state.global_step == self.ends_at


def test_an_epoch_that_a_callback_ends_does_not_give_the_next_one_its_order(random_model, tmp_path):
    orders = []
    for ends_at in (None, 2):
        asked = Asked(ends_at)
        trainer = make_trainer(
            random_model, tmp_path, callbacks=[asked], max_steps=-1, num_train_epochs=2, save_strategy="no"
        )
        asked.trainer = trainer
        trainer.train()
        orders.append(asked.prompts)
    whole, ended = orders
    assert len(whole) == 12 and whole[:6] != whole[6:] and ended == whole[:2] + whole[6:]


def test_rows_that_fill_no_batch_are_said_at_the_start(random_model, tmp_path, capsys):
    for count, said in ((5, True), (4, False)):
        settings = {
            "prompts": PROMPTS[:count],
            "per_device_train_batch_size": 8,
            "max_steps": 1,
            "save_strategy": "no",
        }
        make_trainer(random_model, tmp_path, **settings).train()
        left = "an epoch leaves out 1 of 5 rows, others each time: they fill no batch of 2 prompts\n"
        assert (left in capsys.readouterr().out) == said


class StopAtStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_between_two_steps_of_one_batch_stops_before_the_second(random_model, tmp_path, capsys):
    trainer = make_trainer(random_model, tmp_path, callbacks=[StopAtStep()], num_iterations=4, save_strategy="no")
    with pytest.raises(SystemExit) as stopped:
        train_or_save(trainer)
    assert stopped.value.code == 128 + signal.SIGTERM and trainer.state.global_step == 1
    assert "evaluation" not in capsys.readouterr().err
    resumed = make_trainer(random_model, tmp_path, num_iterations=4, save_strategy="no", resume_from_checkpoint="last")
    train_or_save(resumed)
    assert resumed.state.global_step == 4


def test_an_interrupted_evaluation_is_made_up_for(random_model, tmp_path, capsys):
    """It counts for the best checkpoint. The rewards of step 2 are 1 higher, so that it is the best."""

    def trainer_of(name, **changes):
        settings = dict(
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="reward",
            greater_is_better=True,
            per_device_eval_batch_size=4,
        )
        return make_trainer(random_model, tmp_path / name, **settings | changes)

    def evaluations(trainer):
        return [(row["step"], row["eval_reward"]) for row in trainer.state.log_history if "eval_reward" in row]

    whole = trainer_of("whole")
    train_or_save(whole)
    parts = trainer_of("parts")
    score = parts._score

    def stopped_at_step_2(*args):
        if parts.state.global_step == 2 and not parts.model.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return score(*args)

    parts._score = stopped_at_step_2
    with pytest.raises(SystemExit) as stopped:
        train_or_save(parts)
    assert stopped.value.code == 128 + signal.SIGTERM and len(evaluations(parts)) == 1
    assert "The evaluation of step 2 was interrupted" in capsys.readouterr().err
    resumed = trainer_of("parts", resume_from_checkpoint=str(tmp_path / "parts/out/checkpoint-2"))
    train_or_save(resumed)
    assert [step for step, _ in evaluations(resumed)] == [1, 2, 3, 4]
    assert evaluations(resumed) == [(step, pytest.approx(value, abs=1e-6)) for step, value in evaluations(whole)]
    assert resumed.state.best_global_step == whole.state.best_global_step == 2
    assert resumed.state.best_model_checkpoint == str(tmp_path / "parts/out/checkpoint-2")
    assert not resumed.args.eval_on_start


def test_an_evaluation_that_is_due_is_kept_beside_a_saved_step_and_not_forced(random_model, tmp_path):
    """A step may be saved before its evaluation. A run that is resumed without evaluations makes none."""
    trainer = make_trainer(random_model, tmp_path, save_steps=1, max_steps=1, eval_strategy="no")
    trainer.train()
    trainer._evaluation_due = True
    assert "The evaluation of step 1 was interrupted" in trainer.save_where_it_stopped()
    checkpoint = tmp_path / "out/checkpoint-1"
    assert json.loads((checkpoint / "mt_grpo_run.json").read_text())["evaluation_due"]
    resumed = make_trainer(random_model, tmp_path, max_steps=2, eval_strategy="no", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 2
    assert not any("eval_reward" in row for row in resumed.state.log_history)


def test_an_evaluation_without_any_score_is_not_the_best_one(random_model, tmp_path):
    trainer = make_trainer(random_model, tmp_path, eval_strategy="steps", metric_for_best_model="reward")
    assert not trainer._determine_best_metric({"eval_reward": None}, None)
    assert trainer._determine_best_metric({"eval_reward": 0.5}, None) and trainer.state.best_metric == 0.5


@pytest.mark.parametrize("size", [4, 8])
def test_a_test_row_that_cannot_be_asked_is_a_failed_rollout(random_model, tmp_path, caplog, size):
    """Also where it is a batch alone. One that is trained on ends the run."""
    trainer = make_trainer(random_model, tmp_path, eval_strategy="steps", per_device_eval_batch_size=size)
    trainer.env.max_model_len = 64
    rows = [PROMPTS[0], [{"role": "user", "content": f"{size} long " * 40}]]
    found = trainer.evaluate(Dataset.from_dict({"prompt": rows}))
    alone = trainer.evaluate(Dataset.from_dict({"prompt": rows[:1]}))
    assert found["eval_stop/environment_error"] == 0.5 and alone["eval_stop/environment_error"] == 0.0
    assert found["eval_reward"] == pytest.approx(alone["eval_reward"], abs=1e-6)
    (said,) = warnings_of(caplog, "cannot be asked")
    assert f"{size} long {size} long" in said and "fills the model's context" in said
    trainer.train_dataset = Dataset.from_dict({"prompt": rows[1:]})
    with pytest.raises(RunError, match="fills the model's context"):
        trainer.train()


def test_a_record_has_what_changes_training_and_nothing_else(tmp_path):
    """Ours by what their fields say, TRL's by a table."""
    found = trained_settings(MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)).keys()
    assert {"credit_assignment", "max_turn_tokens", "tool_timeout", "max_staleness", "beta", "learning_rate"} <= found
    assert not found & {
        "weight_sync", "weight_sync_dir", "log_rollouts", "max_concurrent_tools", "reward_timeout",
        "output_dir", "logging_steps", "save_steps",
    }  # fmt: skip


# =====================================================================================================================
# A full disk
# =====================================================================================================================


class FullAtStep(TrainerCallback):
    """No file has room for the model while the checkpoint of this step is written."""

    def __init__(self, step, size=100_000):
        self.step, self.size, self.limit = step, size, contextlib.ExitStack()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.limit.enter_context(files_of_at_most(self.size))

    def on_step_begin(self, args, state, control, **kwargs):
        self.limit.close()

    on_save = on_step_begin


@pytest.mark.parametrize("only_model", [False, True])
def test_a_checkpoint_without_room_costs_only_itself(random_model, tmp_path, caplog, only_model):
    """Nothing torn stays, the one before does, training goes on, and the best model is one that there is."""
    trainer = make_trainer(
        random_model, tmp_path, callbacks=[FullAtStep(2)], max_steps=3, save_steps=1, save_only_model=only_model,
        save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="eval_reward", eval_strategy="steps",
        eval_steps=1, per_device_eval_batch_size=8,
    )  # fmt: skip
    seen = []
    trainer.add_callback(type("Look", (TrainerCallback,), {"on_save": lambda self, args, state, control, **kwargs:
        seen.append(sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")))})())  # fmt: skip
    trainer.train()
    assert seen[:2] == [["checkpoint-1"], ["checkpoint-1"]] and "checkpoint-3" in seen[2]
    assert trainer.state.global_step == 3
    (said,) = warnings_of(caplog, "The checkpoint of step 2 could not be saved")
    assert f"{tmp_path / 'out/checkpoint-2'}: " in said and "Training goes on" in said
    assert only_model or f"Continue with --resume_from_checkpoint {tmp_path / 'out/checkpoint-1'}" in said
    rewards = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
    assert max(rewards) == rewards[1]  # the best one is that which could not be saved
    best = 1 if rewards[0] >= rewards[2] else 3
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"out/checkpoint-{best}")


@pytest.mark.parametrize("part, size", [("optimizer.pt", 600_000), ("rng_state.pth", 10_000)])
def test_no_part_of_a_checkpoint_may_be_missing(random_model, tmp_path, part, size):
    """The optimizer's file is the largest; a limit below that of the random states refuses all of them."""
    trainer = make_trainer(random_model, tmp_path, callbacks=[FullAtStep(1, size)], max_steps=2, save_steps=1)
    trainer.train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    assert checkpoint_damage(tmp_path / "out/checkpoint-2") is None


def test_the_trained_model_waits_for_room(random_model, trained, tmp_path, monkeypatch, caplog):
    """Neither `output_dir` nor the temporary directory takes it at first; a signal or the last attempt ends that."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    trainer = make_trainer(random_model, tmp_path)
    trainer.SAVE_PAUSE, trainer.SAVE_ATTEMPTS = 0.01, 3
    limit = contextlib.ExitStack()

    class Room(logging.Handler):
        def emit(self, record):
            if "Attempt 3 of 3 follows" in record.getMessage():
                limit.close()

    with limit:
        limit.enter_context(files_of_at_most(100_000))
        logging.getLogger().addHandler(room := Room())
        try:
            trainer.save_trained_model()
        finally:
            logging.getLogger().removeHandler(room)
    assert len(warnings_of(caplog, "The trained model could not be saved")) == 2
    saved = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(p, saved[n]) for n, p in trainer.model.named_parameters())
    assert (tmp_path / "out/trainer_state.json").is_file() and not list((tmp_path / "temporary").iterdir())
    (tmp_path / "out/model.safetensors.index.json").write_text("{}")
    with files_of_at_most(100_000), pytest.raises(SaveError, match="There is no earlier checkpoint"):
        trainer.save_trained_model()
    assert not list((tmp_path / "out").glob("*.index.json"))  # it would name shards of two models
    caplog.clear()
    trainer._stop_signal = 15
    with files_of_at_most(100_000), pytest.raises(SaveError):
        trainer.save_trained_model()
    assert not warnings_of(caplog, "Attempt")


def test_a_model_that_is_elsewhere_is_a_failure(random_model, tmp_path, monkeypatch):
    """The error has the place, and the model is there whole."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    trainer = make_trainer(random_model, tmp_path)
    (tmp_path / "out/model.safetensors").mkdir(parents=True)  # in the way
    with pytest.raises(SaveError, match=f"could not be saved in output_dir: {tmp_path}/out: ") as raised:
        trainer.save_trained_model()
    (folder,) = (tmp_path / "temporary").iterdir()
    assert f"It was saved in {folder}. Move it" in str(raised.value)
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(p, saved[n]) for n, p in trainer.model.named_parameters())


def test_a_kill_in_mid_save_leaves_no_whole_checkpoint(random_model, copy):
    """Where an older run in the same folder left a whole one of this step: its state would stand for both."""
    trainer = make_trainer(random_model, copy)
    assert checkpoint_damage(copy / "out/checkpoint-2") is None

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    trainer.save_model = killed
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert checkpoint_damage(copy / "out/checkpoint-2") == "trainer_state.json cannot be read"


KILLED = """
import os
import signal


def length_reward(completion_ids, trainer_state, **kwargs):
    if trainer_state.global_step == 3 and "KILL_IT" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


OUTCOME_REWARD_FUNCS = [length_reward]
"""


@pytest.mark.contract("kill")
def test_a_killed_run_loses_what_follows_its_last_checkpoint(random_model, tmp_path):
    """Killed in its fourth step, with a checkpoint of the second one: it goes on as a run that nobody killed."""
    (tmp_path / "rewards.py").write_text(KILLED)
    arguments = (
        f"--config {ROOT}/hf_recipes/tiny/calculator.yaml --model_name_or_path {random_model} --max_steps 5 "
        f"--output_dir {tmp_path}/out --reward_fn {tmp_path}/rewards.py --save_strategy steps --save_steps 2 "
        "--dataset_size 64 --per_device_train_batch_size 8 --max_completion_length 32 --max_turn_tokens 12 "
        "--max_tool_response_tokens 10 --disable_tqdm true"
    ).split()
    command = [warm_python.executable(), "mt_grpo_trainer.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "KILL_IT": "1"}, capture_output=True, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    main([*arguments, "--resume_from_checkpoint", "last"])
    main([*arguments, "--output_dir", str(tmp_path / "whole")])
    resumed, whole = (
        json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"] for name in ("out", "whole")
    )
    for key in ("loss", "reward"):
        expected = [row[key] for row in whole if key in row]
        assert [row[key] for row in resumed if key in row] == pytest.approx(expected, abs=1e-5) and len(expected) == 5


def test_a_run_without_room_does_not_begin(random_model, tmp_path, monkeypatch):
    """The model and a checkpoint of it: its weights, and Adam's two moments."""
    usage = shutil.disk_usage(tmp_path)
    trainer = make_trainer(random_model, tmp_path)
    weights = 4 * sum(p.numel() for p in trainer.model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(1.04 * 4 * weights)))
    with pytest.raises(SaveError, match=f"output_dir='{tmp_path}/out' has 0.00. GiB free"):
        trainer.train()
    assert not list((tmp_path / "out").glob("*")) and trainer.state.global_step == 0
    trainer.args.save_strategy = "no"  # for the trained model alone it is enough
    trainer.args.max_steps = 1
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("several", [False, True], ids=["one server", "two servers"])
@pytest.mark.parametrize("weight_sync, device, config, asks", [
    ("auto", "cuda", "nccl", False), ("auto", "cuda", None, True), ("auto", "cpu", "nccl", True),
    ("nccl", "cuda", "nccl", False), ("disk", "cuda", "nccl", True), ("auto", "cuda", "gone", False),
])  # fmt: skip
def test_room_for_a_push_is_needed_where_a_file_carries_it(
    random_model, tmp_path, monkeypatch, weight_sync, device, config, asks, several
):
    """Not in a /dev/shm of 64 MB where NCCL carries the weights. Without an answer the push itself finds out."""
    trainer, usage = make_trainer(random_model, tmp_path), shutil.disk_usage(tmp_path)
    trainer.backend, trainer.args.weight_sync_dir = "server", str(tmp_path / "shm")
    clients = [VLLMServerClient(port=9, transport=weight_sync) for _ in range(1 + several)]
    trainer.client = ServerPool(clients)

    def server_info(*_):
        if config == "gone":
            raise ServerLost("no answer")
        return {"weight_transfer_config": config and {"backend": config}}

    monkeypatch.setattr(VLLMServerClient, "server_info", server_info)
    accelerator = SimpleNamespace(is_main_process=True, device=torch.device(device))
    monkeypatch.setattr(trainer, "accelerator", accelerator)
    room = lambda path: usage._replace(free=0) if path == trainer.args.weight_sync_dir else usage  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", room)
    refused = pytest.raises(SaveError, match=f"weight_sync_dir='{tmp_path}/shm' has 0.000 GiB free")
    with refused if asks else contextlib.nullcontext():
        trainer._check_room()


def test_half_of_a_line_does_not_stay(tmp_path):
    """What is appended after there is room again must be readable."""
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"a": 1}])
    with files_of_at_most(1000), pytest.raises(OSError):
        write_rows(path, [{"b": "x" * 5000}])
    write_rows(path, [{"c": 3}])
    assert path.read_text() == '{"a": 1}\n{"c": 3}\n'


FULL_DISK = """
import sys
from pathlib import Path
from mt_grpo.run.trainer import check_room
from mt_grpo_trainer import main

try:
    main(sys.argv[2:])
except SystemExit as ended:
    print(ended.code)
try:
    check_room(sys.argv[1], 10_000_000, 0, "a model", "output_dir")
except ValueError as error:
    print(error)
"""
FILLING = """
import os

MODE = os.environ["FILL"]


def length_reward(completion_ids, trainer_state, **kwargs):
    if trainer_state.global_step == 3:
        with open(MODE, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


OUTCOME_REWARD_FUNCS = [length_reward]
"""


def can_mount():
    return (
        shutil.which("unshare")
        and not subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
        ).returncode
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs a file system of its own")
def test_a_disk_that_is_full_costs_no_weights(random_model, tmp_path):
    """A real one: a checkpoint finds no room, then there is none at all; the trained model is in the other place."""
    disk, other = tmp_path / "disk", tmp_path / "other"
    for folder in (disk, other):
        folder.mkdir()
    (tmp_path / "rewards.py").write_text(FILLING)
    (tmp_path / "worker.py").write_text(FULL_DISK)
    arguments = ["--config", ROOT / "hf_recipes/tiny/calculator.yaml", "--model_name_or_path", random_model,
                 "--output_dir", disk / "out", "--reward_fn", tmp_path / "rewards.py", "--max_steps", "4",
                 "--dataset_size", "16", "--per_device_train_batch_size", "8", "--max_completion_length", "32",
                 "--max_turn_tokens", "12", "--max_tool_response_tokens", "10", "--disable_tqdm", "true",
                 "--save_strategy", "steps", "--save_steps", "1", "--log_completions", "true"]  # fmt: skip
    command = ["unshare", "-rm", "bash", "-c",
               'mount -t tmpfs -o size=4m tmpfs "$DISK" && "$@"; ls "$DISK/out"', "bash",
               sys.executable, tmp_path / "worker.py", disk, *arguments]  # fmt: skip
    env = {**os.environ, "DISK": str(disk), "TMPDIR": str(other), "FILL": str(disk / "filler"),
           "PYTHONPATH": str(ROOT)}  # fmt: skip
    result = subprocess.run([str(c) for c in command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    said = result.stdout + result.stderr
    assert "Traceback" not in said, said[-4000:]
    assert "The checkpoint of step 4 could not be saved: " in said and "No space left" in said, said[-4000:]
    assert "rollouts could not be written" in said and "a log could not be written" in said, said[-4000:]
    (saved,) = other.glob("mt-grpo-out-*")
    assert f"error: The trained model could not be saved in output_dir: {disk}/out: " in result.stdout
    assert f"It was saved in {saved}. Move it" in result.stdout
    assert "checkpoint-1" in result.stdout and "checkpoint-4" not in result.stdout
    assert load_file(saved / "model.safetensors") and json.loads((saved / "trainer_state.json").read_text())
    assert f"output_dir='{disk}' has 0.000 GiB free; a model needs 0.010 GiB." in result.stdout


TWO_RANK_WORKER = """
import os, resource, sys, time
from pathlib import Path
import mt_grpo_trainer as m

RANK, LIMIT = int(os.environ["RANK"]), resource.getrlimit(resource.RLIMIT_FSIZE)
original_save, original_rng = m.MTGRPOEnvTrainer._save_checkpoint, m.MTGRPOEnvTrainer._save_rng_state


def save(self, model, trial):
    full = {1: 0, 2: 1}.get(self.state.global_step) == RANK  # rank 0 at step 1, rank 1 at step 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 if full else LIMIT[0], LIMIT[1]))
    original_save(self, model, trial)
    resource.setrlimit(resource.RLIMIT_FSIZE, LIMIT)


def save_rng(self, folder):
    if RANK == 1 and self.state.global_step == 3:
        time.sleep(2)
        print("too early" if (Path(folder) / "trainer_state.json").exists() else "in time", flush=True)
    original_rng(self, folder)


m.MTGRPOEnvTrainer._save_checkpoint, m.MTGRPOEnvTrainer._save_rng_state = save, save_rng
m.main()
"""


def test_two_ranks_agree_on_a_checkpoint_that_one_cannot_write(random_model, tmp_path):
    """Neither waits for the other, neither takes it for saved; a whole one has the random state of both."""
    (tmp_path / "worker.py").write_text(TWO_RANK_WORKER)
    (tmp_path / "rewards.py").write_text(REWARDS)
    command = [warm_python.executable(), "-m", "accelerate.commands.launch", "--config_file",
               ROOT / "hf_recipes/accelerate/cpu.yaml", tmp_path / "worker.py",
               "--config", ROOT / "hf_recipes/tiny/calculator.yaml", "--model_name_or_path", random_model,
               "--output_dir", tmp_path / "out", "--reward_fn", tmp_path / "rewards.py", "--max_steps", "3",
               "--dataset_size", "16", "--per_device_train_batch_size", "4", "--max_completion_length", "32",
               "--max_turn_tokens", "12", "--max_tool_response_tokens", "10", "--disable_tqdm", "true",
               "--save_strategy", "steps", "--save_steps", "1"]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([str(c) for c in command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said[-4000:]
    assert all(said.count(f"The checkpoint of step {n} could not be saved: ") == 1 for n in (1, 2)), said[-4000:]
    assert "in time" in said and "too early" not in said
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    assert checkpoint_damage(tmp_path / "out/checkpoint-3") is None
    (tmp_path / "out/checkpoint-3/rng_state_1.pth").unlink()
    assert checkpoint_damage(tmp_path / "out/checkpoint-3") == "rng_state_1.pth is missing"


RESUMING_WORKER = """
import os, sys
from types import SimpleNamespace
import torch
from accelerate import PartialState

PartialState(cpu=True)
from mt_grpo.run.checkpoints import load_model, load_optimizer, load_random_numbers

folder, what = sys.argv[1:]
rank = os.environ["RANK"]
model = torch.nn.Linear(2, 2, bias=False)
trainer = SimpleNamespace(_is_sharded=what == "model", optimizer=torch.optim.AdamW(model.parameters()), model=model)


def read(checkpoint, model=None):
    return torch.load(f"{checkpoint}/{rank}.pt", weights_only=True)


def read_optimizer(checkpoint):
    trainer.optimizer.load_state_dict(read(checkpoint))


try:
    if what == "model":
        load_model(trainer, lambda checkpoint, model: model.load_state_dict(read(checkpoint)), folder, model)
    elif what == "optimizer":
        load_optimizer(trainer, read_optimizer, folder)
    else:
        load_random_numbers(read, folder)
    said = "loaded"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
with open(f"{folder}/said-{rank}", "w") as file:
    file.write(said)
"""
RESUMED = {  # what is resumed: (what the file of a rank holds, how rank 1's is tampered with, what both ranks say)
    "model": (
        lambda: {"weight": torch.ones(2, 2)}, lambda path: torch.save({"weight": torch.ones(3, 2)}, path),
        "the model cannot be loaded: RuntimeError",
    ),
    "optimizer": (lambda: adam(4), lambda path: torch.save(adam(3), path), "the state of the optimizer"),
    "random numbers": (
        lambda: {"cpu": torch.zeros(3)}, lambda path: path.write_bytes(b"no zip"),
        "the state of the random numbers",
    ),
}  # fmt: skip


def adam(size):
    """The state of an AdamW with one parameter, of so many numbers where four are expected."""
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    state = optimizer.state_dict()
    if size != 4:
        state["state"][0] |= {"exp_avg": torch.ones(size), "exp_avg_sq": torch.ones(size)}
    return state


def resume_on_two_ranks(folder, what):
    """What each of two ranks says that resumes from a folder with a file of each."""
    (folder / "worker.py").write_text(RESUMING_WORKER)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}  # fmt: skip
    ranks = [
        subprocess.Popen([warm_python.executable(), str(folder / "worker.py"), str(folder), what], cwd=ROOT,
                         env={**env, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True) for rank in "01"
    ]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    return [(folder / f"said-{rank}").read_text() for rank in "01"]


@pytest.mark.parametrize("what", RESUMED)
def test_what_one_rank_cannot_load_ends_both_with_the_same_line(tmp_path, what):
    """Rank 1 alone finds it, by gloo. Else rank 0 would wait for its first gradient until ddp_timeout."""
    holds, tamper, says = RESUMED[what]
    for rank in "01":
        torch.save(holds(), tmp_path / f"{rank}.pt")
    assert resume_on_two_ranks(tmp_path, what) == ["loaded", "loaded"]
    tamper(tmp_path / "1.pt")
    one, other = resume_on_two_ranks(tmp_path, what)
    assert one == other and one.startswith(f"CheckpointError: resume_from_checkpoint='{tmp_path}': {says}"), one


def test_a_run_that_stops_without_room_saves_itself_elsewhere(random_model, tmp_path, monkeypatch):
    """The message has the other place, from which the run goes on; without any it says so, and where from."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    trainer = make_trainer(random_model, tmp_path, max_steps=3, save_strategy="no")
    trainer.train()
    (tmp_path / "out/checkpoint-3").write_text("in the way")
    said = trainer.save_where_it_stopped()
    found = re.fullmatch(r"The run is saved at step 3. Continue with --resume_from_checkpoint (.*)", said)[1]
    assert found.startswith(str(tmp_path / "temporary/mt-grpo-out-"))
    assert checkpoint_to_resume(found, str(tmp_path / "out")) == found
    trainer._saved.clear()
    with files_of_at_most(10_000):
        said = trainer.save_where_it_stopped()
    assert said.startswith("Step 3 could not be saved: ") and said.endswith("There is no earlier checkpoint.")


# =====================================================================================================================
# Numbers that are none, and tensors that are missing
# =====================================================================================================================


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(random_model, copy, change):
    """transformers warns, and trains on with the layer of the base model."""
    path, name = copy / "out/checkpoint-2/model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    says = "is missing" if change == "missing" else rf"has the shape \[{len(tensor) - 1}, "
    if change == "shape":
        tensors[name] = tensor[1:].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"checkpoint-2'?: the tensor {name} {says}"):
        make_trainer(random_model, copy, resume_from_checkpoint=str(copy / "out/checkpoint-2"))
    trainer = make_trainer(random_model, copy)
    with pytest.raises(ValueError, match=f"the tensor {name} {says}"):
        trainer.train(resume_from_checkpoint=str(copy / "out/checkpoint-2"))


def test_a_shard_that_lacks_a_tensor_is_refused(random_model, copy):
    """Also where the index says that it is there."""
    folder, name = copy / "out/checkpoint-2", "model.layers.1.mlp.up_proj.weight"
    trainer = make_trainer(random_model, copy)
    (folder / "model.safetensors").unlink()
    trainer.model.save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1 and (folder / "model.safetensors.index.json").is_file()
    check_tensors(folder, trainer.model)
    (shard,) = [path for path in shards if name in load_file(path)]
    save_file({key: value for key, value in load_file(shard).items() if key != name}, shard, {"format": "pt"})
    with pytest.raises(ValueError, match=f"the tensor {name} is missing"):
        check_tensors(folder, trainer.model)


def edit(name, **changes):
    """A change of a JSON file."""

    def apply(folder):
        path = folder / name
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**found, **changes}))

    return apply


def put(name, value):
    """A file in place of another: bytes as they are, anything else as torch writes it."""

    def apply(folder):
        (folder / name).write_bytes(value) if isinstance(value, bytes) else torch.save(value, folder / name)

    return apply


REFUSED_BEFORE = {  # before a model is loaded
    "a list": (put("trainer_state.json", b"[]"), "trainer_state.json cannot be read"),
    "unknown": (edit("trainer_state.json", steps=3), "trainer_state.json has the key 'steps'"),
    "epoch": (edit("trainer_state.json", epoch="two"), "trainer_state.json has epoch: 'two', expected a number"),
    "history": (edit("trainer_state.json", log_history=[3]), r"trainer_state.json has 3 in log_history"),
    "callbacks": (edit("trainer_state.json", stateful_callbacks=[3]), r"stateful_callbacks: \[3\], expected a dict"),
    "record": (edit("mt_grpo_run.json", world_size="two"), "mt_grpo_run.json cannot be read"),
    "index": (edit("model.safetensors.index.json", weight_map=["a"]), "model.safetensors.index.json cannot be read"),
    "config": (put("config.json", b"none"), "config.json cannot be read"),
    "latest": (put("latest", b"\xff"), "has no states of the model and the optimizer"),
    "schedule": (put("scheduler.pt", [1]), "scheduler.pt contains list, expected a dict"),
    "schedule of another": (put("scheduler.pt", {"a": 1}), "scheduler.pt has last_epoch: None"),
    "random": (put("rng_state.pth", {"python": ()}), "rng_state.pth lacks cpu, numpy"),
    "random, a class": (put("rng_state.pth", Path("x")), "rng_state.pth cannot be loaded: UnpicklingError"),
    "header": (put("model.safetensors", b"\x02" + bytes(7) + b"[]"), "model.safetensors has no readable header"),
}


@pytest.mark.parametrize("name", REFUSED_BEFORE)
def test_a_file_that_holds_something_else_is_refused_before_a_model_is_loaded(copy, name):
    tamper, message = REFUSED_BEFORE[name]
    tamper(copy / "out/checkpoint-4")
    with pytest.raises(ValueError, match=f"^resume_from_checkpoint='last': .*checkpoint-4/.*{message}.*checkpoint-2"):
        checkpoint_to_resume("last", str(copy / "out"))


def resized(folder):
    """The first parameter's momentum is of another size."""
    state = torch.load(folder / "optimizer.pt")
    state["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(state, folder / "optimizer.pt")


def other_generators(folder):
    state = torch.load(folder / "rng_state.pth", weights_only=False)
    torch.save({**state, "python": (1, 2, 3)}, folder / "rng_state.pth")


def other_dtype(folder):
    """A header that safetensors does not take."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"X32"', 1))


REFUSED_LATER = {  # once there are parameters to compare with
    "optimizer, no pickle": (put("optimizer.pt", b"\x80garbage"), "the state of the optimizer .optimizer.pt."),
    "optimizer of other shapes": (resized, r"exp_avg has the shape \[3\], expected \["),
    "random numbers": (other_generators, r"the state of the random numbers .rng_state\*.pth. cannot be loaded"),
    "a type of no tensor": (other_dtype, "model.safetensors cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_LATER)
def test_a_file_that_holds_something_else_ends_in_one_line(random_model, copy, name, capsys):
    """Nothing is saved, and the checkpoint is not offered for going on."""
    tamper, message = REFUSED_LATER[name]
    folder = copy / "out/checkpoint-2"
    tamper(folder)
    trainer = make_trainer(random_model, copy)
    trainer.args.resume_from_checkpoint = str(folder)
    with pytest.raises(SystemExit, match=f"^error: .*checkpoint-2.*{message}") as ended:
        train_or_save(trainer)
    assert "Continue with" not in str(ended.value)
    assert not (copy / "out/checkpoint-0").exists() and not (copy / "out/model.safetensors").exists()


def test_a_run_with_lora_and_one_without_cannot_go_on_from_each_other(random_model, copy, tmp_path_factory):
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
    with pytest.raises(ValueError, match="checkpoint-2.*the tensor .*lora_A.* is missing"):
        make_trainer(random_model, copy, trainer=lora, resume_from_checkpoint=str(copy / "out/checkpoint-2"))
    adapters = tmp_path_factory.mktemp("lora")
    make_trainer(random_model, adapters, trainer=lora, max_steps=2).train()
    folder = adapters / "out/checkpoint-2"
    with pytest.raises(ValueError, match="checkpoint-2.*the tensor .* is missing"):
        make_trainer(random_model, adapters, resume_from_checkpoint=str(folder))
    (folder / "adapter_config.json").write_text("none")
    with pytest.raises(ValueError, match="adapter_config.json cannot be read"):
        make_trainer(random_model, adapters, trainer=lora, resume_from_checkpoint=str(folder))


def test_an_adapter_that_lacks_a_tensor_is_refused(random_model, tmp_path):
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
    make_trainer(random_model, tmp_path, trainer=lora, max_steps=2).train()
    path = tmp_path / "out/checkpoint-2/adapter_model.safetensors"
    whole = load_file(path)
    make_trainer(random_model, tmp_path, trainer=lora, max_steps=3).train(resume_from_checkpoint="last")
    name = next(name for name in whole if "v_proj.lora_B" in name)
    save_file({key: value for key, value in whole.items() if key != name}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"checkpoint-2.*the tensor {re.escape(name)} is missing"):
        make_trainer(random_model, tmp_path, trainer=lora, max_steps=3).train(
            resume_from_checkpoint=str(tmp_path / "out/checkpoint-2")
        )


def test_tensors_that_need_not_be_there(tmp_path):
    """One of tied weights is enough; a model may not save some; torch and DeepSpeed read forms of their own."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 3, bias=False) for name in "abc"})
    model["b"].weight = model["a"].weight
    model._keys_to_ignore_on_save = {"c.weight"}
    path = tmp_path / "model.safetensors"
    for name in ("a.weight", "b.weight"):
        save_file({name: torch.zeros(3, 2)}, path)
        check_tensors(tmp_path, model)
    save_file({"b.weight": torch.zeros(2, 3)}, path)
    with pytest.raises(ValueError, match=r"the tensor a.weight has the shape \[2, 3\], expected"):
        check_tensors(tmp_path, model)
    save_file({"c.weight": torch.zeros(3, 2)}, path)
    with pytest.raises(ValueError, match="the tensor a.weight is missing"):
        check_tensors(tmp_path, model)
    for name in ("latest", "pytorch_model_fsdp.bin"):
        (tmp_path / name).touch()
        check_tensors(tmp_path, model)
        (tmp_path / name).unlink()


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
    load_as_saved(path.parent, resumed.model)
    assert torch.equal(head, tensors["model.norm.weight"])
    assert (head.dtype, kept.dtype) == (torch.float32, torch.bfloat16)
    resumed.model.float()
    resumed.state.best_model_checkpoint = str(path.parent)
    resumed._load_best_model()
    assert torch.equal(resumed.model.get_parameter("model.layers.0.mlp.experts.down_proj")[3], tensors[name])
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"the tensor {name} is missing"):
        check_tensors(path.parent, resumed.model)


def test_the_record_of_a_run_has_the_classes_of_its_environments(tmp_path):
    """Theirs and what they are made of, from files of the user's: another game is another run."""
    path, hashes = tmp_path / "game.py", []
    for number, reward in enumerate((1.0, 0.5)):
        path = tmp_path / f"game_{number}.py"
        path.write_text(
            "class Game:\n    def reset(self, **row):\n        pass\n\n"
            f"    def get_reward(self):\n        return {reward}\n"
        )
        game = load_class(f"{path}:Game", "environment")
        env = MultiTurnToolEnv([], None, environment={"game": type("Named", (game,), {"__module__": "mt_grpo.x"})})
        ((name, cls),) = classes_of(env).items()
        hashes.append(class_sha256(cls))
        assert name == "game" and hashes[-1] == class_sha256(game)
    assert len(set(hashes)) == 2 and classes_of(MultiTurnToolEnv([], None)) == {}


LARGE = """
def large(completion_ids, trainer_state, **kwargs):
    return [%s * (sum(ids) %% 17) for ids in completion_ids]


OUTCOME_REWARD_FUNCS = [large]
"""


def finite_files(folder):
    """Whether each tensor of each file of weights below a folder is finite."""
    files = list(folder.rglob("*.safetensors"))
    return all(bool(tensor.isfinite().all()) for path in files for tensor in load_file(path).values()), len(files)


LATE = LARGE % "(2e37 if trainer_state.global_step == 2 else 1)"
OF_TURNS = LARGE.replace("[%s * (sum(ids) %% 17)", "[[%s * (sum(ids) %% 17)]").replace("OUTCOME", "TURN") % "1.0"


@pytest.mark.parametrize("setting, says", [
    ({"rewards": LATE}, "Step 2: a weighted outcome reward is [23].*At most 1e"),
    ({"rewards": LARGE % "1.0", "outcome_reward_weights": [3e38]}, "a weighted outcome reward is "),
    ({"rewards": OF_TURNS, "turn_advantage_coef": 3e38, "credit_assignment": "turn_return", "scale_rewards": "none"},
     "an advantage is not finite, with turn_advantage_coef=3e"),
])  # fmt: skip
def test_rewards_that_overflow_end_the_run_with_the_last_good_state(random_model, tmp_path, capsys, setting, says):
    """They would vanish in a comparison, or leave no weight that is a number. The steps before are saved."""
    trainer = make_trainer(random_model, tmp_path, **setting)
    with pytest.raises(SystemExit, match=f"(?s)error: .*{says}.*This batch is not trained on"):
        train_or_save(trainer)
    assert finite_files(tmp_path)[0]
    assert not weights_not_finite(trainer.model)
    if "2e37" in setting["rewards"]:
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


def test_weights_of_8_bits_are_no_obstacle():
    """torch cannot tell whether they are finite. They are those of a quantised base, which LoRA leaves as they are."""
    layer = torch.nn.Linear(2, 2)
    layer.weight = torch.nn.Parameter(layer.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    layer.bias.data[1] = float("inf")
    assert weights_not_finite(layer) == ["bias"]


def test_fp16_skips_steps_and_not_for_ever(random_model, tmp_path, monkeypatch):
    """Its scaler skips a step whose scaled gradient overflows, and finds a scale; without end it is no scale."""
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
