"""Cross-entropy on what was read behind the policy's turns, as a further term of the loss (`observation_loss_coef`).

A model that can predict what a tool answers knows something of the tool. The term's tokens are not the policy's: they
have a mask of their own, no advantage, and no part in TRL's loss.
"""

from __future__ import annotations

from typing import Any

import torch

from mt_grpo.base.pictures import is_picture
from mt_grpo.training.batch import Batch
from mt_grpo.training.passes import Pass
from mt_grpo.training.records import NUM_OBSERVED, OBSERVED
from mt_grpo.training.tensors import pad_rows


def observed_tokens(batch: Batch, width: int, args: Any, accelerator: Any) -> dict[str, torch.Tensor]:
    """The columns that TRL's batch of M rows gets for this term. Collective.

    Args:
        batch: Its `records`.
        width: C, as TRL padded it.
        args: With `mask_truncated_completions` what was cut off is not learned, either.
        accelerator: Of the trainer.
    """
    masks = [  # a picture has no words to learn
        [one and int(not is_picture(token)) for one, token in zip(record.observation_mask, record.completion_ids)]
        for record in batch.records
    ]
    if args.mask_truncated_completions:
        masks = batch.zeros_where_truncated(masks)
    mask = pad_rows(masks, width, 0.0).to(accelerator.device)
    return {OBSERVED: mask, NUM_OBSERVED: accelerator.reduce(mask.sum())}


def only_sampled(inputs: dict[str, Any], logps: torch.Tensor) -> torch.Tensor:
    """Logprobs (M, C) of shared rows as TRL's loss gets them: 0 where it has none of the policy before the step.

    There these are 0, and the reference's, too. Their ratio would overflow at an unlikely observation, and infinity
    times a mask of 0 is NaN.
    """
    return torch.where(inputs["tool_mask"] > 0, logps, 0.0)


def observation_loss(trainer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """`observation_loss_coef` times the mean over an optimizer step's observations of -log p(token | before it).

    Collective. The mean is over the tokens of all ranks, however they are cut into micro-batches and passes: the sum
    over these calls is the term, with each rank's gradient averaged over ranks as TRL's is. Where a batch of rollouts
    is several optimizer steps, each divides by an equal share of the batch's tokens, as TRL's `dapo` does. Logprobs
    are at the run's temperature, as the policy's.

    Args:
        trainer: Of the run.
        inputs: A micro-batch or a pass of it, with the columns of `observed_tokens`. `layout.logps` are its own.
    """
    mask, accelerator = inputs[OBSERVED], trainer.accelerator
    logps, trainer.layout.logps = trainer.layout.logps, None
    if trainer.model.training and not logps.requires_grad:
        raise RuntimeError("observation_loss_coef: the loss's last logprobs have no gradient, expected the policy's.")
    total = -(torch.where(mask > 0, logps, 0.0)).sum()
    share = accelerator.num_processes / inputs[NUM_OBSERVED].clamp(min=1.0)
    if trainer.model.training:  # the batch of rollouts may be several optimizer steps
        share = share * trainer.args.steps_per_generation / trainer.current_gradient_accumulation_steps
    found = accelerator.reduce(torch.stack([total.detach().float(), mask.sum()]))
    if isinstance(inputs, Pass):
        trainer.layout.metrics.count("observation/loss", *found.tolist())
    else:
        trainer._log_metrics({"observation/loss": (found[0] / found[1]).item()})  # NaN of none, which TRL leaves out
    return trainer.args.observation_loss_coef * share * total
