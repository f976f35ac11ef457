"""The log of rollouts: a row of JSON per rollout, in segments.

`rollouts.rank0.jsonl` is the open segment, to which rows are added, and `rollouts.rank0.00001.jsonl` is the first one
that was closed. docs/rollouts.md has the columns of a row.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mt_grpo.base.errors import tell_once
from mt_grpo.base.rows import json_text
from mt_grpo.generation.samples import versions_of
from mt_grpo.images.pictures import Picture, pictures_in, readable
from mt_grpo.rollout import Message, Record, Rollout, Turn
from mt_grpo.training.batch import Batch

logger = logging.getLogger(__name__)

SCHEMA = 1  # raised when a column changes its meaning
TOKEN_COLUMNS = {"loss_mask": "tool_mask", "advantages": "advantages", "trainer_logprobs": "old_per_token_logps"}
SEGMENT_BYTES = 64 * 2**20  # at which a segment is closed
# What a turn has beside its columns, for `train_from_rollouts` (mt_grpo/integrations/replay).
REST = ("messages", "continuation", "context", "after", "trained", "mask", "went_on", "state_key", "open_thinking")
IMAGE_FOLDER, MOST_IMAGES = "images", 1000  # the folder next to the log, and how many images are written into it
SEGMENT = re.compile(r"rollouts\.rank(\d+)(?:\.(\d{5}))?\.jsonl")  # rank, number unless it is the open one


def turn_columns(
    output: dict[str, Any], records: list[Record], owners: list[int], rollouts: list[Rollout]
) -> list[list[dict[str, list | None]]]:
    """The `TOKEN_COLUMNS` of each turn of the first rollouts: a value per sampled token, as the loss reads them.

    `output` is TRL's batch of M rows, and `owners` has the rollout of each of their M records. A turn that is in no
    row has a mask of zeros. `trainer_logprobs` may be None.
    """
    tables = {name: output[key].cpu() for name, key in TOKEN_COLUMNS.items() if output.get(key) is not None}
    columns = [
        [dict(zip(TOKEN_COLUMNS, ([0] * len(t.token_ids), [0.0] * len(t.token_ids), None))) for t in rollout.turns]
        for rollout in rollouts
    ]
    for i, (record, owner) in enumerate(zip(records, owners, strict=True)):
        at = 0
        for k, turn in zip(record.numbers or (), record.turns if owner < len(rollouts) else ()):
            end = at + len(turn.token_ids)
            columns[owner][k] |= {name: table[i, at:end].tolist() for name, table in tables.items()}
            at = end + len(turn.observation_ids)
    return columns


def pictures_read(rollout: Rollout) -> list[Picture]:
    """The images in a rollout's records, each once, in the order in which they were read."""
    pictures = (pictures_in(record.prompt_ids + record.completion_ids) for record in rollout.records)
    return list(dict.fromkeys(picture for each in pictures for picture in each))


def rollout_rows(
    batch: Batch,
    places: list[int],
    names: list[str],
    advantages: torch.Tensor,
    outcome: torch.Tensor,
    columns: list[list[dict[str, list | None]]],
    tokenizer: Any = None,
) -> list[dict[str, Any]]:
    """The conversations at some places of a scored batch of this rank, as rows of the log.

    `names` are those of the reward functions. `advantages` (N, K) and `outcome` (N,), the part that the outcome alone
    gives every turn, are of all N rollouts, and `columns` are the `turn_columns` of those at `places`. With a
    tokenizer turns have their tokens.
    """
    table = batch.rewards
    tables = batch.reward, batch.logged, table.turn, advantages, outcome, table.outcome, table.rollout_turn
    values = zip(*(batch.own(table).cpu()[places].tolist() for table in tables))
    rows = []
    for i, of_turns, (reward, per_function, per_turn, advantage, of_outcome, *whole) in zip(places, columns, values):
        rollout = batch.rollouts[i]
        row = {
            "index": rollout.index,
            "group": rollout.index // batch.group_size,
            "group_size": batch.group_size,
            "batch_size": len(batch.rewards.outcome),
            "messages": rollout.prompt_messages + rollout.messages,
            "num_prompt_messages": len(rollout.prompt_messages),
            "stop_reason": rollout.stop_reason,
            "reward": reward,
            "rewards": dict(zip(names, per_function, strict=True)),
            "turn_rewards": per_turn[: len(rollout.turns)],
            "turn_advantages": advantage[: len(rollout.turns)],
            "outcome_advantage": of_outcome,
            "answer": batch.rows[i].get("answer"),
            "turns": turn_rows(rollout, of_turns, tokenizer),
            "images": [
                {"name": each.name, "width": each.image.width, "height": each.image.height, "tokens": each.num_tokens}
                for each in pictures_read(rollout)
            ],
            "num_prompt_tokens": len(rollout.prompt_ids),
            "num_tokens": rollout.new_tokens,
            "records": len(rollout.records),
            "policy_version": rollout.policy_version,
            "error": None if rollout.error is None else str(rollout.error),
            "info": [json_or_text(turn.info, skipkeys=True) for turn in rollout.turns],
        }
        if tokenizer is not None:
            more = {"outcome": whole[0], "rollout_turn": whole[1], "reward": rollout.reward, "row": batch.rows[i]}
            more |= {"first_messages": rollout.first_messages, "prompt_ids": rollout.prompt_ids}
            row["replay"] = json_or_text(more)
        rows.append(row)
    return rows


