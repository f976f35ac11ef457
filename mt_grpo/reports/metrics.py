"""Metrics of conversations and of credit."""

from __future__ import annotations

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


def conversation_columns(rollouts: list[Rollout]) -> torch.Tensor:
    """The numbers that `conversation_metrics` reads, (N, 16), of the rollouts of all ranks. Collective."""
    reasons = list(StopReason)
    columns = []
    for r in rollouts:
        errors = [result.error for turn in r.turns for result in turn.results if result.error is not None]
        sampled = sum(len(t.token_ids) for t in r.turns)
        columns.append(
            [
                len(r.prompt_ids),
                sampled,
                sampled + sum(len(t.observation_ids) for t in r.turns),
                len(r.turns),
                reasons.index(r.stop_reason),
                sum(len(t.calls) for t in r.turns),
                len(errors),
                errors.count("timeout"),
                errors.count("call"),
                sum(t.tool_seconds for t in r.turns),
                len(trained_records(r)),
                sum(t.open_thinking for t in r.turns),
                *tokens_read_again(r),
                sum(len(t.results) for t in r.turns),
                is_cut_off(r),
            ]
        )
    return torch.tensor(gather_object(columns), dtype=torch.float32)


def conversation_metrics(columns: torch.Tensor) -> tuple[dict[str, float], int]:
    """(metrics of conversations, number of their prompt tokens and sampled tokens), of `conversation_columns`."""
    reasons = list(StopReason)
    prompt, trained, total, num_turns, stop, calls, failed, timeouts, malformed, seconds, records = columns.T[:11]
    unclosed, again, read, results, cut_off = columns.T[11:]
    truncated = cut_off > 0
    lost = torch.isin(stop, torch.tensor([float(reasons.index(each)) for each in FAILURES]))
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
    """Means of rewards over the rollouts that have a score, and the share of all rollouts that each mean is of.

    `logged` is the reward of each of the functions `names`, (N, F), and `reward` is what is trained, (N,): NaN for
    what a function did not give, and for rollouts without a score.
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

    TRL logs the mean of its batches, of which the last one is often smaller. Rewards and conversations are counted
    again here, over all rollouts; other metrics of batches are weighted by their number of rollouts.
    """

    def __init__(self):
        self.columns: list[torch.Tensor] = []  # of each batch, (N, 16)
        self.rewards: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each batch: (N, F) and (N,)

    def add(self, metrics: dict[str, list[float]], batch: Batch, total: int | None) -> None:
        """Add a batch, whose metrics TRL has added to `metrics`. `total`: the rollouts of the evaluation, if known.

        With several ranks accelerate fills the last batch up with rows of the first one, which are left out.
        """
        if len(metrics["reward"]) == 1:  # the first batch of an evaluation, which begins without metrics
            self.columns, self.rewards = [], []
        real = None if total is None else max(total - sum(map(len, self.columns)), 0)
        self.columns.append(batch.facts[:real])
        self.rewards.append((batch.logged[:real].cpu(), batch.reward[:real]))

    def finish(self, metrics: dict[str, list[float]], names: list[str]) -> None:
        """Replace the values of all batches by one. Metrics that have another number of values stay as they are."""
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

    Staleness is the number of weight changes between the weights that sampled a turn, the oldest ones if there were
    several, and `version`. `stale` counts the turns since the last log, which empties the trainer's `metrics`.
    """
    if "rollout/staleness" not in metrics:
        stale.clear()
    turns = [(versions_of(turn) or [r.policy_version])[0] for r in rollouts for turn in r.turns]
    for of_rank in gather_object([Counter(version - sampled for sampled in turns)]):
        stale.update(of_rank)
    values = sorted(stale.elements()) or [0]
    metrics |= {
        "rollout/staleness": [sum(values) / len(values)],
        "rollout/staleness_p50": [values[math.ceil(len(values) * 0.5) - 1]],
        "rollout/staleness_p99": [values[math.ceil(len(values) * 0.99) - 1]],
        "rollout/staleness_max": [values[-1]],
    }


def credit_metrics(output: dict[str, Any], batch: Batch, accelerator: Any) -> dict[str, float]:
    """Metrics of the advantages that the loss uses, from TRL's batch of the M records of this rank. Collective."""
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
    """The mean advantage of each rollout's trained tokens, (B,), over all its records, from TRL's batch of M rows."""
    loss_mask = output["completion_mask"] * output["tool_mask"]  # (M, C)
    sums = torch.stack([(output["advantages"] * loss_mask).sum(1), loss_mask.sum(1).float()])  # (2, M)
    sums = sums.new_zeros(2, len(batch.rows)).index_add(1, torch.tensor(batch.owners, device=sums.device), sums)
    return sums[0] / sums[1].clamp(min=1)
