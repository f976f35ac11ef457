"""Metrics of conversations and of credit."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from typing import Any

import torch
from accelerate.utils import gather_object

from mt_grpo.conversation.tools.threads import HUNG
from mt_grpo.generation.versions import versions_of
from mt_grpo.rollout import FAILURES, Rollout, StopReason
from mt_grpo.training.batch import Batch
from mt_grpo.training.records import is_cut_off, tokens_read_again, trained_records
from mt_grpo.training.tensors import nanstd


def conversation_columns(rollouts: list[Rollout], accelerator: Any, uneven: bool = False) -> torch.Tensor:
    """The numbers that `conversation_metrics` reads, (N, 16), over all ranks. Collective.

    One tensor is gathered for all metrics, so that the names of the metrics are the same on all ranks. `uneven`: ranks
    may have different numbers of rollouts.
    """
    reasons = list(StopReason)
    columns = torch.tensor(
        [
            [
                len(r.prompt_ids),
                sum(len(t.token_ids) for t in r.turns),
                sum(len(t.token_ids) + len(t.observation_ids) for t in r.turns),
                len(r.turns),
                reasons.index(r.stop_reason),
                sum(len(t.calls) for t in r.turns),
                *num_errors(r),
                sum(t.tool_seconds for t in r.turns),
                len(trained_records(r)),
                sum(t.open_thinking for t in r.turns),
                *tokens_read_again(r),
                sum(len(t.results) for t in r.turns),
                is_cut_off(r),
            ]
            for r in rollouts
        ],
        device=accelerator.device,
        dtype=torch.float32,
    )
    return torch.tensor(gather_object(columns.tolist())) if uneven else accelerator.gather(columns)


def conversation_metrics(columns: torch.Tensor) -> tuple[dict[str, float], int]:
    """(metrics of conversations, number of their prompt tokens and sampled tokens), of `conversation_columns`."""
    reasons = list(StopReason)
    prompt, trained, total, num_turns, stop, calls, failed, timeouts, malformed, seconds, records = columns.T[:11]
    unclosed, again, read, results, cut_off = columns.T[11:]
    truncated = cut_off > 0
    lost = torch.isin(stop, torch.tensor([float(reasons.index(each)) for each in FAILURES], device=stop.device))
    ended = trained[~truncated] if (~truncated).any() else torch.zeros(1)
    metrics = {}
    for suffix, values in (("", trained), ("terminated_", ended)):
        metrics[f"completions/mean_{suffix}length"] = values.mean().item()
        metrics[f"completions/min_{suffix}length"] = values.min().item()
        metrics[f"completions/max_{suffix}length"] = values.max().item()
    # Not the calls of a last turn, which nothing runs any more. Without any there is no share of calls, as where a
    # scheduler runs them itself.
    attempted = results.sum() if results.sum() else torch.tensor(math.nan)
    metrics |= {
        "completions/clipped_ratio": truncated.float().mean().item(),
        "completions/mean_total_length": total.mean().item(),
        "turns/mean": num_turns.mean().item(),
        "turns/max": num_turns.max().item(),
        "turns/frac_failed_behind": (lost & (num_turns > 0)).float().mean().item(),
        "turns/unclosed_thinking": (unclosed.sum() / num_turns.sum().clamp(min=1)).item(),
        "records/mean": records.mean().item(),
        "records/tokens_read_again": (again.sum() / read.sum().clamp(min=1)).item(),
        "tools/call_frequency": calls.mean().item(),
        "tools/failure_frequency": (failed.sum() / attempted).item(),
        "tools/malformed_frequency": (malformed.sum() / attempted).item(),
        "tools/timeout_frequency": (timeouts.sum() / attempted).item(),
        "tools/mean_seconds": (seconds.sum() / attempted).item(),
        "tools/hung_threads": sum(t.name.startswith(HUNG) for t in threading.enumerate()),
        **{f"stop/{reason}": (stop == i).float().mean().item() for i, reason in enumerate(reasons)},
    }
    return metrics, int(prompt.sum() + trained.sum())


def reward_metrics(logged: torch.Tensor, reward: torch.Tensor, names: list[str]) -> dict[str, float]:
    """Means of rewards over the rollouts that have a score, and the share of the rollouts that each mean is of.

    Args:
        logged: (N, F), of each function, NaN where it gave None.
        reward: (N,), what is trained, NaN for rollouts without a score (`Batch.reward`).
        names: Of the F functions.

    >>> nan = float("nan")
    >>> logged = torch.tensor([[1.0, nan], [3.0, 0.5], [8.0, nan], [8.0, 8.0]])  # the last two have no outcome
    >>> reward_metrics(logged, torch.tensor([1.0, 3.5, nan, nan]), ["a", "b"])
    ... # doctest: +NORMALIZE_WHITESPACE
    {'rewards/a/mean': 2.0, 'rewards/a/std': 1.4142135381698608, 'rewards/a/frac_scored': 0.5,
     'rewards/b/mean': 0.5, 'rewards/b/std': nan, 'rewards/b/frac_scored': 0.25,
     'reward': 2.25, 'reward_std': 1.7677669525146484, 'frac_reward_scored': 0.5}
    """
    metrics, scored = {}, ~reward.isnan()
    for name, column in zip(names, logged.T):
        column = column.masked_fill(~scored, math.nan)
        metrics[f"rewards/{name}/mean"] = column.nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(column, 0).item()
        metrics[f"rewards/{name}/frac_scored"] = (~column.isnan()).float().mean().item()
    return metrics | {
        "reward": reward.nanmean().item(),
        "reward_std": nanstd(reward, 0).item(),
        "frac_reward_scored": scored.float().mean().item(),
    }


def log_rewards(metrics: dict[str, list[float]], batch: Batch, names: list[str]) -> None:
    """Log `reward_metrics` in place of TRL's, which count numbers of weight 0 and rollouts without a score."""
    for name, value in reward_metrics(batch.logged, batch.reward, names).items():
        metrics[name] = metrics[name][: None if "frac" in name else -1] + [value]


