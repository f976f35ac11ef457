"""From TRL's micro-batches to forward passes: which rows go together, on which rank, and what a pass counts.

The rows of one optimizer step's micro-batches are put together anew: groups stay whole where they fit, and a pass has
a number of tokens instead of a number of rows. The step's gradient is the same sum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from mt_grpo.base.errors import RunError
from mt_grpo.images.pictures import Picture, is_picture, pictures_in
from mt_grpo.rollout import join
from mt_grpo.training.batch import FURTHER_RECORDS, Row, compares_tokens, most_of_ranks, row_of
from mt_grpo.training.shared_prompts import Example, SharedRow

PASSES = "passes"  # the key of a micro-batch that has been cut into passes
UNEVEN = 1.05  # the fullest rank's tokens over the mean, from which rows change ranks
FILLERS = {"importance_sampling_ratio": 1}  # of padding, where it is not 0: `vespo` sums its logarithm over a row
MEAN_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")  # losses that TRL divides by a micro-batch's number of rows


class Pass(dict):
    """The input of one forward pass: rows, as a batch for TRL's loss."""

    loss_type, scale = "", 1.0  # TRL's loss type; the factor of its policy loss and its KL in the micro-batch's
    shared: SharedRow | None = None  # the same rows as one that shares prompts; None: they are computed as they are
    num_tokens, weight = 0, 0.0  # how many it computes; its trained tokens on all ranks
    is_weighted = is_first = False  # its loss mask has weights (`weighed`); no pass of the policy came before it
    is_quiet = False  # its rows have no gradient (`without_signal`)
    pictures: tuple[Picture, ...] = ()  # those of rows of other ranks: its tensors keep none


@dataclass
class TrainedRow(Example):
    """A record of a rollout as the loss reads it."""

    values: Row = field(default_factory=dict)  # TRL's tensors, without the columns that are padding
    number: int = 0  # of its row in its batch
    group: int | None = None  # what should go together: the prompt of its rollout's first record; None: its own
    pictures: tuple[Picture, ...] = ()  # those that its ids stand for, while another rank computes it

    @cached_property
    def prompt(self) -> int:
        """A hash of the prompt's ids, to find rows with the same prompt."""
        return hash(tuple(self.prompt_ids))

    @cached_property
    def num_trained(self) -> int:
        return sum(self.trained)

    @cached_property
    def own(self) -> int:
        """Tokens that are computed for this record alone where it shares its prompt, up to the last trained."""
        return max((k + 1 for k, trained in enumerate(self.trained) if trained), default=0)

    @property
    def shown(self) -> list[Picture]:
        return pictures_in(self.prompt_ids + self.completion_ids)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

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
    return TrainedRow(values["prompt_ids"].tolist(), values["completion_ids"].tolist(), trained, values)


