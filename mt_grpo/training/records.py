"""Rollouts as rows of the loss, one per record: which there are, in passes, and what each token weighs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer

from mt_grpo.base.ranks import RunError
from mt_grpo.conversation.environments import PromptTooLong
from mt_grpo.rollout import Record, Rollout

# The key of TRL's batch under which each rollout has a list of rows. TRL's shuffle and split keep it with the rollout.
FURTHER_RECORDS = "further_records"
Row = dict[str, torch.Tensor]  # of TRL's batch, without the batch's dimension


class Pass(dict):
    """What one forward pass reads: some rows of a micro-batch, as a batch for TRL's loss.

    Attributes:
        loss_type: TRL's, for this call.
        scale: What its loss counts in the micro-batch's.
    """

    loss_type, scale = "", 1.0


# -- from rollouts to TRL's batch --


def trained_records(rollout: Rollout) -> list[Record]:
    """At least one. Where nothing is to be trained, or the environment failed, it is an empty one (see `loss_lists`).

    >>> trained_records(Rollout([], [1, 2, 3]))  # a prompt may be longer than what the model can read
    [Record(prompt_ids=[], turns=[], numbers=None)]
    """
    records = [] if rollout.failed else [r for r in rollout.records if any(turn.trained for turn in r.turns)]
    return records or [Record([], [])]


def compare_ranks(rollouts: list[Rollout], args: Any, step: int) -> tuple[int, list[bool]]:
    """(further records on the rank that has most, for each of N rollouts whether its environment failed). Collective.

    Raises `RunError` on all ranks where every environment failed, or a setting does not go with further records.
    """
    failed = [rollout.failed for rollout in rollouts]
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    text = f"{type(errors[0]).__name__}: {errors[0]}" if errors else "no reason was given"
    no_room = [isinstance(error, PromptTooLong) for error in errors]
    reports = gather_object([(sum(len(trained_records(r)) - 1 for r in rollouts), failed, text, no_room)])
    flags = [flag for report in reports for flag in report[1]]
    if all(flags) and all(each for report in reports for each in report[3]):
        raise RunError(f"In all {len(flags)} rollouts of step {step} the prompt fills the context. {reports[0][2]}")
    if all(flags):
        raise RunError(
            f"The environment failed in all {len(flags)} rollouts of step {step}. The first error: "
            f"{reports[0][2].rstrip('.')}. Expected at least one rollout without an error. "
            "See to the environment, and start again."
        )
    num_further = max(report[0] for report in reports)
    if num_further:
        check_settings(args)
    return num_further, flags


def check_settings(args: Any) -> None:
    """Raise `RunError` for what compares the tokens of a whole batch, which passes over its records do not see."""
    asked = {
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
        "entropy_coef": args.entropy_coef != 0.0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
    }
    for key in (key for key, is_set in asked.items() if is_set):
        raise RunError(
            f"{key}={getattr(args, key)} compares the tokens of a whole batch. The environment edited a history, so "
            f"the batch is trained in several passes. Remove {key}, or use an environment that edits no history."
        )


# -- from a micro-batch to passes --


def loss_in_passes(trainer: Any, model: Any, batch: dict[str, Any], num_items: Any) -> torch.Tensor:
    """TRL's loss of a micro-batch with further records. In training all passes but the last go backward here.

    The last pass's gradient is the caller's, as that of any loss: it is then that ranks exchange gradients.
    """
    loss_type, aux_coef, total = trainer.loss_type, trainer.router_aux_loss_coef, 0.0
    *others, last = passes = to_passes(trainer, batch)
    trainer.loss_type = passes[0].loss_type
    trainer.router_aux_loss_coef /= sum(each.scale for each in passes)  # the router's loss is of a micro-batch
    try:
        for each in others:
            if trainer.model.training:
                with without_sync(trainer.accelerator, model, trainer.is_deepspeed_enabled):
                    total += Trainer.training_step(trainer, model, each, num_items)
            else:
                total += trainer.compute_loss(model, each)
        return total + trainer.compute_loss(model, last)
    finally:
        trainer.loss_type, trainer.router_aux_loss_coef = loss_type, aux_coef


def row_of(batch: dict[str, Any], index: int) -> Row:
    return {key: value[index] for key, value in batch.items() if torch.is_tensor(value) and value.ndim}


def weigh_tokens(batch: dict[str, Any], loss_type: str, max_completion_length: int) -> tuple[list[Row], float | None]:
    """The rows of a micro-batch, and what the sum of their tokens' losses is divided by; None: as TRL does it.

    TRL's means are over rows, or over a batch's tokens. Here a pass has only some of a micro-batch's rows, and several
    rows can be one rollout. With this divisor the call is that of `dapo`, which divides by a given number.
    INVARIANT: a rollout's weights are at least 1, and equal: TRL's means over a row's tokens read the same mask.
    """
    rollouts = [[row_of(batch, i), *further] for i, further in enumerate(batch[FURTHER_RECORDS])]
    divisor = {
        "grpo": len(rollouts) * max_completion_length,  # times each token's weight: the mean of the rollouts' means
        "dr_grpo": len(rollouts) * max_completion_length,
        "luspo": len(rollouts),
        "bnpo": max(1, sum(num_trained(rows) for rows in rollouts)),
    }.get(loss_type)
    if loss_type == "grpo":
        for i, rows in enumerate(rollouts):
            weight = max_completion_length / max(1, num_trained(rows))
            rollouts[i] = [{**row, "tool_mask": row["tool_mask"] * weight} for row in rows]
    return [row for rows in rollouts for row in rows], divisor


def num_trained(rows: list[Row]) -> int:
    return int(sum((row["completion_mask"] * row["tool_mask"]).sum() for row in rows))


def to_passes(trainer: Any, batch: dict[str, Any]) -> list[Pass]:
    """A micro-batch in passes of at most the device's batch size; all ranks have as many rows. Collective."""
    args, device, training = trainer.args, trainer.accelerator.device, trainer.model.training
    size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
    rows, divisor = weigh_tokens(batch, trainer.loss_type, trainer.max_completion_length)
    counts = trainer.accelerator.gather(torch.tensor([len(rows)], device=device)).float()
    rows += [dummy_row(rows[0])] * (int(counts.max()) - len(rows))
    num_items = batch["num_items_in_batch"]  # of all ranks, and of all micro-batches from the same rollouts
    if divisor is not None:
        divisor *= trainer.accelerator.num_processes * (args.steps_per_generation if training else 1)
        num_items = torch.tensor(float(divisor), device=device)
    passes = []
    for first in range(0, len(rows), size):
        each = to_pass(rows[first : first + size], trainer.pad_to_multiple_of or 1)
        each["num_items_in_batch"] = num_items
        each.loss_type = trainer.loss_type if divisor is None else "dapo"
        if trainer.loss_type == "sapo":  # a record is the sequence: the mean is over those of all ranks
            each.scale = len(rows[first : first + size]) / counts.mean().item()
        passes.append(each)
    return passes


