"""The importance ratio of the loss, and its metrics, pooled over the passes of all steps since the last log."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object

from mt_grpo.training.batch import NAN
from mt_grpo.training.passes import Pass

EFFECTIVE_SHARE = "sampling/effective_share"  # the metric
TRLS = ("sampling/sampling_logp_difference", "sampling/importance_sampling_ratio")  # which TRL logs, too
FIRST_TURNS, LAST_TURNS = "sampling/logp_difference_first_turns", "sampling/logp_difference_last_turns"
MOST_TURNS, MOST_DEPTH = 64, 2**24  # what is beyond counts with the last of them
Means = dict[str, tuple[float, float]]  # name -> (mean, minimum or maximum, the number of tokens that it is of)


class DepthMetrics:
    """Means over trained tokens by turn, and by the number of tokens before a token, of all steps since the last log.

    `lines` has those of the last log: `by_turn/entropy` is a list with the mean of each turn, and item j of
    `by_depth/entropy` the mean of the tokens with 2^j to 2^(j+1) - 1 tokens before them. None: there are none.
    """

    def __init__(self):
        self.lines: dict[str, list[float | None]] = {}
        self._sums: dict[str, torch.Tensor] = {}  # name -> (2, buckets): numbers of tokens, and sums of a value

    def add(self, each: dict[str, Any], counted: torch.Tensor, **values: torch.Tensor) -> None:
        """Count values (B, C) of the `counted` tokens of a batch, or of a pass, that says which turn they are of."""
        if "turn_ids" not in each:
            return
        before = each["prompt_mask"].sum(1, keepdim=True) + torch.arange(counted.shape[1], device=counted.device)
        turns = each["turn_ids"].clamp(0, MOST_TURNS - 1)[counted].cpu()
        depths = before.clamp(1, MOST_DEPTH)[counted].cpu().double().log2().long()
        for name, value in values.items():
            both = torch.stack([torch.ones(len(turns)), value[counted].float().cpu()]).double()
            for axis, buckets, size in (("turn", turns, MOST_TURNS), ("depth", depths, MOST_DEPTH.bit_length())):
                sums = self._sums.setdefault(f"by_{axis}/{name}", torch.zeros(2, size, dtype=torch.float64))
                sums.index_add_(1, buckets, both)

    def metrics(self, accelerator: Any) -> dict[str, float]:
        """The difference of logprobs in the first and in the last quarter of the turns. Sets `lines`. Collective."""
        found, self.lines = {}, {}
        of_ranks = gather_object([self._sums])  # INVARIANT: all ranks have as many passes, so they have all names
        for name, number, total in ((name, *sum(sums[name] for sums in of_ranks)) for name in self._sums):
            there = number.nonzero().flatten()
            means = [value / count if count else None for count, value in zip(number.tolist(), total.tolist())]
            self.lines[name] = means[: int(there[-1]) + 1 if len(there) else 0]
            if name == "by_turn/logp_difference" and len(there) > 1:
                quarter = -(-len(there) // 4)
                for key, turns in ((FIRST_TURNS, there[:quarter]), (LAST_TURNS, there[-quarter:])):
                    found[key] = (total[turns].sum() / number[turns].sum()).item()
        return found

    def clear(self) -> None:
        """Begin anew, after a log."""
        self._sums = {}


class PassMetrics:
    """Pools what TRL logs per call of its loss: means over tokens, minima and maxima over passes."""

    def __init__(self):
        self._pooled: dict[tuple[str, str], tuple[float, float]] = {}  # (mode, name) -> as in `Means`
        self._own: Means = {}  # of the current pass, in place of TRL's
        self._logged: dict[str, list[float]] | None = None  # during a pass: where its metrics go
        self.depth = DepthMetrics()  # of training

    @contextmanager
    def of(self, trainer: Any, each: Pass) -> Iterator[None]:
        """Within it TRL's metrics are those of one pass. A pass without a trained token has none."""
        mode = trainer._mode
        self._logged, trainer._metrics[mode], self._own = trainer._metrics[mode], defaultdict(list), {}
        try:
            yield
            trls = {name: (values[-1], each.weight) for name, values in trainer._metrics[mode].items()}
            self.pool(self._logged, mode, trls | self._own)
        finally:
            trainer._metrics[mode], self._logged = self._logged, None

    def pool(self, metrics: dict[str, list[float]], mode: str, means: Means) -> None:
        """Log one value per name, of all since the last log, which empties `metrics`; NaN if no token was trained."""
        for name, (value, weight) in means.items():
            before, so_far = self._pooled[mode, name] if metrics.get(name) else (NAN, 0)
            if not weight or math.isnan(value):
                value, weight = before, so_far
            elif so_far and name.endswith(("min", "max")):
                value, weight = (min if name.endswith("min") else max)(before, value), so_far + weight
            elif so_far:
                value, weight = (before * so_far + value * weight) / (so_far + weight), so_far + weight
            self._pooled[mode, name], metrics[name] = (value, weight), [value]
            if name == EFFECTIVE_SHARE:  # what is pooled is the mean of squared ratios
                metrics[name] = [metrics[f"{TRLS[1]}/mean"][0] ** 2 / max(value, 1e-30)]

    def set_ratio(self, each: dict[str, Any], logps: torch.Tensor, trainer: Any) -> None:
        """Set the importance ratio of a batch and what the loss clips around, and log the ratio's metrics. Collective.

        With `old_logps: policy` the loss clips around the policy before the step, and the ratio is that policy's
        probability over the sampled one. With `sampled` it clips around the logprobs as sampled (PPO, arXiv
        1707.06347, equation 7), and the ratio is 1, or 0 where a `_mask` mode masks a token. `each` is TRL's whole
        batch or a pass of the first step of its rollouts. `logps` are (B, C), of the policy before the step.
        """
        sampled, mode = each["sampling_per_token_logps"], trainer.vllm_importance_sampling_mode
        trained, log_mode = each["completion_mask"] * each["tool_mask"] > 0, trainer._mode
        least, most = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        known = trained & ~sampled.isnan()
        difference = torch.where(known, logps - sampled, 0.0)
        limits = least or 0.0, math.inf if most is None else most
        ratio = importance_ratio(difference, mode, *limits)
        if log_mode == "train":
            self.depth.add(each, known, logp_difference=difference.abs(), importance_ratio=difference.exp())
        means = sampling_means(logps, sampled, ratio, trained, limits, trainer.accelerator)
        if (logged := self._logged) is None:
            logged = trainer._metrics[log_mode]
            for name in means:
                if name.startswith(TRLS):
                    logged[name].pop()
        self.pool(logged, log_mode, means)
        if trainer.args.old_logps == "sampled":
            logps = torch.where(sampled.isnan(), logps, sampled)
            # In a `_truncate` mode a ratio of 0 is one that is too small for float32.
            ratio = (ratio != 0).to(ratio) if mode.endswith("mask") else torch.ones_like(ratio)
        each["old_per_token_logps"], each["importance_sampling_ratio"] = logps, ratio

    def count_tokens(self, each: Pass, logps: torch.Tensor, entropies: torch.Tensor, trainer: Any) -> None:
        """TRL's metrics of a pass with weights in its mask, for which TRL would weigh them too. Collective."""
        trained = each["completion_mask"] * each["tool_mask"] > 0
        ratio = logps - each.get("old_per_token_logps", logps)
        if trainer.importance_sampling_level == "sequence":
            ratio = (ratio * trained).sum(1, keepdim=True) / trained.sum(1, keepdim=True).clamp(min=1)
        ratio, advantages = ratio.exp(), each["advantages"]
        low = (ratio < 1 - trainer.epsilon_low) & (advantages < 0)
        high = (ratio > 1 + trainer.epsilon_high) & (advantages > 0)
        values = {"entropy": entropies, "clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
        values["clip_ratio/region_mean"] = low | high
        if "ref_per_token_logps" in each:
            apart = each["ref_per_token_logps"] - logps
            values["kl"] = (apart.exp() - apart - 1) * (ratio if trainer.args.use_bias_correction_kl else 1.0)
        sums = torch.stack([(value * trained).sum().float() for value in values.values()])
        sums = trainer.accelerator.reduce(sums, reduction="sum").tolist()
        self._own |= {name: (total / max(each.weight, 1), each.weight) for name, total in zip(values, sums)}


def importance_ratio(difference: torch.Tensor, mode: str, least: float, most: float) -> torch.Tensor:
    """TRL's ratio of the policy before the step to the one that sampled: (B, C) of tokens, (B, 1) of sequences.

    `difference` is (B, C) of logprobs. Beyond `least` and `most` a ratio is cut (`_truncate`), or 0 (`_mask`).

    >>> importance_ratio(torch.tensor([[0.0, 2.0], [-1.0, 0.5]]), "sequence_mask", 0.0, 3.0)
    tensor([[0.0000],
            [0.6065]])
    """
    ratio = (difference.sum(1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    cut = ratio.clamp(min=least, max=most)
    return cut if mode.endswith("truncate") else ratio.masked_fill(cut != ratio, 0.0)


def sampling_means(
    logps: torch.Tensor,
    sampled: torch.Tensor,
    ratio: torch.Tensor,
    trained: torch.Tensor,
    limits: tuple[float, float],
    accelerator: Any,
) -> Means:
    """The metrics of importance sampling over the `trained` tokens (B, C) of all ranks. Collective.

    `logps` and `sampled` are (B, C), NaN if unknown. `ratio` is (B, C), or (B, 1) of sequences, cut at the `limits`.
    The effective share of samples is `(sum w)^2 / (n sum w^2)` over n ratios w: here its mean square.
    """
    known = trained & ~sampled.isnan()
    difference = torch.where(known, logps - sampled, 0.0)
    counted = trained.any(1, keepdim=True) if ratio.shape[1] == 1 else trained
    kept = ratio.masked_fill(~counted, 0.0)
    is_cut = (ratio <= limits[0]) | (ratio >= limits[1])
    sums = [
        known.sum(),
        difference.abs().sum(),
        (difference.exp() * known).sum(),
        trained.sum(),
        (is_cut.expand(trained.shape) * trained).sum(),
        counted.sum(),
        kept.sum(),
        kept.square().sum(),
    ]
    sums = accelerator.reduce(torch.stack([value.float() for value in sums]), reduction="sum").tolist()
    num_known, absolute, own_ratios, num_trained, num_cut, num_ratios, ratios, squares = sums
    ends = [difference.abs(), ratio.masked_fill(~counted, -math.inf), -ratio.masked_fill(~counted, math.inf)]
    apart, highest, lowest = accelerator.gather(torch.stack([x.max() for x in ends])[None]).amax(0).tolist()
    return {
        f"{TRLS[0]}/mean": (absolute / max(num_known, 1), num_known),
        f"{TRLS[0]}/max": (apart, num_known),
        f"{TRLS[1]}/min": (-lowest, num_ratios),
        f"{TRLS[1]}/mean": (ratios / max(num_ratios, 1), num_ratios),
        f"{TRLS[1]}/max": (highest, num_ratios),
        EFFECTIVE_SHARE: (squares / max(num_ratios, 1), num_ratios),
        "sampling/token_ratio_mean": (own_ratios / max(num_known, 1), num_known),
        "sampling/frac_tokens_ratio_zero_or_clipped": (num_cut / max(num_trained, 1), num_trained),
    }
