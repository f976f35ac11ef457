"""A batch of rollouts: what one step rolls out, scores, credits, trains and logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mt_grpo.rollout import Record, Rollout, StopReason
from mt_grpo.training.records import FURTHER_RECORDS, compare_ranks, row_of, trained_records


@dataclass
class Batch:
    """The rollouts of a step. The step fills it in from top to bottom.

    B rollouts and M records are of this rank; N rollouts are of all ranks, G of each prompt.

    Attributes:
        rows: The B rows of the data. Over all ranks each one stands G times in a row.
        group_size: G.
        first: The number of this rank's first rollout among the N.
        mode: `train` or `eval`.
        data: The data set that the rows are of; None where it is not known.
        rollouts: The B conversations.
        records: The M records that the loss reads: a first one per rollout, then the further ones.
        owners: The rollout of each of the M records.
        loss_masks: Of each record's completion, as TRL gets them; None once TRL has its tensors.
        failed: Whether the environment failed, of each of the N rollouts.
        facts: Numbers of each conversation, (N, 12): see `conversation_columns`.
        rewards: The `RewardTable` of the N rollouts.
        weights: What each of the F reward functions counts, (F,).
        logged: What each of them gave, (N, F), NaN for None: see `logged_rewards`.
    """

    rows: list[dict[str, Any]]
    group_size: int
    first: int = 0
    mode: str = "train"
    data: Any = None
    rollouts: list[Rollout] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)
    loss_masks: list[list[int]] | None = None
    facts: torch.Tensor | None = None
    rewards: Any = None
    weights: torch.Tensor | None = None
    logged: torch.Tensor | None = None

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Of a tensor of all rollouts, (N, ...), the rows of this rank's, (B, ...)."""
        return x[self.first : self.first + len(self.rows)]

    def choose_records(self, args: Any, step: int) -> None:
        """Set `records`, `owners` and `failed`. Collective. The records are B first ones, further ones, empty ones.

        INVARIANT: row i is of rollout i for i < B. All ranks have as many rows: B where no rank has a further record.

        Raises `RunError` on all ranks, as `compare_ranks` says.
        """
        num_further, self.failed = compare_ranks(self.rollouts, args, step)
        records = [trained_records(rollout) for rollout in self.rollouts]
        further = [(record, i) for i, own in enumerate(records) for record in own[1:]]
        further += [(Record([], []), 0)] * (num_further - len(further))
        rows = [(own[0], i) for i, own in enumerate(records)] + further
        self.records, self.owners = [record for record, _ in rows], [owner for _, owner in rows]

    def loss_lists(self, pad_id: int, without_truncated: bool = False) -> tuple[list, list, list, list | None]:
        """(prompt ids, completion ids, loss masks, logprobs), each a list of M rows.

        Args:
            pad_id: The one token of a record that has none. It has no loss.
            without_truncated: TRL's `mask_truncated_completions`: rollouts that were cut off have masks of zeros.

        >>> Batch([], 1, records=[Record([], [])]).loss_lists(9)
        ([[9]], [[9]], [[0]], [[0.0]])
        """
        logprobs = [record.logprobs for record in self.records]
        loss_masks = [record.loss_mask or [0] for record in self.records]
        if without_truncated:
            reasons = [self.rollouts[owner].stop_reason for owner in self.owners]
            truncated = (StopReason.MAX_TOKENS, StopReason.CONTEXT_LENGTH)
            loss_masks = [[0] * len(m) if reason in truncated else m for reason, m in zip(reasons, loss_masks)]
        return (
            [record.prompt_ids or [pad_id] for record in self.records],
            [record.completion_ids or [pad_id] for record in self.records],
            loss_masks,
            None if None in logprobs else [row or [0.0] for row in logprobs],
        )

    def per_rollout(self, output: dict[str, Any]) -> dict[str, Any]:
        """TRL's batch of M rows as one of B rollouts, which its shuffle and split take apart.

        The rows of further records become a list per rollout, under `FURTHER_RECORDS`.
        """
        count = len(self.rows)
        if len(self.records) == count:
            return output
        batch = {key: value[:count] if value.ndim else value for key, value in output.items()}
        batch[FURTHER_RECORDS] = [[] for _ in range(count)]
        for i in range(count, len(self.records)):
            if self.records[i].turns:
                batch[FURTHER_RECORDS][self.owners[i]].append(row_of(output, i))
        return batch
