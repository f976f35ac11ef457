"""The term of the loss for what tools answered: which tokens, and its gradient."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import random_batches as batches
import torch
from accelerate import Accelerator
from datasets import Dataset
from test_trees import by_ids, calculator
from transformers import AutoModelForCausalLM

from mt_grpo.rollout import Context, Record, Rollout, StopReason, Turn
from mt_grpo.training.batch import Batch
from mt_grpo.training.observation_loss import observed_tokens, only_sampled
from mt_grpo.training.records import NUM_OBSERVED, OBSERVED
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv

ROOT = Path(__file__).resolve().parents[2]


def turn(ids, read, **changes):
    return Turn(ids, [-1.0] * len(ids), "", "stop", observation_ids=read, **changes)


def test_which_tokens_are_observed():
    """What was read behind a turn of the policy's: not the prompt, nor what stands behind a turn of another's."""
    rollout = Rollout([], [1, 2], turns=[turn([5, 6], [7, 8]), turn([9], [3], trained=False), turn([4], [])])
    assert rollout.observation_mask == [0, 0, 1, 1, 0, 0, 0]
    rollout.turns[1].context = Context([], [1, 9])  # what an edited history renders anew is a prompt
    assert [record.observation_mask for record in rollout.records] == [[0, 0, 1, 1], [0, 0, 0]]
    rollout.turns[0].mask = [0, 1]  # of whose tokens some are not trained
    assert rollout.records[0].observation_mask == [0, 0, 1, 1]
    for changes in ({"mask": [0, 0]}, {"continuation": "Wait"}, {"finish_reason": "length"}):
        # nothing of it is trained; a text inside the policy's message; an end of turn in the middle of a call
        assert Rollout([], [1], turns=[replace(turn([5, 6], [7, 8]), **changes)]).observation_mask == [0] * 4


@pytest.mark.parametrize("masks", [False, True])
def test_the_columns_of_a_batch(masks):
    """The second rollout was cut off, the third failed: its record is an empty one."""
    records = [Record([1], [turn([5], [7, 8])]), Record([1], [turn([5, 5], [7])]), Record([], [])]
    rollouts = [Rollout([], [1], stop_reason=StopReason.ANSWERED)] * 3
    batch = Batch([{}] * 3, 3, rollouts=rollouts, records=records, owners=[0, 1, 2], truncated=[False, True, False])
    found = observed_tokens(batch, 4, SimpleNamespace(mask_truncated_completions=masks), Accelerator(cpu=True))
    second = [0.0] * 4 if masks else [0.0, 0.0, 1.0, 0.0]
    assert found[OBSERVED].tolist() == [[0.0, 1.0, 1.0, 0.0], second, [0.0] * 4]
    assert found[NUM_OBSERVED].item() == 2 + (not masks)


@pytest.mark.parametrize("steps", [dict(), dict(gradient_accumulation_steps=1, steps_per_generation=2)], ids=str)
@pytest.mark.parametrize("layout", ["trl", "shared"])
def test_its_gradient_is_that_of_the_mean_cross_entropy(random_model, tmp_path, layout, steps):
    """Of an optimizer step's observations; where a batch is two steps, of an equal share of the batch's number."""
    settings = dict(loss_type="dapo", max_steps=1, **steps)
    without = batches.train(random_model, tmp_path / "without", layout, settings)["gradients"][0]
    trainer = batches.make_trainer(random_model, tmp_path / "with", layout, settings | {"observation_loss_coef": 0.5})
    seen, generate = [], trainer._generate_and_score_completions

    def noted(inputs):
        seen.append(generate(inputs))
        return seen[-1]

    trainer._generate_and_score_completions = noted
    split, steps_of = trainer.layout.in_passes, []

    def in_passes(micro_batches):
        steps_of.append(micro_batches[: trainer.args.gradient_accumulation_steps])
        return split(micro_batches)

    trainer.layout.in_passes = in_passes
    trainer.train()
    (batch,), model = seen, AutoModelForCausalLM.from_pretrained(random_model)
    rows, total = [(each, i) for each in steps_of[0] for i in range(len(each["prompt_ids"]))], 0.0
    for each, i in rows:
        prompt = each["prompt_ids"][i][each["prompt_mask"][i] > 0]
        completion = each["completion_ids"][i][: int(each["completion_mask"][i].sum())]
        logps = model(torch.cat([prompt, completion])[None]).logits[0, :-1].log_softmax(-1)[len(prompt) - 1 :]
        own = logps.gather(1, completion[:, None])[:, 0]
        total = total - (own * each[OBSERVED][i][: len(completion)]).sum()
    number = batch[NUM_OBSERVED] * len(steps_of[0]) / trainer.args.steps_per_generation
    (0.5 * total / number).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    found = trainer.gradients[0] - without
    assert expected.abs().max() > 1e-3
    assert (found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max())


def test_an_observation_that_nobody_expected_gives_no_nan():
    """Its logprob, without one of the reference, would be infinite in the term of `beta`."""
    inputs = {"tool_mask": torch.tensor([[1, 0]])}
    assert only_sampled(inputs, torch.tensor([[-1.0, -200.0]])).tolist() == [[-1.0, 0.0]]


def make(out, **changes):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {n} * 3?"}]} for n in range(11, 19)])
    args = dict(
        output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=8, num_generations=4, max_completion_length=96, disable_tqdm=True,
        save_strategy="no", max_steps=6, logging_steps=1, learning_rate=1e-3, max_env_steps=2,
    )  # fmt: skip
    env = MultiTurnToolEnv([calculator], "Use the calculator, then answer.")
    model = str(ROOT / "hf_recipes/tiny/calculator-model")
    return MTGRPOEnvTrainer(
        model, env, [], [by_ids], args=MTGRPOConfig(**{**args, **changes}), train_dataset=rows, eval_dataset=rows
    )


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_learns_what_its_tool_answers(tmp_path, share):
    trainer = make(tmp_path, observation_loss_coef=1.0, share_prompts=share, beta=0.01)
    sizes, log_step = [], trainer._log_step

    def noted(output, advantages):
        read = [sum(len(t.observation_ids) for t in rollout.turns if t.finish_reason == "stop")
                for rollout in trainer.batch.rollouts]  # fmt: skip
        assert output[OBSERVED].sum(1).tolist() == read and not (output[OBSERVED] * output["tool_mask"]).any()
        assert output[NUM_OBSERVED].item() == sum(read)
        sizes.append(sum(read))
        log_step(output, advantages)

    trainer._log_step = noted
    trainer.train()
    losses = [row["observation/loss"] for row in trainer.state.log_history if "observation/loss" in row]
    assert min(sizes) > 20 and len(losses) == 6 and losses[-1] < 0.7 * losses[0]
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)
    trainer._log_step = log_step
    assert trainer.evaluate()["eval_observation/loss"] < 0.7 * losses[0]


def test_without_it_nothing_is_added(tmp_path):
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    assert not any("observation" in name for row in trainer.state.log_history for name in row)


def test_what_it_does_not_go_with(tmp_path, monkeypatch):
    monkeypatch.setattr("mt_grpo.recipe.refusals.is_liger_kernel_available", lambda: True)
    with pytest.raises(ValueError, match="observation_loss_coef with use_liger_kernel: its loss gives no logprobs"):
        MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_liger_kernel=True, observation_loss_coef=0.1)
    with pytest.raises(ValueError, match="observation_loss_coef=-1.0, expected a finite number of at least 0"):
        MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, observation_loss_coef=-1.0)


def test_where_nothing_was_read_no_loss_is_logged(tmp_path):
    """0 would be that of a perfect prediction."""
    for share in (True, False):
        trainer = make(tmp_path / str(share), observation_loss_coef=1.0, share_prompts=share, max_steps=1)
        trainer.env.tools = {}  # each turn with a call is answered all the same, one without is the last
        trainer.env.max_env_steps = 0
        trainer.train()
        assert [row.get("observation/loss") for row in trainer.state.log_history] == [None, None]
