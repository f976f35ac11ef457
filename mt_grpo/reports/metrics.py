"""Metrics of conversations and of credit."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import Any

import torch
from accelerate.utils import gather_object

from mt_grpo.conversation.tools.running import HUNG
from mt_grpo.generation.samples import versions_of
from mt_grpo.rollout import FAILURES, Rollout, StopReason
from mt_grpo.training.batch import Batch, is_cut_off, nanstd, trained_records


def conversation_columns(rollouts: list[Rollout]) -> torch.Tensor:
    """The numbers that `conversation_metrics` reads, (N, 14), of the rollouts of all ranks. Collective."""
    reasons, columns = list(StopReason), []
    for r in rollouts:
        results = [result for turn in r.turns for result in turn.results]
        errors = [result.error for result in results if result.error is not None]
        sampled, read = sum(len(t.token_ids) for t in r.turns), sum(len(t.observation_ids) for t in r.turns)
        sizes = [len(r.prompt_ids), sampled, sampled + read, len(r.turns), reasons.index(r.stop_reason)]
        calls = [sum(len(t.calls) for t in r.turns), len(errors), errors.count("timeout"), errors.count("call")]
        times = [sum(t.tool_seconds for t in r.turns), len(trained_records(r)), sum(t.open_thinking for t in r.turns)]
        columns.append([*sizes, *calls, *times, len(results), is_cut_off(r)])
    return torch.tensor(gather_object(columns), dtype=torch.float32)


def conversation_metrics(columns: torch.Tensor) -> tuple[dict[str, float], int]:
    """(metrics of conversations, number of their prompt tokens and sampled tokens), of `conversation_columns`."""
    prompt, sampled, total, num_turns, stop, calls, failed, timeouts, malformed = columns.T[:9]
    seconds, records, unclosed, results, cut_off = columns.T[9:]
    # Not the calls of a last turn, which nothing runs any more. Without any there is no share of calls, as where a
    # scheduler runs them itself.
    attempted = results.sum() if results.sum() else math.nan
    stops = {reason: stop == i for i, reason in enumerate(StopReason)}
    lost = sum(stops[reason] for reason in FAILURES) > 0
    metrics = {
        "completions/clipped_ratio": (cut_off > 0).float().mean(),
        "completions/mean_total_length": total.mean(),
        "turns/mean": num_turns.mean(),
        "turns/max": num_turns.max(),
        "turns/frac_failed_behind": (lost & (num_turns > 0)).float().mean(),
        "turns/unclosed_thinking": unclosed.sum() / num_turns.sum().clamp(min=1),
        "records/mean": records.mean(),
        "tools/call_frequency": calls.mean(),
        "tools/failure_frequency": failed.sum() / attempted,
        "tools/malformed_frequency": malformed.sum() / attempted,
        "tools/timeout_frequency": timeouts.sum() / attempted,
        "tools/mean_seconds": seconds.sum() / attempted,
        **{f"stop/{reason}": ends.float().mean() for reason, ends in stops.items()},
    }
    ended = sampled[cut_off == 0] if (cut_off == 0).any() else torch.zeros(1)
    for suffix, lengths in (("", sampled), ("terminated_", ended)):
        for name in ("mean", "min", "max"):
            metrics[f"completions/{name}_{suffix}length"] = getattr(lengths, name)()
    metrics = {name: value.item() for name, value in metrics.items()}
    metrics["tools/hung_threads"] = sum(t.name.startswith(HUNG) for t in threading.enumerate())
    return metrics, int(prompt.sum() + sampled.sum())


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
    for name, value in reward_metrics(batch.logged.cpu(), batch.reward, names).items():
        metrics[name] = metrics[name][: None if name.rpartition("/")[2].startswith("frac") else -1] + [value]


class EvaluationMetrics:
    """The metrics of an evaluation as of all its rollouts at once.

    TRL logs the mean of its batches, of which the last one is often smaller. Rewards and conversations are counted
    again here, over all rollouts; other metrics of batches are weighted by their number of rollouts.
    """

    def __init__(self):
        self.columns: list[torch.Tensor] = []  # of each batch, (N, 14)
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
        of_all = reward_metrics(*map(torch.cat, zip(*self.rewards)), names)
        of_all |= conversation_metrics(torch.cat(self.columns))[0]
        metrics.update({name: [value] for name, value in of_all.items()})


def staleness_metrics(rollouts: list[Rollout], version: int, metrics: dict[str, list[float]], stale: Counter) -> None:
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
    metrics["rollout/staleness"] = [sum(values) / len(values)]
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        metrics[f"rollout/staleness_{name}"] = [values[math.ceil(len(values) * share) - 1]]


def credit_metrics(output: dict[str, Any], batch: Batch, accelerator: Any) -> dict[str, float]:
    """Metrics of the advantages that the loss uses, from TRL's batch of the M records of this rank. Collective."""
    count, owners = len(batch.rows), torch.tensor(batch.owners)
    loss_mask = output["completion_mask"] * output["tool_mask"]
    # INVARIANT: what is called a signal is an advantage that a token is trained with.
    moves = output["advantages"].abs() * loss_mask  # (M, C)
    largest, trained = (
        x.new_zeros(count).scatter_reduce(0, owners.to(x.device), x, "amax")
        for x in (moves.amax(1), loss_mask.amax(1).float())
    )
    no_signal = (accelerator.gather(largest).view(-1, batch.group_size) < 1e-8).all(1)
    sums = accelerator.reduce(torch.stack([moves.sum().float(), loss_mask.sum().float()]), reduction="sum").tolist()
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
