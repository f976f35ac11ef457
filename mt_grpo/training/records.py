"""The records of rollouts that the loss reads, one row each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from mt_grpo.base.errors import RunError
from mt_grpo.conversation.environments import PromptTooLong
from mt_grpo.rollout import Record, Rollout, StopReason

# The key of TRL's batch under which each rollout has a list of rows. TRL's shuffle and split keep it with the rollout.
FURTHER_RECORDS = "further_records"
Row = dict[str, torch.Tensor]  # of TRL's batch, without the batch's dimension


def trained_records(rollout: Rollout) -> list[Record]:
    """The records of a rollout that are trained, or one empty record if there is none or the environment failed.

    >>> trained_records(Rollout([], [1, 2, 3]))  # a prompt may be longer than what the model can read
    [Record(prompt_ids=[], turns=[], numbers=None)]
    """
    records = [] if rollout.failed else [r for r in rollout.records if any(turn.trained for turn in r.turns)]
    return records or [Record([], [])]


def tokens_read_again(rollout: Rollout) -> tuple[int, int]:
    """(tokens of further records that repeat the beginning of an earlier one, tokens of all records of a rollout).

    A server computes these once if its prefix cache has them; a training pass computes them once more.

    >>> from mt_grpo.rollout import Context, Turn
    >>> r = Rollout([], [1, 2, 3], turns=[Turn([10, 11], None, "", "stop"), Turn([30], None, "", "stop")])
    >>> tokens_read_again(r)
    (0, 6)
    >>> r.turns[1].context = Context([], [1, 2, 3, 10, 7])  # an edit behind the fourth token
    >>> tokens_read_again(r)
    (4, 11)
    """
    records = rollout.records
    if len(records) == 1:
        return 0, len(records[0].prompt_ids) + len(records[0].completion_ids)
    read = [np.array([*record.prompt_ids, *record.completion_ids], dtype=np.int64) for record in records]
    prompts = [len(record.prompt_ids) for record in records]
    again = [
        max(common_prefix(ids[:size], before) for before in read[:k])
        for k, (ids, size) in enumerate(zip(read, prompts))
        if k > 0
    ]
    return sum(again), sum(map(len, read))


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """The length of the common prefix of two lists of ids.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2])), common_prefix(np.array([1, 2, 3]), np.array([1, 4, 3]))
    (2, 1)
    """
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def is_cut_off(rollout: Rollout) -> bool:
    """Whether a limit of tokens, or `agent_timeout`, truncated a rollout or its last turn.

    An environment may set another stop reason.

    An agent sets limits of its own, such as one token for a yes or no, and decides what a truncated turn means.
    """
    if rollout.stop_reason in (StopReason.MAX_TOKENS, StopReason.CONTEXT_LENGTH, StopReason.AGENT_TIMEOUT):
        return True
    cut = rollout.turns and rollout.turns[-1].finish_reason == "length"
    return bool(cut) and rollout.stop_reason != StopReason.AGENT_DONE


def compare_ranks(
    rollouts: list[Rollout], args: Any, step: int, training: bool = True
) -> tuple[int, list[bool], list[bool]]:
    """Exchange among ranks what they must agree on. Collective.

    Returns the number of further records on the rank with the most, and for each of N rollouts whether its environment
    failed and whether it was truncated.

    Raises `RunError` on all ranks if every environment failed in training, or a setting does not support further
    records.
    """
    failed = [rollout.failed for rollout in rollouts]
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    text = f"{type(errors[0]).__name__}: {errors[0]}" if errors else "no reason was given"
    no_room = [isinstance(error, PromptTooLong) for error in errors]
    cut_off = [is_cut_off(rollout) for rollout in rollouts]
    num_further = sum(len(trained_records(r)) - 1 for r in rollouts)
    reports = gather_object([(num_further, failed, text, no_room, cut_off)])
    flags = [flag for report in reports for flag in report[1]]
    none_is_left = training and all(flags)  # a batch of test rows may be a single one
    if none_is_left and all(each for report in reports for each in report[3]):
        raise RunError(f"The prompts of all {len(flags)} rollouts of step {step} fill the context. {reports[0][2]}")
    if none_is_left:
        raise RunError(
            f"The environment failed in all {len(flags)} rollouts of step {step}. The first error: "
            f"{reports[0][2].rstrip('.')}. Expected at least one rollout without an error. "
            "Fix the environment, and start the run again."
        )
    num_further = max(report[0] for report in reports)
    if num_further:
        check_settings(args)
    return num_further, flags, [each for report in reports for each in report[4]]


def check_settings(args: Any) -> None:
    """Raise `RunError` for settings that compare the tokens of a whole batch, which passes over its records split."""
    asked = {
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
        "entropy_coef": args.entropy_coef != 0.0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
    }
    for key in (key for key, is_set in asked.items() if is_set):
        raise RunError(
            f"{key}={getattr(args, key)} compares the tokens of a whole batch. The environment edited a history, so "
            f"the batch is trained in several passes. Remove {key}, or use an environment that edits no history."
        )


def row_of(batch: dict[str, Any], index: int) -> Row:
    return {key: value[index] for key, value in batch.items() if torch.is_tensor(value) and value.ndim}
