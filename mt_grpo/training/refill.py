"""Replaces groups without signal by groups of further prompts (`refill_groups`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from mt_grpo.training.batch import Batch
from mt_grpo.training.reward_numbers import check_advantages

logger = logging.getLogger(__name__)


def refill(trainer: Any, batch: Batch, without_signal: Callable[[Batch], torch.Tensor]) -> None:
    """Replace groups of a batch without signal, and score the new ones, until all have signal. Collective.

    At most `refill_groups` batches' worth of groups are sampled in addition; a group that has no signal then is
    trained as it is. Dropped conversations are in the log of rollouts, with the mode `dropped`, in the metrics of
    conversations and in the count of tokens. What a reward function logs with `log_metric` is a mean over its calls,
    of which each round is one.

    Args:
        trainer: The trainer. Its `in_flight` has further prompts, and its `_score` scores.
        batch: A scored batch. Its rows, rollouts and rewards change.
        without_signal: Returns which groups are to be replaced, (N/G,) bool, the same on all ranks.
    """
    check(trainer, batch)
    size = len(batch.rewards.outcome) // batch.group_size
    left, dropped, seconds = trainer.args.refill_groups * size, [], 0.0
    while left and (slots := without_signal(batch).nonzero().flatten().tolist()[:left]):
        chosen = torch.zeros(size, dtype=torch.bool)
        chosen[slots] = True
        fresh = chosen.repeat_interleave(batch.group_size)  # (N,)
        own = batch.own(fresh).nonzero().flatten().tolist()
        dropped.append(batch.rewards.outcome[fresh])
        trainer._rollout_log.add_dropped(batch, own, trainer.state.global_step)
        trainer.env.close([batch.rollouts[i] for i in own])
        rows, rollouts, metrics = trainer.in_flight.refill(batch.rows, slots)
        batch.replace(own, rows, rollouts)
        trainer._score(batch, fresh)
        check(trainer, batch)
        left, seconds = left - len(slots), seconds + metrics["rollout/wait_seconds"]
        for name, value in metrics.items():  # `rollout/*` are of all that the step waited for
            trainer._metrics["train"][name][-1] += value
    still = without_signal(batch).float().mean().item()
    outcome = torch.cat([*dropped, batch.rewards.outcome])
    num_dropped, prompts = sum(map(len, dropped)) // batch.group_size, trainer.in_flight.prompts
    trainer._log_metrics(
        {
            "refill/groups_dropped": num_dropped / (num_dropped + size),
            "refill/rounds": batch.num_rounds,
            "refill/seconds": seconds,
            "refill/outcome_of_all_sampled": outcome.nanmean().item(),
            "refill/data_passes": prompts.epoch + prompts.place / len(prompts.order),
        }
    )
    if still == 1.0 and not trainer.in_flight.told_in_vain:
        trainer.in_flight.told_in_vain = True
        if trainer.accelerator.is_main_process:
            logger.warning(
                f"Step {trainer.state.global_step}: refill_groups: none of {num_dropped + size} groups has a signal "
                f"(mean weighted outcome {outcome.nanmean().item():.3g}). Training on this batch changes nothing, and "
                "later batches may be the same. Look at the rollouts: are all rewards equal, or all tasks too hard or "
                "already solved? This is logged once."
            )


def check(trainer: Any, batch: Batch) -> None:
    """Raise `RunError` for rewards that cannot be compared, which must not pass for groups without signal."""
    advantages = trainer._advantages(batch.rewards, trainer.args.scale_rewards)
    check_advantages(batch.rewards, advantages, trainer.state.global_step, trainer.turn_advantage_coef)
