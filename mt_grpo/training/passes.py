"""From TRL's micro-batches to forward passes: which rows go together, on which rank, and what a pass counts.

TRL shuffles a rank's rows and cuts them into micro-batches of equally many, padded to the longest of all. Here the
rows of the micro-batches of one optimizer step are put together anew: groups stay whole where they fit, so that a
prompt is computed once (`shared_prompts`), and a pass has a number of tokens in place of a number of rows. The step's
gradient is the same sum.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer

from mt_grpo.images.pictures import Picture, is_picture, pictures_in
from mt_grpo.training.records import FURTHER_RECORDS, Row, row_of
from mt_grpo.training.shared_prompts import Example, SharedRow

PASSES = "passes"  # the key of a micro-batch that has been cut into passes
UNEVEN = 1.05  # the fullest rank's tokens over the mean, from which rows change ranks
FILLERS = {"importance_sampling_ratio": 1}  # of padding, where it is not 0: `vespo` sums its logarithm over a row
MEAN_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")  # losses that TRL divides by a micro-batch's number of rows


BATCHES = itertools.count()


class Pass(dict):
    """The input of one forward pass: some rows, as a batch for TRL's loss.

    Attributes:
        loss_type: TRL's, for this call.
        scale: What its policy loss and its KL count in the micro-batch's.
        shared: The same rows as one that shares prompts; None: they are computed as they are.
        num_tokens: How many it computes.
        weight: Its trained tokens on all ranks.
        is_weighted: Whether its loss mask has other numbers than 0 and 1 (`weigh_tokens`).
        is_first: Whether no pass of the policy came before it: its own logprobs are those before the step.
        batch: The number of the micro-batches that were split together, whose rollouts have numbers of their own.
        pictures: Those of rows of other ranks: its tensors keep none.
    """

    loss_type, scale = "", 1.0
    shared: SharedRow | None = None
    num_tokens, weight, batch = 0, 0.0, 0
    is_weighted = is_first = False
    pictures: tuple[Picture, ...] = ()


@dataclass
class TrainedRow:
    """A record of a rollout as the loss reads it.

    Attributes:
        values: TRL's tensors, without the columns that are padding.
        prompt_ids, completion_ids: As lists.
        trained: Whether the policy sampled a token, of each of the completion's.
        number: Of its row in the batch that it is of.
        group: Tells apart what should go together: the prompt of its rollout's first record; None: its own.
        pictures: Those that its ids stand for, while another rank computes it.
    """

    values: Row
    prompt_ids: list[int]
    completion_ids: list[int]
    trained: list[bool]
    number: int = 0
    group: int | None = None
    pictures: tuple[Picture, ...] = ()

    @cached_property
    def prompt(self) -> int:
        """A hash of the prompt's ids, to find rows with the same prompt."""
        return hash(tuple(self.prompt_ids))

    @cached_property
    def num_trained(self) -> int:
        return sum(self.trained)

    @cached_property
    def own(self) -> int:
        """Tokens that are computed for this record alone where it shares its prompt: up to the last trained one."""
        return max((k + 1 for k, trained in enumerate(self.trained) if trained), default=0)

    @property
    def shown(self) -> list[Picture]:
        return pictures_in(self.prompt_ids + self.completion_ids)

    def without_trained(self) -> TrainedRow:
        return replace(self, trained=[])

    def to(self, device: Any) -> TrainedRow:
        # Copied: a view would be sent with all of the tensor that it is of.
        return replace(self, values={key: value.to(device, copy=True) for key, value in self.values.items()})


# -- which rows there are --


def rows_of(micro_batch: dict[str, Any]) -> list[list[TrainedRow]]:
    """The rows of each rollout of TRL's micro-batch."""
    further = micro_batch.get(FURTHER_RECORDS) or [[] for _ in micro_batch["prompt_ids"]]
    found = [[trained_row(row) for row in (row_of(micro_batch, i), *rest)] for i, rest in enumerate(further)]
    return [[replace(row, group=rows[0].prompt) for row in rows] for rows in found]


