"""The batch of rollouts that one step samples, scores, credits, trains and logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mt_grpo.rollout import Record, Rollout
from mt_grpo.training.records import FURTHER_RECORDS, compare_ranks, row_of, trained_records
from mt_grpo.training.tensors import pad_rows


@dataclass
class Batch:
    """The rollouts of a step, with their rewards and records. The step fills the fields in this order.

    This rank has B rollouts and M records; all ranks have N rollouts, G of each prompt.

    Attributes:
        rows: The B rows of the data. Over all ranks each one is repeated G times in a row.
        group_size: G, the number of rollouts per prompt.
        first: The number of this rank's first rollout among the N.
        mode: `train` or `eval`.
        data: The dataset that the rows are from, None if it is not known.
        rollouts: The B conversations.
        records: The M records that the loss reads: a first one per rollout, then the further ones.
        owners: The rollout of each of the M records.
        loss_masks: The loss mask of each record's completion, None once TRL has its tensors.
        failed, truncated: Whether each of the N rollouts failed by its environment, and whether it was truncated.
        facts: Statistics of each conversation, (N, 16): see `conversation_columns`.
        scores: The values of the reward functions for all N rollouts (`Scores`).
        rewards: The `RewardTable` of the N rollouts, made of these scores.
        weights: The weights of the F reward functions, (F,).
        logged: The logged reward of each function, (N, F), NaN for None: see `logged_rewards`.
        used: In training, how many numbers each function returned, and how many of them move an advantage, (F,) both.
        extra: Further columns of TRL's table of completions, (B,) each, from reward functions.
        dropped: This rank's rollouts that were replaced.
        num_rounds: How often the batch was refilled.
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
    truncated: list[bool] = field(default_factory=list)
    loss_masks: list[list[int]] | None = None
    facts: torch.Tensor | None = None
    scores: Any = None
    rewards: Any = None
    weights: torch.Tensor | None = None
    logged: torch.Tensor | None = None
    used: tuple[torch.Tensor, torch.Tensor] | None = None
    extra: dict[str, list] = field(default_factory=dict)
    dropped: list[Rollout] = field(default_factory=list)
    num_rounds: int = 0

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Select the rows of this rank's rollouts, (B, ...), from a tensor of all rollouts, (N, ...)."""
        return x[self.first : self.first + len(self.rows)]

    def add_extra(self, column: str, values: list) -> None:
        """Keep a logged column. A later one of the same name overwrites its end, except with None.

        >>> batch = Batch([], 1)
        >>> batch.add_extra("seen", ["a", "b"]), batch.add_extra("seen", [None, "c"]), batch.extra
        (None, None, {'seen': ['a', 'c']})
        """
        old = self.extra.get(column, [])
        old = [None] * (len(values) - len(old)) + old[max(len(old) - len(values), 0) :]
        self.extra[column] = [before if after is None else after for before, after in zip(old, values)]

    def replace(self, places: list[int], rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Replace some rows and rollouts of this rank. The new ones must then be scored."""
        self.rows, self.rollouts = list(self.rows), list(self.rollouts)
        self.dropped = self.dropped + [self.rollouts[i] for i in places]
        self.num_rounds += 1
        for i, row, rollout in zip(places, rows, rollouts, strict=True):
            self.rows[i], self.rollouts[i] = row, rollout
            for column in self.extra.values():
                if i < len(column):
                    column[i] = None

    def of_all_ranks(self, rows: list[list[float]], accelerator: Any) -> torch.Tensor:
        """Gather a number per turn from all ranks, (N, K), like `rewards.turn`; 0 if there is no turn. Collective.

        Args:
            rows: B lists with a number per turn.
            accelerator: The trainer's accelerator.
        """
        own = pad_rows(rows, self.rewards.turn.shape[1], 0.0)
        return accelerator.gather(own.to(accelerator.device).contiguous()).cpu()

    def choose_records(self, args: Any, step: int) -> None:
        """Set `records`, `owners`, `failed` and `truncated` of all N rollouts. Collective.

        The records are the B first ones, then further ones, then empty ones.

        INVARIANT: row i is of rollout i for i < B. All ranks have as many rows: B if no rank has a further record.

        Raises `RunError` on all ranks, as `compare_ranks` says.
        """
        num_further, self.failed, self.truncated = compare_ranks(self.rollouts, args, step, self.mode == "train")
        records = [trained_records(rollout) for rollout in self.rollouts]
        further = [(record, i) for i, own in enumerate(records) for record in own[1:]]
        further += [(Record([], []), 0)] * (num_further - len(further))
        rows = [(own[0], i) for i, own in enumerate(records)] + further
        self.records, self.owners = [record for record, _ in rows], [owner for _, owner in rows]

    def loss_lists(self, pad_id: int) -> tuple[list, list, list, list | None]:
        """The inputs of the loss: (prompt ids, completion ids, loss masks, logprobs), each a list of M rows.

        Args:
            pad_id: The single token of an empty record. It has no loss.

        >>> Batch([], 1, records=[Record([], [])]).loss_lists(9)
        ([[9]], [[9]], [[0]], [[0.0]])
        """
        logprobs = [record.logprobs for record in self.records]
        return (
            [record.prompt_ids or [pad_id] for record in self.records],
            [record.completion_ids or [pad_id] for record in self.records],
            [record.loss_mask or [0] for record in self.records],
            None if None in logprobs else [row or [0.0] for row in logprobs],
        )

    @property
    def reward(self) -> torch.Tensor:
        """R^O + R^T of each rollout, (N,), NaN for one without a score: it has no outcome, or its environment failed.

        INVARIANT: a rollout without a score has no token in any sum or divisor of the loss, and is in no mean.
        """
        return self.rewards.outcome + self.rewards.turn_total

    def trained_rollouts(self, args: Any) -> torch.Tensor:
        """Which rollouts have tokens in the loss, (N,) bool: those with a score, with TRL's masking whole ones."""
        scored = ~self.rewards.outcome.isnan()
        return scored & ~torch.tensor(self.truncated) if args.mask_truncated_completions else scored

    def zeros_where_untrained(self, masks: list[list[int]], args: Any) -> list[list[int]]:
        """The masks of the M records, with zeros for those of rollouts that are not trained."""
        trained = self.own(self.trained_rollouts(args)).tolist()
        return [mask if trained[owner] else [0] * len(mask) for owner, mask in zip(self.owners, masks)]

    def trained_turns(self, args: Any) -> torch.Tensor:
        """Which turns have tokens in the loss, (N, K) bool."""
        return (self.rewards.num_tokens > 0) & self.trained_rollouts(args)[:, None]

    def pass_inputs(self, per_record: bool, accelerator: Any) -> dict[str, torch.Tensor]:
        """What passes read beside TRL's batch: the `rollouts` of its rows (M,), and `num_rows_in_batch`. Collective.

        Losses that are a mean over rows divide by the latter, a scalar: the number of rollouts of all ranks that have
        a score, or of their records.
        """
        scored, count = self.own(~self.rewards.outcome.isnan()).tolist(), len(self.rows)
        further = self.records[count:] if per_record else []
        owners = self.owners[:count] + [i for i, record in zip(self.owners[count:], further) if record.turns]
        number = torch.tensor(float(sum(scored[i] for i in owners)), device=accelerator.device)
        rollouts = torch.tensor(self.owners, device=accelerator.device) + self.first
        return {"rollouts": rollouts, "num_rows_in_batch": accelerator.reduce(number, reduction="sum")}

    def per_rollout(self, output: dict[str, Any]) -> dict[str, Any]:
        """Convert TRL's batch of M rows to one of B rollouts, which its shuffle and split take apart.

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


def unused_rewards(names: list[str], batches: list[Batch]) -> list[str]:
    """The names of reward functions that returned numbers, none of which moved an advantage in these batches."""
    used = [batch.used for batch in batches if batch.used is not None]  # none of an evaluation's
    given, moved = (sum(counts, torch.zeros(len(names))).tolist() for counts in zip(*used)) if used else ([], [])
    return [name for name, n, m in zip(names, given, moved) if n and not m]
