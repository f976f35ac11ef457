"""The batch of rollouts that one step samples, scores, credits and trains, and the records that its loss reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object

from mt_grpo.base.errors import RunError
from mt_grpo.rollout import Record, Rollout, StopReason

NAN = float("nan")  # has no value: left out of every statistic
# The key of TRL's batch under which each rollout has a list of rows. TRL's shuffle and split keep it with the rollout.
FURTHER_RECORDS = "further_records"
Row = dict[str, torch.Tensor]  # of TRL's batch, without the batch's dimension


@dataclass
class Batch:
    """The rollouts of a step. This rank has B rollouts and M records; all ranks have N rollouts, G of each prompt."""

    rows: list[dict[str, Any]]  # B rows of the data. Over all ranks each one is repeated G times in a row
    group_size: int  # G
    first: int = 0  # the number of this rank's first rollout among the N
    mode: str = "train"  # or `eval`
    data: Any = None  # the dataset that the rows are from, None if it is not known
    rollouts: list[Rollout] = field(default_factory=list)  # B
    records: list[Record] = field(default_factory=list)  # M: a first one per rollout, then the further ones
    owners: list[int] = field(default_factory=list)  # the rollout of each record
    failed: list[bool] = field(default_factory=list)  # whether the environment failed, of each of the N rollouts
    truncated: list[bool] = field(default_factory=list)  # (N,)
    loss_masks: list[list[int]] | None = None  # of each record's completion, None once TRL has its tensors
    facts: torch.Tensor | None = None  # (N, 14), see `conversation_columns`
    values: list[list] | None = None  # what the F reward functions returned, (F, B)
    scores: Any = None  # the same for all N rollouts, as tensors (`Scores`)
    rewards: Any = None  # the `RewardTable` of the N rollouts
    logged: torch.Tensor | None = None  # (N, F), the reward of each function for logs, NaN for None
    used: tuple[torch.Tensor, torch.Tensor] | None = None  # in training, see `Scores.count_used`
    extra: dict[str, list] = field(default_factory=dict)  # columns of TRL's table of completions, from rewards
    dropped: list[Rollout] = field(default_factory=list)  # this rank's rollouts that were replaced
    num_rounds: int = 0  # how often the batch was refilled

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Select the rows of this rank's rollouts, (B, ...), from a tensor of all rollouts, (N, ...)."""
        return x[self.first : self.first + len(self.rows)]

    def add_extra(self, column: str, values: list) -> None:
        """Keep a logged column. A later one of the same name overwrites its end, except with None."""
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

    def choose_records(self, args: Any, step: int) -> None:
        """Set `records`, `owners`, `failed` and `truncated`. Collective.

        INVARIANT: row i is of rollout i for i < B. All ranks have as many rows, of which the last may be empty.
        """
        most, self.failed, self.truncated = compare_ranks(self.rollouts, args, step, self.mode == "train")
        records = [trained_records(rollout) for rollout in self.rollouts]
        rows = [(own[0], i) for i, own in enumerate(records)]
        rows += [(record, i) for i, own in enumerate(records) for record in own[1:]]
        rows += [(Record([], []), 0)] * (len(self.rollouts) + most - len(rows))
        self.records, self.owners = map(list, zip(*rows))

    def loss_lists(self, pad_id: int) -> tuple[list, list, list, list | None]:
        """Lists of M rows: (prompt ids, completion ids, loss masks, logprobs). An empty record has a masked token."""
        logprobs = [record.logprobs for record in self.records]
        return (
            [record.prompt_ids or [pad_id] for record in self.records],
            [record.completion_ids or [pad_id] for record in self.records],
            [record.loss_mask or [0] for record in self.records],
            None if None in logprobs else [row or [0.0] for row in logprobs],
        )

    @property
    def reward(self) -> torch.Tensor:
        """R^O + R^T of each rollout, (N,); NaN without a score: it has no outcome, or its environment failed.

        INVARIANT: a rollout without a score has no token in any sum or divisor of the loss, and is in no mean.
        """
        return self.rewards.outcome + self.rewards.turn_total

    def trained_rollouts(self, args: Any) -> torch.Tensor:
        """Which rollouts have tokens in the loss, (N,) bool: those with a score, without masked truncated ones."""
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
        """`num_rows_in_batch`, by which means over rows divide: all scored rollouts, or their records. Collective."""
        scored, count = self.own(~self.rewards.outcome.isnan()).tolist(), len(self.rows)
        further = self.records[count:] if per_record else []
        owners = self.owners[:count] + [i for i, record in zip(self.owners[count:], further) if record.turns]
        number = torch.tensor(float(sum(scored[i] for i in owners)), device=accelerator.device)
        return {"num_rows_in_batch": accelerator.reduce(number, reduction="sum")}

    def per_rollout(self, output: dict[str, Any]) -> dict[str, Any]:
        """TRL's batch of M rows as one of B rollouts. The rows of further records become lists (`FURTHER_RECORDS`)."""
        count = len(self.rows)
        if len(self.records) == count:
            return output
        batch = {key: value[:count] if value.ndim else value for key, value in output.items()}
        batch[FURTHER_RECORDS] = [[] for _ in range(count)]
        for i in range(count, len(self.records)):
            if self.records[i].turns:
                batch[FURTHER_RECORDS][self.owners[i]].append(row_of(output, i))
        return batch


