"""Rows of unequal length as tensors, and statistics that leave out NaN, which means "has no value"."""

from __future__ import annotations

from typing import Any

import torch

from mt_grpo.rollout import Record

NAN = float("nan")
EFFECTIVE_SHARE = "sampling/effective_share"  # the metric


def pad_rows(rows: list[list], width: int, filler: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of unequal length as one tensor, (B, width).

    >>> pad_rows([[1, 2], [3]], 3, -1, torch.long)
    tensor([[ 1,  2, -1],
            [ 3, -1, -1]])
    """
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows], dtype=dtype)


def pad_turn_ids(records: list[Record], width: int) -> torch.Tensor:
    """The `turn_ids` of all records, (M, width), -1 where there is padding.

    >>> from mt_grpo.rollout import Turn
    >>> turns = [Turn([5, 6], None, "", "stop", observation_ids=[7]), Turn([8], None, "", "stop")]
    >>> pad_turn_ids([Record([], turns), Record([], turns[1:], [1])], 6)
    tensor([[ 0,  0, -1,  1, -1, -1],
            [ 1, -1, -1, -1, -1, -1]])
    """
    owners, lengths = [], []
    for record in records:
        start = len(lengths)
        for k, turn in zip(record.owners, record.turns):
            owners += (k, -1)
            lengths += (len(turn.token_ids), len(turn.observation_ids))
        owners.append(-1)
        lengths.append(width - sum(lengths[start:]))
    return torch.tensor(owners).repeat_interleave(torch.tensor(lengths)).view(len(records), width)


def nanstd(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Unbiased standard deviation over `dim` (kept) without NaN entries; NaN if fewer than two values are left."""
    count = (~x.isnan()).sum(dim, keepdim=True)
    deviation = x - x.nanmean(dim, keepdim=True)
    return (deviation.square().nansum(dim, keepdim=True) / (count - 1).clamp(min=0)).sqrt()


def nansum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` without NaN entries; NaN if all entries are NaN.

    >>> nansum(torch.tensor([[1., NAN], [NAN, NAN]]), 1)
    tensor([1., nan])
    """
    return torch.where(x.isnan().all(dim), NAN, x.nansum(dim))


def rollout_weights(ratio: torch.Tensor, loss_mask: torch.Tensor, rollouts: torch.Tensor, accelerator: Any) -> Any:
    """Of each row of all ranks, (rows, 3): its rollout, the sum of its tokens' ratios, their number. Collective."""
    trained = loss_mask > 0
    columns = rollouts, torch.where(trained, ratio, 0.0).sum(1), trained.sum(1)
    return accelerator.gather(torch.stack([column.float() for column in columns], 1)).cpu()


def effective_share(weights: torch.Tensor) -> float:
    """The effective share of samples, `(sum w)^2 / (n sum w^2)` over n rollouts, each with its tokens' mean ratio w.

    >>> effective_share(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 4.0], [1.0, 5.0, 2.0], [2.0, 0.0, 3.0]]))  # 1, 1, 0
    0.6666666865348816
    """
    rollouts, of_rollout = weights[:, 0].long().unique(return_inverse=True)
    total, number = torch.zeros(len(rollouts), 2).index_add(0, of_rollout, weights[:, 1:]).T
    w = (total / number)[number > 0]
    return (w.sum().square() / (len(w) * w.square().sum()).clamp(min=1e-30)).item() if len(w) else NAN


def ratio_to_sampled(output: dict[str, torch.Tensor], mode: str) -> dict[str, torch.Tensor]:
    """Replace the inputs of the importance ratio in TRL's loss, so that it clips around the logprobs as sampled.

    The ratio is then the whole change since a token was sampled (PPO, arXiv 1707.06347, equation 7), so no importance
    ratio is left beside it: 1, or 0 where a mode of TRL's masks the token. Where a logprob is not known (NaN), the old
    one stays.

    Args:
        output: TRL's batch: `sampling_per_token_logps`, `old_per_token_logps`, both (M, C), and
            `importance_sampling_ratio`, (M, C) or (M, 1).
        mode: `vllm_importance_sampling_mode`. A ratio of 0 is a masked one in a `_mask` mode alone; else it is one
            that is too small for float32.

    >>> output = {"sampling_per_token_logps": torch.tensor([[-1.0, NAN, -3.0]])}
    >>> output["old_per_token_logps"] = torch.tensor([[-1.5, -2.5, -3.5]])
    >>> output["importance_sampling_ratio"] = torch.tensor([[0.6, 1.0, 0.0]])
    >>> ratio_to_sampled(output, "token_mask").values()
    dict_values([tensor([[-1.0000, -2.5000, -3.0000]]), tensor([[1., 1., 0.]])])
    >>> output["importance_sampling_ratio"] = torch.tensor([[0.0]])
    >>> ratio_to_sampled(output, "sequence_truncate")["importance_sampling_ratio"]
    tensor([[1.]])
    """
    sampled, old = output["sampling_per_token_logps"], output["old_per_token_logps"]
    ratio = output["importance_sampling_ratio"]
    return {
        "old_per_token_logps": torch.where(sampled.isnan(), old, sampled),
        "importance_sampling_ratio": (ratio != 0).to(ratio) if mode.endswith("mask") else torch.ones_like(ratio),
    }