def rows_of_ids(trainer: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> list[TrainedRow]:
    """The rows of a batch from its ids (M, P + C), prompts padded on the left, of which C = `width`.

    If the trainer's batch has `loss_masks`, they say whose logprobs are wanted: those of trained tokens.
    """
    masks = trainer.batch.loss_masks if trainer.batch is not None else None
    sides = {"prompt": slice(None, -width), "completion": slice(-width, None)}
    rows = []
    for i, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
        row = {f"{side}_ids": ids[part] for side, part in sides.items()}
        row |= {f"{side}_mask": mask[part] for side, part in sides.items()}
        trained = torch.ones(width) if masks is None else torch.tensor(masks[i] + [0] * (width - len(masks[i])))
        row["tool_mask"] = (trained > 0).long().to(ids.device)
        rows.append(replace(trained_row(row), number=i))
    return rows


def dummy_row(row: TrainedRow) -> TrainedRow:
    """A row with one real token, the prompt's last, and no loss. Other values are zero, like TRL's padding."""
    values = {
        key: value[-1:]
        if key.startswith("prompt_")
        else torch.full_like(value[:1] if value.ndim else value, FILLERS.get(key, 0))
        for key, value in row.values.items()
    }
    return TrainedRow(row.prompt_ids[-1:], [], [], values)


def weighed(rows: list[TrainedRow], longest: int) -> list[TrainedRow]:
    """The rows of one rollout, whose tokens weigh L / T: its T trained tokens together as much as a completion.

    TRL's `grpo` is a mean over rows of means over tokens, and here several rows can be one rollout. With R scored
    rollouts and L = `longest`, `dapo` divides the sum of these tokens' losses by R L: 1/R sum_i 1/T_i sum_t loss_it.

    INVARIANT: a rollout's weights are equal, and at least 1, as no rollout trains more than L tokens: TRL's means over
    a row's tokens read the same mask, and divide by at least 1.
    """
    weight = longest / max(1, sum(row.num_trained for row in rows))
    return [replace(row, values={**row.values, "tool_mask": row.values["tool_mask"] * weight}) for row in rows]


# -- which rows go together --


def cost(rows: list[TrainedRow], shares: bool) -> int:
    """Tokens that a pass of these rows computes, of the shared row (or fewer) or of the padded ones."""
    if shares:
        prompts = {row.prompt: len(row.prompt_ids) - 1 for row in rows if row.own}
        return sum(prompts.values()) + sum(row.own for row in rows)
    return len(rows) * (max(len(row.prompt_ids) for row in rows) + max(len(row.completion_ids) for row in rows))


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
    for unit in sorted(units_of(rows, budget, shares), key=lambda unit: -cost(unit, shares)):
        # Padded rows go behind those of their length; a group goes wherever it fits.
        for into in bins if shares else bins[-1:]:
            if cost(into + unit, shares) <= budget:
                into += unit
                break
        else:
            bins.append(list(unit))
    return bins


def fill_together(rows: list[TrainedRow], budget: int, accelerator: Any) -> list[list[TrainedRow]]:
    """Padded rows in passes of at most `budget` tokens, in each of which all ranks have as many rows. Collective."""
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
    """The rows that this rank computes, moved between ranks if loads differ by more than `UNEVEN`. Collective."""
    if accelerator.num_processes == 1:
        return rows
    load = torch.tensor([sum(cost(each, shares) for each in fill(rows, budget, shares))], device=accelerator.device)
    loads = accelerator.gather(load).tolist()
    if max(loads) <= UNEVEN * sum(loads) / len(loads):
        return rows
    gathered = gather_object([[row.to("cpu") for row in rows]])
    limit, sums = min(budget, sum(loads) / len(loads)), [0] * len(loads)
    ranks: list[list[TrainedRow]] = [[] for _ in loads]
    for unit in sorted(units_of(join(gathered), limit, shares), key=lambda unit: -cost(unit, shares)):
        least = sums.index(min(sums))
        ranks[least] += unit
        sums[least] += cost(unit, shares)
    if max(sums) >= max(loads):
        return rows
    own = accelerator.process_index
    if any(is_picture(max(row.prompt_ids + row.completion_ids)) for row in join(gathered)):
        theirs = {id(row) for row in gathered[own]}
        leaving = [row for rank, rows in enumerate(ranks) if rank != own for row in rows if id(row) in theirs]
        # Held until the rows hold theirs: pixels of what moves, and of nothing else.
        _moved = gather_object([list(dict.fromkeys(picture for row in leaving for picture in row.shown))])
        ranks[own] = [replace(row, pictures=tuple(row.shown)) for row in ranks[own]]
    return [row.to(accelerator.device) for row in ranks[own]]


# -- a step's micro-batches in passes --


def skips_first_pass(trainer: Any) -> bool:
    """Whether rollouts of vLLM need no forward pass before their step, because the loss computes the same.

    The pass stays with several optimizer steps of a batch, and for a log that shows its logprobs.
    """
    args = trainer.args
    return (
        trainer.layout.kind != "trl"
        and trainer.use_vllm
        and trainer.vllm_importance_sampling_correction
        and not args.log_rollout_tokens
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
    """Split micro-batches of one optimizer step and the same rollouts into lists under `PASSES`. Collective.

    INVARIANT: all ranks have as many passes in each micro-batch: a sharded model's forward is collective.
    """
    accelerator, args, shares = trainer.accelerator, trainer.args, trainer.layout.kind == "shared"
    training, count = trainer.model.training, len(micro_batches)
    size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
    rollouts = [rows for each in micro_batches for rows in rows_of(each)]
    loss_type, num_items = trainer.loss_type, micro_batches[0]["num_items_in_batch"]  # of all ranks and micro-batches
    mean_of = rows_in_mean(trainer, micro_batches[0])
    # INVARIANT: on all ranks or on none a rollout has further records.
    if is_weighted := loss_type == "grpo" and FURTHER_RECORDS in micro_batches[0]:
        most = most_of_ranks(max(sum(row.num_trained for row in rows) for rows in rollouts), accelerator)
        rollouts = [weighed(rows, most) for rows in rollouts]
        num_items = micro_batches[0]["num_rows_in_batch"].clamp(min=1) * most
        loss_type = "dapo"
    rows = join(rollouts)
    is_first = skips_first_pass(trainer) and "old_per_token_logps" not in micro_batches[0]
    num_trained, dummy = max(1, sum(row.num_trained for row in rows)), dummy_row(rows[0])
    longest = most_of_ranks(max(map(len, rows)), accelerator)
    num_quiet = 0
    if compares_tokens(args):
        bins = [rows]
    else:
        budget = args.max_tokens_per_pass or size * longest
        if training and loss_type != "bnpo":  # transformers weighs an evaluation's losses by rank
            rows = balance(rows, budget, shares, accelerator)
        together = accelerator.num_processes > 1 and not shares
        quiet = without_signal(trainer, rows)
        bins = []
        for each in ([row for row in rows if row.group in quiet], [row for row in rows if row.group not in quiet]):
            num_quiet = len(bins)
            bins += fill_together(each, budget, accelerator) if together else fill(each, budget, shares)
            bins += [[] for _ in range(most_of_ranks(len(bins), accelerator) - len(bins))]
    bins += [[] for _ in range(max(most_of_ranks(len(bins), accelerator), count) - len(bins))]
    sums = torch.tensor([[[float(len(rows)), float(sum(row.num_trained for row in rows))] for rows in bins]])
    of_ranks = accelerator.gather(sums.to(accelerator.device))  # (ranks, passes, 2)
    most_rows, weights = of_ranks[:, :, 0].amax(0).clamp(min=1), of_ranks[:, :, 1].sum(0)
    passes = []
    for number, (rows, num_rows, weight) in enumerate(zip(bins, most_rows.int().tolist(), weights.tolist())):
        # INVARIANT: all ranks have as many rows in a pass. TRL gathers one number per row for its metrics.
        each = to_pass([*rows, *[dummy] * (num_rows - len(rows))], trainer.pad_to_multiple_of or 1, shares)
        each["num_items_in_batch"], each.loss_type, each.is_weighted = num_items, loss_type, is_weighted
        if loss_type in MEAN_OF_ROWS:
            each.scale = num_rows / mean_of
        elif loss_type == "bnpo":  # as TRL has it: of the tokens of this rank's micro-batch
            each.scale = sum(row.num_trained for row in rows) / num_trained
        each.weight, each.is_first, each.is_quiet = weight, is_first, number < num_quiet
        passes.append(each)
    cuts = [len(passes) * k // count for k in range(count + 1)]
    return [{PASSES: passes[first:last]} for first, last in zip(cuts, cuts[1:])]


def without_signal(trainer: Any, rows: list[TrainedRow]) -> set[int | None]:
    """The groups in training in which all trained tokens have the advantage 0, so that their loss has no gradient."""
    if not trainer.model.training or trainer.beta or trainer.aux_loss_enabled or trainer.reads_more_than_advantages:
        return set()  # with a KL term, a router's loss or a term of a fork's it is not
    moves = [(row.values["advantages"].cpu() * torch.tensor(row.trained)).any() for row in rows]
    return {row.group for row in rows if row.own} - {row.group for row, each in zip(rows, moves) if each}


def rows_in_mean(trainer: Any, micro_batch: dict[str, Any]) -> float:
    """What a mean over the rows of a micro-batch divides by, the same for all micro-batches of a batch.

    INVARIANT: a scored rollout counts the same, whatever rank, micro-batch and step it is in; others are in no mean.
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
        shape, device = tuple(batch["completion_ids"].shape), batch["completion_ids"].device
        batch.shared = SharedRow(dict(enumerate(rows)), shape, device)
    batch.pictures = tuple(picture for row in rows for picture in row.pictures)
    batch.num_tokens = len(batch.shared) if shares else batch["prompt_ids"].numel() + batch["completion_ids"].numel()
    return batch


def rows_that_share(
    trainer: Any, rows: list[TrainedRow], width: int, device: torch.device, size: int | None
) -> list[SharedRow]:
    """All rows of a batch, numbered from 0, as rows that share prompts, each of which is a forward pass. Collective.

    `width` is that of the batch's completions, and `size` TRL's number of rows per pass, None for one pass.
    """
    accelerator = trainer.accelerator
    longest = most_of_ranks(max(map(len, rows)), accelerator)
    budget = (trainer.args.max_tokens_per_pass or size * longest) if size else len(rows) * longest
    bins = fill(rows, budget, shares=True)
    bins += [[replace(rows[0], trained=[])] for _ in range(most_of_ranks(len(bins), accelerator) - len(bins))]
    return [SharedRow({row.number: row for row in each}, (len(rows), width), device) for each in bins]


def pass_of_two(rows: list[TrainedRow], args: Any, multiple: int) -> Pass:
    """The two longest rows of one prompt, as a pass, or a single row; with batch size 1 the two shortest, to fit."""
    longest = -1 if args.per_device_train_batch_size > 1 else 1
    groups: dict[int, list[TrainedRow]] = defaultdict(list)  # further records of a group may have other prompts
    for row in rows:
        if row.num_trained:
            groups[row.prompt].append(row)
    pairs = [sorted(group, key=lambda row: longest * row.own)[:2] for group in groups.values()] or [rows[:1]]
    # Pictures have positions of their own, so that a pair without any would prove nothing of them.
    pair = min(pairs, key=lambda p: (not any(row.shown for row in p), -len(p), longest * sum(row.own for row in p)))
    return to_pass(pair, multiple, shares=True)


# -- the loss of a micro-batch --


def loss_in_passes(trainer: Any, model: Any, micro_batch: dict[str, Any], num_items: Any) -> torch.Tensor:
    """TRL's loss of a micro-batch. All passes but the last go backward here; at the last one's ranks exchange."""
    loss_type, aux_coef, total = trainer.loss_type, trainer.router_aux_loss_coef, 0.0
    *others, last = passes = micro_batch[PASSES]
    trainer.layout.forget_masks()  # of the pass whose backward is behind us
    trainer.loss_type = passes[0].loss_type
    trainer.router_aux_loss_coef /= len(passes)  # the router's loss is of a micro-batch
    try:
        for each in others:
            if trainer.model.training and not each.is_quiet:
                with without_sync(trainer.accelerator, model, trainer.is_deepspeed_enabled):
                    total += Trainer.training_step(trainer, model, each, num_items)
                trainer.layout.forget_masks()
            else:
                with torch.no_grad():
                    total += (loss := trainer.compute_loss(model, each))
                if each.is_quiet and abs(loss) > 0:
                    raise RunError(
                        "The loss is not 0 without advantages: set reads_more_than_advantages in its class."
                    )
        keep_in_buckets(model)
        return total + trainer.compute_loss(model, last)
    finally:
        trainer.loss_type, trainer.router_aux_loss_coef = loss_type, aux_coef


@contextmanager
def without_sync(accelerator: Any, model: Any, is_deepspeed: bool) -> Iterator[None]:
    """Gradients only add up, as in a micro-batch that is not the last one of its accumulation."""
    state = accelerator.gradient_state
    syncs_anyway, before = is_deepspeed or state.plugin_kwargs.get("sync_each_batch", False), state.sync_gradients
    state._set_sync_gradients(False)
    try:
        with nullcontext() if syncs_anyway else accelerator.no_sync(model):
            keep_in_buckets(model)
            yield
    finally:
        state._set_sync_gradients(before)


def keep_in_buckets(model: Any) -> None:
    """Let DDP exchange behind a step's first pass: its buckets then are the gradients. Else each is kept twice."""
    if isinstance(model, DistributedDataParallel):
        first = next(p for p in model.parameters() if p.requires_grad).grad is None
        model.require_backward_grad_sync |= first  # until the end of no_sync
