"""The conversations of golden_batch.py, trained with their histories edited. Run in one process and by two ranks."""

import dataclasses
import os

import golden_batch as golden
import torch
from datasets import Dataset
from project import SMALL, json_lines
from random_batches import Gradients

from mt_grpo.base.errors import RunError
from mt_grpo.rollout import Context, Record, StopReason
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv

LAYOUTS = {  # a batch of eight rollouts: in one step, in two accumulated steps, in two steps of the optimizer
    "one": dict(per_device_train_batch_size=8),
    "accumulated": dict(per_device_train_batch_size=4, gradient_accumulation_steps=2),
    "two steps": dict(per_device_train_batch_size=4, steps_per_generation=2, max_steps=2),
}


def no_edit(rollout, k):
    """The history is cut before each turn, and nothing is changed: what the model reads is what it read."""
    return rollout.prompt_ids + Record([], rollout.turns[:k]).completion_ids


def edit_one(rollout, k):
    """Only rollout 0, twice: seven rollouts have one record, and one rank has no further ones."""
    return [k, 7, 9] if rollout.index % 8 == 0 else None


class EditedEnv(MultiTurnToolEnv):
    """Ends conversations as they are written in golden_batch.py, then edits the history before some turns.

    `edit(rollout, k)` gives the ids that the model read before turn k, None where the history only grew.
    `failed` are rollouts whose environment fails: those of `at_once` before anything was said.
    """

    edit, failed, at_once = None, (), ()

    async def converse(self, rollout, llm, sampling_params=None):
        index = rollout.index % 8
        if index in self.at_once:
            rollout.prompt_messages, rollout.prompt_ids = [], []
        else:
            await super().converse(rollout, llm, sampling_params)
        for k, turn in enumerate(rollout.turns):
            if k and self.edit is not None and (ids := self.edit(rollout, k)) is not None:
                turn.context = Context([{"role": "user", "content": "edited"}], ids)
        if index in (*self.failed, *self.at_once):
            rollout.stop_reason = StopReason.ENVIRONMENT_ERROR
            rollout.error = ConnectionError(f"no database for rollout {index}")
        return rollout


class Near(golden.ScriptedServer):
    """Its logprobs are about those of the random model: -5.25 in turn 0, then -5.5, then -5.75."""

    async def generate(self, *args):
        generation = await super().generate(*args)
        return dataclasses.replace(generation, logprobs=[2 * logprob - 5 for logprob in generation.logprobs])


class Unknown(Near):
    """The same, but the logprob of each turn's first token is not known."""

    async def generate(self, *args):
        generation = await super().generate(*args)
        return dataclasses.replace(generation, logprobs=[float("nan"), *generation.logprobs[1:]])


def make_trainer(model, out, edit=None, failed=(), at_once=(), funcs=golden.FUNCS, processing_class=None, **changes):
    rows, wrapped = changes.pop("rows", lambda: golden.ROWS), changes.pop("wrapped", lambda args, cls: cls)
    args = dict(
        output_dir=str(out), per_device_train_batch_size=8, per_device_eval_batch_size=4, max_completion_length=512,
        max_env_steps=2, log_rollouts=8, max_steps=1, num_generations=4, scale_rewards="none", optim="sgd",
        turn_advantage_coef=0.5, learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0,
        shuffle_dataset=False,
    )  # fmt: skip
    config = MTGRPOConfig(**{**SMALL, **args, **changes})
    env = wrapped(config, EditedEnv)([golden.echo], system_prompt=None, max_steps=2)
    env.edit, env.failed, env.at_once = edit, failed, at_once
    trainer = MTGRPOEnvTrainer(
        model, env, *funcs, processing_class=processing_class, args=config,
        callbacks=[gradients := Gradients()],
        turn_reward_weights=golden.TURN_WEIGHTS if funcs is golden.FUNCS else None,
        outcome_reward_weights=golden.OUTCOME_WEIGHTS if funcs is golden.FUNCS else None,
        train_dataset=Dataset.from_list(rows()), eval_dataset=Dataset.from_list(golden.ROWS),
    )  # fmt: skip
    trainer.llm = golden.ScriptedServer(trainer.processing_class)
    trainer.gradients = gradients.steps
    return trainer