def trained_row(row: Row) -> TrainedRow:
    prompt, completion = int(row["prompt_mask"].sum()), int(row["completion_mask"].sum())
    width, start = row["completion_mask"].shape[0], row["prompt_mask"].shape[0] - prompt
    values = {
        key: value[start:] if key.startswith("prompt_") else value[:completion] if value.shape == (width,) else value
        for key, value in row.items()
    }
    trained = (values["tool_mask"] > 0).tolist() if "tool_mask" in row else [True] * completion
    return TrainedRow(values, values["prompt_ids"].tolist(), values["completion_ids"].tolist(), trained)


def weigh_tokens(
    rollouts: list[list[TrainedRow]], num_rollouts: float, loss_type: str, max_completion_length: int
) -> tuple[list[TrainedRow], float | None]:
    """Rows of rollouts with several records, and what the sum of their tokens' losses is divided by; None: as TRL.

    TRL's means are over rows, and here several rows can be one rollout. With this divisor the call is that of `dapo`,
    which divides by a given number. With R scored rollouts, T_i trained tokens of rollout i, L =
    `max_completion_length`:

        grpo     1/R sum_i 1/T_i sum_t loss_it: each token weighs L / T_i, and the sum is divided by R L
        dr_grpo  1/(R L) sum_i sum_t loss_it
        luspo    1/R sum_i sum_t loss_it
        bnpo     1/(sum_i T_i) sum_i sum_t loss_it

    INVARIANT: a rollout's weights are at least 1, and equal: TRL's means over a row's tokens read the same mask.

    Args:
        rollouts: The rows of each.
        num_rollouts: Of one micro-batch, on average (`rows_in_mean`).
    """
    divisor = {
        "grpo": num_rollouts * max_completion_length,  # times each token's weight: the mean of the rollouts' means
        "dr_grpo": num_rollouts * max_completion_length,
        "luspo": num_rollouts,
        "bnpo": max(1, sum(row.num_trained for rows in rollouts for row in rows)),
    }.get(loss_type)
    if loss_type == "grpo":
        for i, rows in enumerate(rollouts):
            weight = max_completion_length / max(1, sum(row.num_trained for row in rows))
            rollouts[i] = [
                replace(row, values={**row.values, "tool_mask": row.values["tool_mask"] * weight}) for row in rows
            ]
    return [row for rows in rollouts for row in rows], divisor


# -- which rows go together --


def cost(rows: list[TrainedRow], shares: bool) -> int:
    """Tokens that a pass of these rows computes, of the shared row (or fewer) or of the padded ones."""
    if shares:
        prompts = {row.prompt: len(row.prompt_ids) - 1 for row in rows if row.own}
        return sum(prompts.values()) + sum(row.own for row in rows)
    longest = max(len(row.prompt_ids) for row in rows) + max(len(row.completion_ids) for row in rows)
    return len(rows) * longest


def units_of(rows: list[TrainedRow], limit: float, shares: bool) -> list[list[TrainedRow]]:
    """Rows that stay together, each unit of at most `limit` tokens if it has more than one: groups, or single rows."""
    if not shares:
        return [[row] for row in rows]
    groups: dict[int, list[TrainedRow]] = defaultdict(list)
    for row in rows:
        groups[row.prompt if row.group is None else row.group].append(row)
    units = []
    for group in groups.values():
        unit: list[TrainedRow] = []
        for row in sorted(group, key=lambda row: -row.own):
            if unit and cost([*unit, row], shares) > limit:
                units.append(unit)
                unit = []
            unit.append(row)
        units.append(unit)
    return units


def fill(rows: list[TrainedRow], budget: int, shares: bool) -> list[list[TrainedRow]]:
    """Rows in passes of at most `budget` tokens, longest first. A row that is longer is a pass of its own."""
    bins: list[list[TrainedRow]] = []
    units = units_of(rows, budget, shares)
    for unit in sorted(units, key=lambda unit: -cost(unit, shares)):
        # Padded rows go behind those of their length; a group goes wherever it fits.
        for into in bins if shares else bins[-1:]:
            if cost(into + unit, shares) <= budget:
                into += unit
                break
        else:
            bins.append(list(unit))
    return bins


