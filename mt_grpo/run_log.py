"""Metrics of conversations and of credit."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from typing import Any

import torch
from accelerate.utils import gather_object

from mt_grpo.records import trained_records
from mt_grpo.rollout import Rollout, StopReason
from mt_grpo.tool_threads import HUNG
from mt_grpo.versions import versions_of

logger = logging.getLogger(__name__)


def conversation_metrics(rollouts: list[Rollout], accelerator: Any) -> tuple[dict[str, float], int]:
    """(metrics of the conversations, number of prompt tokens and sampled tokens), over all ranks. Collective.

    One tensor is gathered for all metrics, so that the names of the metrics are the same on all ranks.
    """
    reasons = list(StopReason)
    columns = torch.tensor(
        [
            [
                len(r.prompt_ids), sum(len(t.token_ids) for t in r.turns),
                sum(len(t.token_ids) + len(t.observation_ids) for t in r.turns), len(r.turns),
                reasons.index(r.stop_reason),
                sum(len(t.calls) for t in r.turns), *num_errors(r),
                sum(t.tool_seconds for t in r.turns), len(trained_records(r)), sum(t.open_thinking for t in r.turns),
            ]
            for r in rollouts
        ],
        device=accelerator.device, dtype=torch.float32,
    )  # fmt: skip
    columns = accelerator.gather(columns)  # (N, 12)
    prompt, trained, total, num_turns, stop, calls, failed, timeouts, malformed, seconds, records, unclosed = columns.T
    truncated = (stop == reasons.index(StopReason.MAX_TOKENS)) | (stop == reasons.index(StopReason.CONTEXT_LENGTH))
    ended = trained[~truncated] if (~truncated).any() else torch.zeros(1)
    metrics = {}
    for suffix, values in (("", trained), ("terminated_", ended)):
        metrics[f"completions/mean_{suffix}length"] = values.mean().item()
        metrics[f"completions/min_{suffix}length"] = values.min().item()
        metrics[f"completions/max_{suffix}length"] = values.max().item()
    attempted = calls.sum().clamp(min=1)
    metrics |= {
        "completions/clipped_ratio": truncated.float().mean().item(),
        "completions/mean_total_length": total.mean().item(),
        "turns/mean": num_turns.mean().item(),
        "turns/max": num_turns.max().item(),
        "turns/unclosed_thinking": (unclosed.sum() / num_turns.sum().clamp(min=1)).item(),
        "records/mean": records.mean().item(),
        "tools/call_frequency": calls.mean().item(),
        "tools/failure_frequency": (failed.sum() / attempted).item(),
        "tools/malformed_frequency": (malformed.sum() / attempted).item(),
        "tools/timeout_frequency": (timeouts.sum() / attempted).item(),
        "tools/mean_seconds": (seconds.sum() / attempted).item(),
        "tools/hung_threads": sum(t.name.startswith(HUNG) for t in threading.enumerate()),
        **{f"stop/{reason}": (stop == i).float().mean().item() for i, reason in enumerate(reasons)},
    }
    return metrics, int(prompt.sum() + trained.sum())


def staleness_metrics(
    rollouts: list[Rollout], version: int, metrics: dict[str, list[float]], stale: Counter[int]
) -> None:
    """Set the metrics of staleness: of all turns since the last log, over all ranks. Collective.

    Staleness is how many weight changes lie between the weights that sampled a turn and `version`. A turn during
    which weights were pushed counts from the older ones. TRL logs the mean of a metric's values: each has only one.

    Args:
        rollouts: Of this rank, in this batch.
        version: The weight changes before the weights that are trained.
        metrics: Of the trainer. A log empties them.
        stale: How many turns had which staleness, over all ranks. This batch is added.

    >>> from mt_grpo.rollout import Generation, Turn
    >>> def turn(*versions):
    ...     return Turn([1], [0.0], "", "stop", generations=[Generation([1], [0.0], "stop", None, versions)])
    >>> metrics, stale = {}, Counter()
    >>> staleness_metrics([Rollout([], [], turns=[turn(5, 5), turn(5, 6), turn(7, 7)])], 7, metrics, stale)
    >>> metrics["rollout/staleness_max"], stale
    ([2], Counter({2: 2, 0: 1}))
    """
    if "rollout/staleness" not in metrics:
        stale.clear()
    turns = [(versions_of(turn) or [r.policy_version])[0] for r in rollouts for turn in r.turns]
    for of_rank in gather_object([Counter(version - sampled for sampled in turns)]):
        stale.update(of_rank)
    counts = stale or Counter([0])

    def quantile(percent: int) -> int:
        """The smallest staleness that `percent` of 100 turns do not exceed."""
        below = itertools.accumulate(count for _, count in sorted(counts.items()))
        return next(value for value, n in zip(sorted(counts), below) if 100 * n >= percent * counts.total())

    metrics |= {
        "rollout/staleness": [sum(value * count for value, count in counts.items()) / counts.total()],
        "rollout/staleness_p50": [quantile(50)], "rollout/staleness_p99": [quantile(99)],
        "rollout/staleness_max": [max(counts)],
    }  # fmt: skip


def num_errors(rollout: Rollout) -> tuple[int, int, int]:
    """How many of a rollout's calls failed, ran out of time, and could not be run."""
    errors = [result.error for turn in rollout.turns for result in turn.results if result.error is not None]
    return len(errors), errors.count("timeout"), errors.count("call")


def credit_metrics(
    output: dict[str, Any], advantages: torch.Tensor, group_size: int, accelerator: Any, ratio_limit: float
) -> dict[str, float]:
    """Metrics of the advantages and importance ratios that the loss uses. Collective.

    Args:
        output: TRL's batch of this rank's M records, with advantages (M, C) and, with vLLM, importance ratios.
        advantages: Of every turn of the whole batch, (N, K).
        group_size: G.
        accelerator: Of the trainer.
        ratio_limit: Where importance ratios are cut.
    """
    no_signal = (advantages.view(-1, group_size * advantages.shape[1]).abs() < 1e-8).all(1)
    loss_mask = output["completion_mask"] * output["tool_mask"]
    sums = [(output["advantages"].abs() * loss_mask).sum(), loss_mask.sum()]
    if "importance_sampling_ratio" in output:
        ratio = output["importance_sampling_ratio"].expand(loss_mask.shape)
        sums.append((((ratio == 0) | (ratio >= ratio_limit)) * loss_mask).sum())
    sums = accelerator.reduce(torch.stack([s.float() for s in sums]), reduction="sum").tolist()
    metrics = {
        "credit/frac_groups_without_signal": no_signal.float().mean().item(),
        "credit/mean_abs_advantage": sums[0] / max(sums[1], 1),
    }
    if len(sums) > 2:
        metrics["sampling/frac_tokens_ratio_zero_or_clipped"] = sums[2] / max(sums[1], 1)
    return metrics


def mean_per_rollout(output: dict[str, Any], owners: list[int], count: int) -> torch.Tensor:
    """The mean advantage of each rollout's trained tokens, (B,), over all its records.

    Args:
        output: TRL's batch of M rows, with advantages (M, C).
        owners: The rollout of each row.
        count: B.
    """
    loss_mask = output["completion_mask"] * output["tool_mask"]  # (M, C)
    sums = torch.stack([(output["advantages"] * loss_mask).sum(1), loss_mask.sum(1).float()])  # (2, M)
    sums = sums.new_zeros(2, count).index_add(1, torch.tensor(owners, device=sums.device), sums)
    return sums[0] / sums[1].clamp(min=1)