class EvaluationMetrics:
    """The metrics of an evaluation as of all its rollouts at once.

    TRL logs the mean of what its batches gave, and the last batch is often smaller: 4 rollouts with the rewards 1, 0,
    0 and 1 in batches of 3 and 1 give 0.667 in place of 0.5. Rewards and conversations are counted anew here, over all
    rollouts; other metrics of batches are weighted by their number of rollouts.
    """

    def __init__(self):
        self.columns: list[torch.Tensor] = []  # of each batch, (N, 16)
        self.rewards: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each batch: (N, F) and (N,)

    def add(self, metrics: dict[str, list[float]], batch: Batch, total: int | None) -> None:
        """Add a batch, whose metrics TRL has added to `metrics`.

        With several ranks accelerate fills the last batch up with rows of the first one. They are left out here.

        Args:
            metrics: The trainer's, of evaluation.
            batch: With its `facts`, `logged` and rewards.
            total: The number of rollouts of the whole evaluation; None if it is not known.
        """
        if len(metrics["reward"]) == 1:  # the first batch of an evaluation, which begins without metrics
            self.columns, self.rewards = [], []
        real = None if total is None else max(total - sum(map(len, self.columns)), 0)
        self.columns.append(batch.facts[:real].cpu())
        self.rewards.append((batch.logged[:real].cpu(), batch.reward[:real]))

    def finish(self, metrics: dict[str, list[float]], names: list[str]) -> None:
        """Replace the values of all batches by one value of the whole evaluation.

        Args:
            metrics: The trainer's, a value per batch. Metrics that have another number of values stay as they are.
            names: Of the F reward functions.

        >>> whole, metrics = EvaluationMetrics(), {"reward": [2 / 3, 1.0], "entropy": [1.0, 2.0], "x/max": [3.0, 1.0]}
        >>> whole.rewards = [(x[:, None], x) for x in (torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0]))]
        >>> whole.columns = [torch.zeros(3, 16), torch.zeros(1, 16)]
        >>> whole.finish(metrics, ["match"])
        >>> {name: metrics[name] for name in ("reward", "rewards/match/mean", "entropy", "x/max")}
        {'reward': [0.75], 'rewards/match/mean': [0.75], 'entropy': [1.25], 'x/max': [3.0]}
        """
        sizes = [len(batch) for batch in self.columns]
        if not sizes or len(metrics.get("reward", ())) != len(sizes):
            return
        for name, values in metrics.items():
            there = [(value, size) for value, size in zip(values, sizes) if not math.isnan(value)]
            if len(values) != len(sizes) or name == "num_tokens" or name.startswith("rollout/") or not there:
                continue
            if name.endswith(("/max", "_max", "/min", "_min")):
                metrics[name] = [(max if name.endswith("max") else min)(value for value, _ in there)]
            else:
                metrics[name] = [sum(value * size for value, size in there) / sum(size for _, size in there)]
        of_all = conversation_metrics(torch.cat(self.columns))[0]
        of_all |= reward_metrics(*map(torch.cat, zip(*self.rewards)), names)
        metrics |= {name: [value] for name, value in of_all.items()}
        self.columns, self.rewards = [], []


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
        "rollout/staleness_p50": [quantile(50)],
        "rollout/staleness_p99": [quantile(99)],
        "rollout/staleness_max": [max(counts)],
    }