def fill_together(rows: list[TrainedRow], budget: int, accelerator: Any) -> list[list[TrainedRow]]:
    """Padded rows in passes of at most `budget` tokens, in each of which all ranks have as many rows. Collective.

    A rank that fills a pass up would pad what it fills up with to its own longest row.
    """
    rows = sorted(rows, key=lambda row: -cost([row], False))
    bins = []
    while True:
        own = next((n for n in range(len(rows), 1, -1) if cost(rows[:n], False) <= budget), min(len(rows), 1))
        found = accelerator.gather(torch.tensor([own], device=accelerator.device)).tolist()
        if not any(found):
            return bins
        count = min(number for number in found if number)
        bins.append(rows[:count])
        rows = rows[count:]


def balance(rows: list[TrainedRow], budget: int, shares: bool, accelerator: Any) -> list[TrainedRow]:
    """The rows that this rank computes, where those of its own would leave other ranks waiting. Collective.

    A group whose rows were on two ranks comes together.
    """
    if accelerator.num_processes == 1:
        return rows
    load = torch.tensor([sum(cost(each, shares) for each in fill(rows, budget, shares))], device=accelerator.device)
    loads = accelerator.gather(load).tolist()
    if max(loads) <= UNEVEN * sum(loads) / len(loads):
        return rows
    gathered = gather_object([[row.to("cpu") for row in rows]])
    everyones = [row for theirs in gathered for row in theirs]
    limit = min(budget, sum(loads) / len(loads))
    ranks: list[list[TrainedRow]] = [[] for _ in loads]
    sums = [0] * len(loads)
    for unit in sorted(units_of(everyones, limit, shares), key=lambda unit: -cost(unit, shares)):
        least = sums.index(min(sums))
        ranks[least] += unit
        sums[least] += cost(unit, shares)
    if max(sums) >= max(loads):
        return rows
    own = accelerator.process_index
    if any(is_picture(max(row.prompt_ids + row.completion_ids)) for row in everyones):
        theirs = {id(row) for row in gathered[own]}
        leaving = [row for rank, rows in enumerate(ranks) if rank != own for row in rows if id(row) in theirs]
        # Held until the rows hold theirs: pixels of what moves, and of nothing else.
        _moved = gather_object([list(dict.fromkeys(picture for row in leaving for picture in row.shown))])
        ranks[own] = [replace(row, pictures=tuple(row.shown)) for row in ranks[own]]
    return [row.to(accelerator.device) for row in ranks[own]]


# -- a step's micro-batches in passes --


def compares_tokens(args: Any) -> bool:
    """Whether TRL compares a micro-batch's tokens with each other, which makes it one pass, whatever its size."""
    return args.top_entropy_quantile < 1.0 or args.entropy_coef != 0.0 or args.use_adaptive_entropy


def skips_first_pass(trainer: Any) -> bool:
    """Whether rollouts of a server need no forward pass before their step, because the loss computes the same.

    The pass stays with several optimizer steps of a batch, of which only the first has that policy; for a log that
    shows its logprobs; and where a `_mask` mode goes with `old_logps: sampled`.
    """
    args = trainer.args
    return (
        trainer.layout.kind != "trl"
        and trainer.use_vllm
        and trainer.vllm_importance_sampling_correction
        and not args.log_rollout_tokens
        and (args.old_logps != "sampled" or trainer.vllm_importance_sampling_mode.endswith("truncate"))
        and args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) == 0
    )


def window_of(args: Any, loss_type: str) -> int:
    """How many of TRL's micro-batches are put together: those of one optimizer step, from the same rollouts.

    A loss that compares a micro-batch's tokens, or divides by their number, keeps TRL's own.
    """
    if compares_tokens(args) or loss_type == "bnpo":
        return 1
    return math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)