def dummy_row(row: Row) -> Row:
    """One real token, the prompt's last, and no loss. Zeros elsewhere, as TRL's logprobs of padding are."""
    dummy = {key: torch.zeros_like(value) for key, value in row.items()}
    dummy["prompt_mask"][-1] = 1
    return dummy


def to_pass(rows: list[Row], multiple: int) -> Pass:
    """Rows as one batch, without the columns that are padding in all of them."""
    batch = Pass({key: torch.stack([row[key] for row in rows]) for key in rows[0]})
    for side in ("prompt", "completion"):
        used = max(1, int(batch[f"{side}_mask"].sum(1).max()))
        width = min(-(-used // multiple) * multiple, batch[f"{side}_mask"].shape[1])
        for key in batch:
            if key.startswith("prompt_") and side == "prompt":  # padded on the left
                batch[key] = batch[key][:, -width:]
            elif not key.startswith("prompt_") and side == "completion":
                batch[key] = batch[key][:, :width]
    return batch


@contextmanager
def without_sync(accelerator: Any, model: Any, is_deepspeed: bool) -> Iterator[None]:
    """Gradients only add up, as in a micro-batch that is not the last one of its accumulation."""
    state = accelerator.gradient_state
    if not state.sync_gradients:  # it is none
        yield
        return
    syncs_anyway = is_deepspeed or state.plugin_kwargs.get("sync_each_batch", False)
    state._set_sync_gradients(False)
    try:
        with nullcontext() if syncs_anyway else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(True)