def num_errors(rollout: Rollout) -> tuple[int, int, int]:
    """How many of a rollout's calls failed, ran out of time, and could not be run."""
    errors = [result.error for turn in rollout.turns for result in turn.results if result.error is not None]
    return len(errors), errors.count("timeout"), errors.count("call")


def credit_metrics(output: dict[str, Any], batch: Batch, accelerator: Any) -> dict[str, float]:
    """Metrics of the advantages that the loss uses. Collective.

    Args:
        output: TRL's batch of this rank's M records, with advantages (M, C).
        batch: Their rollouts.
        accelerator: Of the trainer.
    """
    count, owners = len(batch.rows), torch.tensor(batch.owners)
    loss_mask = output["completion_mask"] * output["tool_mask"]
    # INVARIANT: what is called a signal is an advantage that a token is trained with.
    largest = (output["advantages"].abs() * loss_mask).amax(1)  # (M,)
    largest, trained = (
        x.new_zeros(count).scatter_reduce(0, owners.to(x.device), x, "amax")
        for x in (largest, loss_mask.amax(1).float())
    )
    no_signal = (accelerator.gather(largest).view(-1, batch.group_size) < 1e-8).all(1)
    sums = [(output["advantages"].abs() * loss_mask).sum(), loss_mask.sum()]
    sums = accelerator.reduce(torch.stack([s.float() for s in sums]), reduction="sum").tolist()
    return {
        "credit/frac_groups_without_signal": no_signal.float().mean().item(),
        "credit/frac_rollouts_trained": accelerator.gather(trained).mean().item(),
        "credit/mean_abs_advantage": sums[0] / sums[1] if sums[1] else math.nan,
    }


def mean_per_rollout(output: dict[str, Any], batch: Batch) -> torch.Tensor:
    """The mean advantage of each rollout's trained tokens, (B,), over all its records.

    Args:
        output: TRL's batch of M rows, with advantages (M, C).
        batch: Their rollouts.
    """
    loss_mask = output["completion_mask"] * output["tool_mask"]  # (M, C)
    sums = torch.stack([(output["advantages"] * loss_mask).sum(1), loss_mask.sum(1).float()])  # (2, M)
    sums = sums.new_zeros(2, len(batch.rows)).index_add(1, torch.tensor(batch.owners, device=sums.device), sums)
    return sums[0] / sums[1].clamp(min=1)