def row_of(batch: dict[str, Any], index: int) -> Row:
    return {key: value[index] for key, value in batch.items() if torch.is_tensor(value) and value.ndim}


def unused_rewards(names: list[str], batches: list[Batch]) -> list[str]:
    """The names of reward functions that returned numbers, none of which moved an advantage in these batches."""
    used = [batch.used for batch in batches if batch.used is not None]  # none of an evaluation's
    given, moved = (sum(counts, torch.zeros(len(names))).tolist() for counts in zip(*used)) if used else ([], [])
    return [name for name, n, m in zip(names, given, moved) if n and not m]


def trained_records(rollout: Rollout) -> list[Record]:
    """The records of a rollout that are trained, or one empty record if there is none or the environment failed."""
    records = [] if rollout.failed else [r for r in rollout.records if any(turn.trained for turn in r.turns)]
    return records or [Record([], [])]


def is_cut_off(rollout: Rollout) -> bool:
    """Whether a limit of tokens, or `agent_timeout`, truncated a rollout or its last turn, unless an agent went on."""
    if rollout.stop_reason in (StopReason.MAX_TOKENS, StopReason.CONTEXT_LENGTH, StopReason.AGENT_TIMEOUT):
        return True
    cut = rollout.turns and rollout.turns[-1].finish_reason == "length"
    return bool(cut) and rollout.stop_reason != StopReason.AGENT_DONE


def compare_ranks(rollouts: list[Rollout], args: Any, step: int, training: bool = True) -> tuple[int, list, list]:
    """Exchange (further records of the rank with most, which of N rollouts failed, which were truncated). Collective.

    Raises `RunError` on all ranks if every environment failed in training, or for a setting that compares all tokens.
    """
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    text = f"{type(errors[0]).__name__}: {errors[0]}" if errors else "no reason was given"
    further = sum(len(trained_records(rollout)) - 1 for rollout in rollouts)
    own = further, [rollout.failed for rollout in rollouts], list(map(is_cut_off, rollouts)), text
    numbers, *flags, texts = zip(*gather_object([own]))
    failed, truncated = ([flag for own in each for flag in own] for each in flags)
    if training and all(failed):  # a batch of test rows may be a single one
        cause = errors[0].__cause__ if errors else None
        raise RunError(f"The environment failed in all {len(failed)} rollouts of step {step}: {texts[0]}") from cause
    for key in compares_tokens(args) if max(numbers) else ():
        raise RunError(
            f"{key}={getattr(args, key)} compares the tokens of a whole batch. With an edited history, or a turn that "
            f"goes on after its end, the batch is trained in several passes. Remove {key}."
        )
    return max(numbers), failed, truncated


def compares_tokens(args: Any) -> list[str]:
    """The settings by which TRL compares a micro-batch's tokens, which makes it one pass, whatever its size."""
    neutral = {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}
    return [key for key, value in neutral.items() if getattr(args, key) != value]


def most_of_ranks(number: int, accelerator: Any) -> int:
    """The largest of the ranks' numbers. Collective."""
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max())


def pad_rows(rows: list[list], width: int, filler: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of unequal length as one tensor, (B, width)."""
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows], dtype=dtype)


def pad_turn_ids(records: list[Record], width: int) -> torch.Tensor:
    """The turn that each token of the records belongs to, (M, width), also if it is masked; -1 for others.

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
    """Sum over `dim` without NaN entries; NaN if all entries are NaN."""
    return torch.where(x.isnan().all(dim), NAN, x.nansum(dim))
