"""Metrics of TRL's loss over the passes of a step, so that they do not depend on how passes are cut."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mt_grpo.training.passes import Pass
from mt_grpo.training.tensors import EFFECTIVE_SHARE, effective_share, rollout_weights


class PassMetrics:
    """Aggregates the metrics that TRL logs per call of its loss: means over tokens, minima and maxima over passes."""

    def __init__(self):
        self._values: dict[str, list[tuple[float, float]]] = defaultdict(list)  # name -> (value, what it weighs)
        self._rollout_weights: list[torch.Tensor] = []  # of each pass

    @contextmanager
    def of(self, metrics: dict[str, dict[str, list[float]]], mode: str, each: Pass) -> Iterator[None]:
        """Within it TRL's metrics are those of one pass. A pass without a trained token has none.

        Args:
            metrics: TRL's `_metrics`.
            mode: `train` or `eval`.
            each: The pass.
        """
        logged, metrics[mode] = metrics[mode], defaultdict(list)
        try:
            yield
            for name, values in metrics[mode].items():
                self.add(name, values[-1], each)
        finally:
            metrics[mode] = logged

    def add(self, name: str, value: float, each: Pass) -> None:
        """A value of one pass, the same on all ranks."""
        self._values[name].append((value, each.weight))

    def count(self, name: str, total: float, number: float) -> None:
        """A sum of one pass over all ranks, and how many it is of. Logged is the mean over all passes, NaN of none."""
        self._values[name].append((total / number if number else math.nan, number))

    def compare(self, each: Pass, logps: torch.Tensor, trainer: Any) -> None:
        """Do with the loss's own logprobs what TRL does with those of a pass before the step. Collective.

        They are the policy's before the step, since this is the first step of its rollouts. They become what the loss
        clips around (with `old_logps: sampled` only where a sampled one is not known), and the importance ratio and
        its metrics are made from them.

        Args:
            each: The pass.
            logps: (B, C), without gradient.
            trainer: Says which ratio: `old_logps`, `vllm_importance_sampling_mode`, and where it is cut.
        """
        mode, least, most = (
            getattr(trainer, f"vllm_importance_sampling_{key}") for key in ("mode", "clip_min", "clip_max")
        )
        sampled = each["sampling_per_token_logps"]  # (B, C)
        trained = each["completion_mask"] * each["tool_mask"] > 0
        known = trained & ~sampled.isnan()
        difference = torch.where(known, logps - sampled, 0.0)
        own_ratio = difference.exp()
        ratio, counted = importance_ratio(difference, mode, least, most), trained
        if ratio.shape[1] == 1:
            counted = trained.any(1, keepdim=True)
        if trainer.args.old_logps == "sampled":
            each["old_per_token_logps"] = torch.where(sampled.isnan(), logps, sampled)
            each["importance_sampling_ratio"] = torch.ones_like(ratio)
        else:
            each["old_per_token_logps"], each["importance_sampling_ratio"] = logps, ratio
        self._rollout_weights.append(rollout_weights(ratio, trained, each["rollouts"], trainer.accelerator))
        is_cut = (ratio == 0) | (ratio >= (math.inf if most is None else most))
        if least is not None:  # in a `_mask` mode a smaller one is 0
            is_cut |= ratio <= least
        sums = [
            known.sum(),
            difference.abs().sum(),
            (own_ratio * known).sum(),
            trained.sum(),
            (is_cut.expand(trained.shape) * trained).sum(),
            counted.sum(),
            (ratio * counted).sum(),
        ]
        num_known, absolute, own_ratios, num_trained, num_cut, num_ratios, ratios = trainer.accelerator.reduce(
            torch.stack([value.float() for value in sums]), reduction="sum"
        ).tolist()
        ends = [difference.abs().max(), ratio.masked_fill(~counted, math.inf).min(), (ratio * counted).max()]
        ends = trainer.accelerator.gather(torch.stack(ends)[None])  # (ranks, 3)
        if not num_trained:
            return
        apart, ratio_name = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
        for name, value, weight in (
            (f"{apart}/mean", absolute / max(num_known, 1), num_known),
            (f"{apart}/max", ends[:, 0].max().item(), num_known),
            (f"{ratio_name}/min", ends[:, 1].min().item(), num_ratios),
            (f"{ratio_name}/mean", ratios / num_ratios, num_ratios),
            (f"{ratio_name}/max", ends[:, 2].max().item(), num_ratios),
            ("sampling/token_ratio_mean", own_ratios / max(num_known, 1), num_known),
            ("sampling/frac_tokens_ratio_zero_or_clipped", num_cut / num_trained, num_trained),
        ):
            self._values[name].append((value, weight))

    def finish(self, metrics: dict[str, list[float]]) -> None:
        """Log one value per name for all passes since the last call.

        >>> values, first, second = PassMetrics(), Pass(), Pass()
        >>> first.weight, second.weight = 3, 1
        >>> for name in ("entropy", "clip_ratio/low_min"):
        ...     values.add(name, 1.0, first), values.add(name, 5.0, second)
        (None, None)
        (None, None)
        >>> metrics = defaultdict(list)
        >>> values.finish(metrics)
        >>> dict(metrics)
        {'entropy': [2.0], 'clip_ratio/low_min': [1.0]}
        """
        for name, found in self._values.items():
            counted = [(value, weight) for value, weight in found if weight > 0]
            if not counted:  # no token is trained: as TRL has it
                metrics[name].append(found[-1][0])
            elif name.endswith("min"):
                metrics[name].append(min(value for value, _ in counted))
            elif name.endswith("max"):
                metrics[name].append(max(value for value, _ in counted))
            else:
                total = sum(weight for _, weight in counted)
                metrics[name].append(sum(value * weight for value, weight in counted) / total)
        self._values.clear()
        if self._rollout_weights:
            metrics[EFFECTIVE_SHARE].append(effective_share(torch.cat(self._rollout_weights)))
            self._rollout_weights.clear()


def importance_ratio(difference: torch.Tensor, mode: str, least: float | None, most: float | None) -> torch.Tensor:
    """TRL's ratio of the policy before the step to the one that sampled: (B, C) of tokens, (B, 1) of sequences.

    Args:
        difference: (B, C), the policy's logprob minus the sampled one; 0 where it does not count.
        mode: `token_truncate`, `token_mask`, `sequence_truncate`, `sequence_mask`.
        least, most: Where a ratio is cut, or from where it is 0.

    >>> difference = torch.tensor([[0.0, 2.0], [-1.0, 0.5]])
    >>> importance_ratio(difference, "token_truncate", 0.5, 3.0)
    tensor([[1.0000, 3.0000],
            [0.5000, 1.6487]])
    >>> importance_ratio(difference, "sequence_mask", None, 3.0)
    tensor([[0.0000],
            [0.6065]])
    """
    ratio = (difference.sum(1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        return ratio if least is None and most is None else ratio.clamp(min=least, max=most)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if least is not None:
        outside |= ratio < least
    if most is not None:
        outside |= ratio > most
    return ratio.masked_fill(outside, 0.0)