def into_passes(trainer: Any, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split micro-batches into passes. Each returned micro-batch has a list of passes under `PASSES`. Collective.

    INVARIANT: all ranks have as many passes in each micro-batch: a sharded model's forward is collective.

    Args:
        trainer: Says how passes are laid out (`layout`), and which loss they are for.
        micro_batches: Of one optimizer step, from the same rollouts: TRL's, each of B rollouts.
    """
    accelerator, args, shares = trainer.accelerator, trainer.args, trainer.layout.kind == "shared"
    training, count, batch = trainer.model.training, len(micro_batches), next(BATCHES)
    size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
    rollouts = [rows for each in micro_batches for rows in rows_of(each)]
    has_further = FURTHER_RECORDS in micro_batches[0]  # on all ranks or on none
    per_micro_batch = rows_in_mean(trainer, micro_batches[0])
    rows, divisor = [row for found in rollouts for row in found], None
    if has_further:
        rows, divisor = weigh_tokens(rollouts, per_micro_batch, trainer.loss_type, trainer.max_completion_length)
    is_first = skips_first_pass(trainer) and "old_per_token_logps" not in micro_batches[0]
    num_items = micro_batches[0]["num_items_in_batch"]  # of all ranks, and of all micro-batches from these rollouts
    if divisor is not None:
        divisor *= accelerator.num_processes * (args.steps_per_generation if training else 1)
        num_items = torch.tensor(float(divisor), device=accelerator.device)
    longest = max(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
    longest = accelerator.gather(torch.tensor([longest], device=accelerator.device)).tolist()
    if trainer.loss_type == "bnpo":  # as TRL has it: the tokens of this rank's micro-batch
        per_micro_batch = max(1, sum(row.num_trained for row in rows))
    dummy = dummy_row(rows[0])
    if compares_tokens(args):
        bins = [rows]
    else:
        budget = args.max_tokens_per_pass or size * max(longest)
        if training and trainer.loss_type != "bnpo":  # transformers weighs an evaluation's losses by rank
            rows = balance(rows, budget, shares, accelerator)
        together = accelerator.num_processes > 1 and not shares
        bins = fill_together(rows, budget, accelerator) if together else fill(rows, budget, shares)
    most = accelerator.gather(torch.tensor([len(bins)], device=accelerator.device)).max()
    bins += [[] for _ in range(max(int(most), count) - len(bins))]
    sums = torch.tensor([[[float(len(rows)), float(sum(row.num_trained for row in rows))] for rows in bins]])
    of_ranks = accelerator.gather(sums.to(accelerator.device))  # (ranks, passes, 2)
    most_rows, weights = of_ranks[:, :, 0].amax(0).clamp(min=1), of_ranks[:, :, 1].sum(0)
    passes = []
    for rows, num_rows, weight in zip(bins, most_rows.int().tolist(), weights.tolist(), strict=True):
        # INVARIANT: all ranks have as many rows in a pass. TRL gathers one number per row for its metrics.
        each = to_pass([*rows, *[dummy] * (num_rows - len(rows))], trainer.pad_to_multiple_of or 1, shares)
        each["num_items_in_batch"] = num_items
        each.loss_type = trainer.loss_type if divisor is None else "dapo"
        if divisor is None and trainer.loss_type in MEAN_OF_ROWS:
            each.scale = num_rows / per_micro_batch
        elif divisor is None and trainer.loss_type == "bnpo":
            each.scale = sum(row.num_trained for row in rows) / per_micro_batch
        each.weight, each.is_first, each.batch = weight, is_first, batch
        each.is_weighted = divisor is not None and trainer.loss_type == "grpo"
        passes.append(each)
    cuts = [len(passes) * k // count for k in range(count + 1)]
    return [{PASSES: passes[first:last]} for first, last in zip(cuts, cuts[1:])]


def rows_in_mean(trainer: Any, micro_batch: dict[str, Any]) -> float:
    """What a mean over the rows of a micro-batch divides by, the same for all micro-batches of a batch.

    INVARIANT: a scored rollout counts the same, whatever rank, micro-batch and step it is in, and others are in no
    mean. If all have a score, it is TRL's number of rows.
    """
    steps = trainer.args.steps_per_generation if trainer.model.training else 1
    return max(float(micro_batch["num_rows_in_batch"]), 1.0) / (steps * trainer.accelerator.num_processes)


def whole_pass(trainer: Any, micro_batch: dict[str, Any]) -> Pass:
    """TRL's micro-batch as a single pass, for layouts that keep it. Collective."""
    whole = Pass(micro_batch)
    trained = (micro_batch["completion_mask"] * micro_batch["tool_mask"]).sum()
    whole.weight = float(trainer.accelerator.reduce(trained, reduction="sum"))
    if trainer.loss_type in MEAN_OF_ROWS:
        whole.scale = len(micro_batch["completion_ids"]) / rows_in_mean(trainer, micro_batch)
    return whole


def dummy_row(row: TrainedRow) -> TrainedRow:
    """A row with one real token, the prompt's last, and no loss. Other values are zero, like TRL's padding."""
    values = {
        key: value[-1:]
        if key.startswith("prompt_")
        else torch.full_like(value[:1] if value.ndim else value, FILLERS.get(key, 0))
        for key, value in row.values.items()
    }
    return TrainedRow(values, row.prompt_ids[-1:], [], [])


def to_pass(rows: list[TrainedRow], multiple: int, shares: bool) -> Pass:
    """Rows as one batch, padded to the longest of them: prompts on the left, the others on the right."""
    batch = Pass()
    for key, value in rows[0].values.items():
        found = [row.values[key] for row in rows]
        side = "prompt" if key.startswith("prompt_") else "completion"
        if not value.ndim or any(len(each) != len(row.values[f"{side}_mask"]) for each, row in zip(found, rows)):
            batch[key] = torch.stack(found)  # one value per row, as TRL's ratio of a sequence
            continue
        # With one column TRL would take its metrics for those of sequences.
        width = max(2 if side == "completion" else 1, *(len(row.values[f"{side}_mask"]) for row in rows))
        width = -(-width // multiple) * multiple
        padded = value.new_full((len(rows), width), FILLERS.get(key, 0))
        for i, each in enumerate(found):
            padded[i, width - len(each) if side == "prompt" else 0 :][: len(each)] = each
        batch[key] = padded
    if shares:
        numbered = [replace(row, number=i) for i, row in enumerate(rows)]
        batch.shared = shared_row(numbered, tuple(batch["completion_ids"].shape), batch["completion_ids"].device)
    sides = ("prompt_ids", "completion_ids")
    batch.pictures = tuple(picture for row in rows for picture in row.pictures)
    batch.num_tokens = len(batch.shared) if shares else sum(batch[side].numel() for side in sides)
    return batch


def shared_row(rows: list[TrainedRow], shape: tuple[int, int], device: Any) -> SharedRow:
    """These of the (B, C) rows of a batch, by their numbers."""
    examples = {row.number: Example(row.prompt_ids, row.completion_ids, row.trained) for row in rows}
    return SharedRow(examples, shape, device)


def pass_of_two(rows: list[TrainedRow], args: Any, multiple: int) -> Pass:
    """The two longest rows of one prompt, as a pass; one, where no prompt has two.

    The two shortest, where TRL's passes have a single row: two long ones might not fit.
    """
    longest = -1 if args.per_device_train_batch_size > 1 else 1
    groups: dict[int, list[TrainedRow]] = defaultdict(list)  # further records of a group may have other prompts
    for row in rows:
        if row.num_trained:
            groups[row.prompt].append(row)
    pairs = [sorted(group, key=lambda row: longest * row.own)[:2] for group in groups.values()] or [rows[:1]]
    # Pictures have positions of their own, so that a pair without any would prove nothing of them.
    pair = min(
        pairs,
        key=lambda pair: (not any(row.shown for row in pair), -len(pair), longest * sum(row.own for row in pair)),
    )
    return to_pass(pair, multiple, shares=True)


def rows_of_ids(trainer: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> list[TrainedRow]:
    """The rows of a batch from their ids.

    Args:
        trainer: If its batch has `loss_masks`, they say whose logprobs are wanted: those of trained tokens.
        input_ids, attention_mask: (M, P + C), prompts padded on the left.
        width: C.
    """
    masks = trainer.batch.loss_masks if trainer.batch is not None else None
    rows = []
    for i, (ids, mask) in enumerate(zip(input_ids.tolist(), attention_mask.tolist(), strict=True)):
        start = len(ids) - width
        prompt = [token for token, real in zip(ids[:start], mask) if real]
        completion = ids[start : start + sum(mask[start:])]
        trained = [True] * len(completion) if masks is None else [value > 0 for value in masks[i][: len(completion)]]
        sides = {"prompt": prompt, "completion": completion} if trainer.layout.proof is None else {}
        long, device = torch.long, input_ids.device
        values = {f"{side}_ids": torch.tensor(own, dtype=long, device=device) for side, own in sides.items()}
        values |= {f"{side}_mask": torch.ones_like(values[f"{side}_ids"]) for side in sides}
        if sides:  # the proof of the layout reads them as a pass
            values["tool_mask"] = torch.tensor(trained, dtype=long, device=device)
        rows.append(TrainedRow(values, prompt, completion, trained, number=i))
    return rows


def shared_rows(
    trainer: Any, rows: list[TrainedRow], width: int, device: torch.device, size: int | None
) -> list[SharedRow]:
    """All rows of a batch as rows that share prompts, of which a forward pass reads one. Collective.

    Args:
        trainer: Says how many tokens a pass has.
        rows: Numbered from 0.
        width: C, of the batch's completions.
        device: Where the model is.
        size: TRL's number of rows per pass; None: one pass.
    """
    accelerator = trainer.accelerator
    found = torch.tensor(max(len(row.prompt_ids) + len(row.completion_ids) for row in rows), device=accelerator.device)
    longest = int(accelerator.gather(found).max())
    budget = (trainer.args.max_tokens_per_pass or size * longest) if size else len(rows) * longest
    bins = fill(rows, budget, shares=True)
    most = accelerator.gather(torch.tensor(len(bins), device=accelerator.device)).max()
    bins += [[rows[0].without_trained()] for _ in range(int(most) - len(bins))]
    return [shared_row(each, (len(rows), width), device) for each in bins]


# -- the loss of a micro-batch --


def loss_in_passes(trainer: Any, model: Any, micro_batch: dict[str, Any], num_items: Any) -> torch.Tensor:
    """TRL's loss of a micro-batch. In training all passes but the last go backward here.

    The last pass's gradient is the caller's, as that of any loss: it is then that ranks exchange gradients.
    """
    loss_type, aux_coef, total = trainer.loss_type, trainer.router_aux_loss_coef, 0.0
    *others, last = passes = micro_batch[PASSES]
    trainer.layout.forget_masks()  # of the pass whose backward is behind us
    trainer.loss_type = passes[0].loss_type
    trainer.router_aux_loss_coef /= len(passes)  # the router's loss is of a micro-batch
    try:
        for each in others:
            if trainer.model.training:
                with without_sync(trainer.accelerator, model, trainer.is_deepspeed_enabled):
                    total += Trainer.training_step(trainer, model, each, num_items)
                trainer.layout.forget_masks()
            else:
                total += trainer.compute_loss(model, each)
        return total + trainer.compute_loss(model, last)
    finally:
        trainer.loss_type, trainer.router_aux_loss_coef = loss_type, aux_coef


@contextmanager
def without_sync(accelerator: Any, model: Any, is_deepspeed: bool) -> Iterator[None]:
    """Gradients only add up, as in a micro-batch that is not the last one of its accumulation."""
    state = accelerator.gradient_state
    if not state.sync_gradients:  # it is none
        yield
        return
    syncs_anyway = is_deepspeed or state.plugin_kwargs.get("sync_each_batch", False)
    state._set_sync_gradients(False)
    try:
        with nullcontext() if syncs_anyway else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(True)