# INVARIANT: NaN and infinities, which JSON does not have, are null. What else it does not have is text.
json_or_text = partial(json_text, ensure_ascii=False, default=str)


def turn_rows(rollout: Rollout, columns: list[dict[str, list | None]], tokenizer: Any) -> list[dict[str, Any]]:
    """The turns of a row: in which record each is, and what the model read before it if a further record begins."""
    rows = [turn_row(turn, of_turn, tokenizer) for turn, of_turn in zip(rollout.turns, columns)]
    for number, record in enumerate(rollout.records):
        for before, k in zip([None, *record.numbers], record.numbers):
            turn, begins = rollout.turns[k], before is None and number > 0
            rows[k] |= {
                "record": number,
                "after": before,
                "context": [message_row(each) for each in turn.context.messages] if begins else None,
                "tools": None if turn.tools is None else json_or_text(turn.tools),
            }
            if tokenizer is not None:
                rows[k]["prompt_ids"] = record.prompt_ids if before is None else None
    return rows


def message_row(message: Message) -> dict[str, Any]:
    """A message with its text, and with everything else that it has as JSON."""
    content = message.get("content")
    content = content if isinstance(content, str) else json_or_text(content)
    more = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    return {"role": message["role"], "content": content, "more": json_or_text(more) if more else None}