def train(
    model, out, edit=None, ratios=None, evaluate=False, old_logps="policy", mode="token_truncate", least=None, cut=3.0,
    **changes,
):  # fmt: skip
    """Gradients and losses of a run; with `ratios` as if a server of that kind had sampled."""
    trainer = make_trainer(model, out, edit, **changes)
    if ratios:
        trainer.use_vllm, trainer.vllm_importance_sampling_mode = True, mode
        trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = least, cut
        trainer.args.old_logps = old_logps
        trainer.llm = ratios(trainer.processing_class)
    passes, own = [], trainer._get_per_token_logps_and_entropies

    def counted(*inputs, **kwargs):
        passes.append(torch.is_grad_enabled())
        return own(*inputs, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted
    trainer.train()
    result = {"gradients": torch.stack(trainer.gradients), "log": trainer.state.log_history[0]}
    result["facts"] = next(each.facts for each in trainer.callback_handler.callbacks if hasattr(each, "facts"))
    result["passes"] = passes.count(False) - 2 * trainer.args.share_prompts  # of the rollouts; two prove the layout
    if evaluate:
        result["eval_loss"] = trainer.evaluate()["eval_loss"]
    return result


def distance(one, other):
    """The largest difference, as a share of the largest entry, over all steps."""
    assert one.shape == other.shape and one.abs().amax(1).min() > 1e-6
    return ((one - other).abs().amax(1) / one.abs().amax(1)).max().item()


SAMPLING = {  # ways to the metrics of importance sampling: in the loss's own pass, or in one before the step
    "own pass": {},
    "tokens": dict(log_rollout_tokens=True),
    "twice": dict(num_iterations=2, max_steps=2),
    "trl": dict(share_prompts=False),
}


ON_A_DEVICE = {  # what test_devices.py trains
    "edited": dict(edit=edit_one, ratios=Near, log_rollout_tokens=True, failed=(3,), at_once=(5,)),
    "evaluated": dict(evaluate=True, beta=0.1, num_iterations=2, max_steps=2),
    "rows": dict(share_prompts=False, ratios=Near, mode="sequence_mask", old_logps="policy"),
    "refilled": dict(refill_groups=1, ratios=Near, credit_assignment="gigpo"),
}


def run_on_ranks(model, out, world):
    """What test_records.py compares: gradients of histories that only grew, and of those that were cut; an error."""
    edits = {"grown": None, "cut": no_edit, "edited": edit_one}
    cases = [(loss_type, name) for loss_type in ("dapo", "grpo", "dr_grpo", "bnpo") for name in ("grown", "cut")]
    cases = cases if world > 1 else []
    cases += [(loss_type, "edited") for loss_type in ("dapo", "grpo", "dr_grpo", "sapo")]
    results = {}
    for loss_type, name in cases:
        steps = 1 if loss_type == "sapo" else 2  # sapo's mean is of a micro-batch, and ranks shuffle as they do
        result = train(
            model, out / f"{loss_type}-{name}", edits[name], evaluate=loss_type == "dapo", loss_type=loss_type,
            per_device_train_batch_size=8 // world // steps, gradient_accumulation_steps=steps,
            per_device_eval_batch_size=4 // world, beta=0.1,
        )  # fmt: skip
        results[f"{loss_type}-{name}"] = result["gradients"], result.get("eval_loss")
    settings = dict(beta=0.1, loss_type="grpo", per_device_train_batch_size=8 // world)
    for name, changes in SAMPLING.items():  # all that the second rank has failed
        changes = dict(changes, cut=1.4, failed=(4, 5, 6, 7), **settings)
        result = train(model, out / f"sampling {name}", edit_one, Unknown, **changes)
        log, facts = result["log"], ("rollouts/ended", "rollouts/called", "num_rollouts")
        results["facts"] = {key: result["facts"][key] for key in facts}
        results[f"sampling {name}"] = {key: log[key] for key in log if key.startswith(("sampling/", "entropy", "kl"))}
        if not int(os.environ.get("RANK", 0)):  # which has the file
            row = json_lines(out / f"sampling {name}/metrics.jsonl")[0]
            values = {key: row[key] for key in row if key.startswith("by_")}
            results[f"by depth {name}"] = {f"{key}/{k}": v for key in values for k, v in enumerate(values[key])}
    trainer = make_trainer(model, out / "failed", at_once=range(8), per_device_train_batch_size=8 // world)
    try:
        trainer.train()
    except RunError as error:
        results["failed"] = str(error)
    return results