def turn_row(turn: Turn, columns: dict[str, list | None], tokenizer: Any = None) -> dict[str, Any]:
    """A turn of a row. The arguments of calls are JSON as text."""
    logprobs = [value for value in turn.logprobs or [] if math.isfinite(value)]
    # What was read after the turn and is no result: messages of an environment or a user.
    results = [result.text for result in turn.results if result.text]
    said = [str(message["content"]) for message in turn.messages]
    further = [text for text in said if not any(result in text for result in results)]
    row = {
        "text": turn.text, "answer": turn.answer, "finish_reason": turn.finish_reason, "seconds": turn.seconds,
        "calls": [{"name": call.name, "arguments": json_or_text(call.arguments), "error": call.error}
                  for call in turn.calls],
        "results": [{"text": result.text, "error": result.error, "seconds": result.seconds, "reward": result.reward}
                    for result in turn.results],
        "observation": "\n".join(further) or None, "num_tokens": len(turn.token_ids),
        "num_read": len(turn.observation_ids), "num_trained": int(sum(columns["loss_mask"])), "reward": turn.reward,
        "policy_versions": versions_of(turn), "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "min_logprob": min(logprobs, default=None),
    }  # fmt: skip
    if tokenizer is not None:
        row |= {
            "token_ids": turn.token_ids,
            "token_texts": token_texts(tokenizer, turn.token_ids),
            "logprobs": turn.logprobs,
            **columns,
            "read_ids": turn.observation_ids,
            "read_texts": token_texts(tokenizer, turn.observation_ids),
            "replay": json_or_text({name: getattr(turn, name) for name in REST}),
        }
    return row


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token alone, with the space that some tokenizers drop at the beginning of a text."""
    texts = []
    for i in ids:
        text = tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = tokenizer.convert_ids_to_tokens(i) or ""
        texts.append(f" {text}" if piece.startswith("\u2581") and not text.startswith((" ", "\u2581")) else text)
    return texts


class RolloutLog:
    """Writes the first `log_rollouts` conversations of each batch of a rank. A new run begins the log anew."""

    def __init__(self, trainer: Any):
        self.trainer, self.args, self.rank = trainer, trainer.args, trainer.accelerator.process_index
        self.names = trainer.reward_func_names
        self.tokenizer = trainer.processing_class if self.args.log_rollout_tokens else None
        self.path = Path(self.args.output_dir) / f"rollouts.rank{self.rank}.jsonl"
        self.begun = False  # by this process

    def add(self, batch: Batch, output: dict, advantages: torch.Tensor, outcome: torch.Tensor, step: int) -> None:
        """Write rollouts of a scored batch after `step` optimizer steps. `rollout_rows` says what the rest is."""
        places, loss = list(range(len(batch.rollouts))), (output, batch.records, batch.owners)
        self._write(batch, places, batch.mode, step, loss, advantages, outcome)

    def add_dropped(self, batch: Batch, places: list[int], step: int) -> None:
        """Write the rollouts at some places of a scored batch that others replace, with the mode `dropped`."""
        table = batch.rewards.turn
        self._write(batch, places, "dropped", step, ({}, [], []), torch.zeros(table.shape), torch.zeros(len(table)))

    def _write(self, batch: Batch, places: list[int], mode: str, step: int, loss: tuple, *values: Any) -> None:
        if not self.begun and step == 0:  # a new run, and not a resumed one
            num_ranks = self.args.world_size if self.args.log_rollouts else 0
            for rank, files in segments(self.path.parent).items():
                for path in files.values() if rank == self.rank or (self.rank == 0 and rank >= num_ranks) else ():
                    path.unlink(missing_ok=True)  # another rank may delete it, too
        self.begun = True
        if places := places[: self.args.log_rollouts]:
            rollouts = [batch.rollouts[i] for i in places]
            rows = rollout_rows(batch, places, self.names, *values, turn_columns(*loss, rollouts), self.tokenizer)
            micro_batch = self.trainer._step % self.args.gradient_accumulation_steps
            about = {"schema": SCHEMA, "rank": self.rank, "step": step, "micro_batch": micro_batch, "mode": mode}
            pictures = {picture for rollout in rollouts for picture in pictures_read(rollout)}
            write_rollouts(self.path, [{**about, **row} for row in rows], pictures)


def write_rollouts(path: Path, rows: list[dict[str, Any]], pictures: Iterable[Picture] = ()) -> None:
    """Add rows to the open segment, close it if it is full, and save images. A failure is only a warning."""
    try:
        write_rows(path, rows)
        if path.stat().st_size >= SEGMENT_BYTES:
            rank = int(SEGMENT.fullmatch(path.name)[1])
            path.rename(path.with_name(f"{path.stem}.{max(segments(path.parent)[rank]):05d}.jsonl"))
        save_images(path.parent / IMAGE_FOLDER, pictures)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        logger.warning(f"Step {rows[0]['step']}: the rollouts could not be written: {error}. Training continues.")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a file as lines of JSON, without an incomplete last line that a kill or a full disk has left."""
    # Half of a character, which a model may write in JSON, has no UTF-8: it is escaped, as JSON does.
    lines = [readable(json_or_text(row)).encode("utf-8", "backslashreplace") + b"\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:  # which writes at the end, wherever it has read
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.writelines(lines)


def save_images(folder: Path, pictures: Iterable[Picture]) -> None:
    """Write images into a folder, each once, by its name in the log, until the folder has `MOST_IMAGES`."""
    names = {path.stem for path in folder.glob("*.png")}
    for picture in pictures:
        if picture.name not in names and len(names) >= MOST_IMAGES:
            tell_once(f"{folder} has {MOST_IMAGES} images. The log of later rollouts only names their images.")
        elif picture.name not in names:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{picture.name}.{os.getpid()}.partial"  # other ranks may write the same image
            picture.image.save(partial, "PNG")
            partial.rename(folder / f"{picture.name}.png")
            names.add(picture.name)


def segments(folder: Path) -> dict[int, dict[int, Path]]:
    """The segments of each rank in an output directory by their numbers, oldest first. The last one is open."""
    of_rank = {}
    for path in sorted(folder.glob("rollouts.rank*")):  # numbers before the open segment
        if match := SEGMENT.fullmatch(path.name):
            files = of_rank.setdefault(int(match[1]), {})
            files[int(match[2] or max(files, default=0) + 1)] = path
    return dict(sorted(of_rank.items()))


def read_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of an output directory, rank by rank, oldest first. A warning counts the lines that are not JSON."""
    lost = 0
    for segment in [path for files in segments(Path(folder)).values() for path in files.values()]:
        with open(segment, "rb") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    lost += 1
    if lost:
        logger.warning(f"{folder}: {lost} lines are not JSON and are skipped. A killed run may have left them.")
