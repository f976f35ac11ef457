"""The log of rollouts: a row of JSON per rollout, in segments of which all but the open one are compressed.

`rollouts.rank0.jsonl` is the open segment, to which rows are added; `rollouts.rank0.00001.jsonl.gz` is the first one
that was closed. A compressed file that is cut off cannot be read, and a plain one can, but for its last line.
docs/rollouts.md has the schema.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mt_grpo.base.json_types import json_text
from mt_grpo.conversation.pictures import readable
from mt_grpo.generation.versions import versions_of
from mt_grpo.images.pictures import Picture, pictures_in
from mt_grpo.rollout import Message, Record, Rollout, Turn
from mt_grpo.training.batch import Batch

logger = logging.getLogger(__name__)


# Rollouts as rows of their log: plain values, one row per conversation. docs/rollouts.md has the columns.


TOKEN_COLUMNS = ("loss_mask", "advantages", "trainer_logprobs")  # of a turn, from the batch of the loss


@dataclass(frozen=True)
class Scored:
    """The rewards of a batch of n rollouts, with F reward functions and K turns."""

    names: list[str]  # (F,), of the reward functions
    reward: torch.Tensor  # (n,), what is trained, NaN without a score
    rewards: torch.Tensor  # (n, F), one number per rollout
    turn_rewards: torch.Tensor  # (n, K), the weighted rewards of functions that give one per turn
    advantages: torch.Tensor  # (n, K), one number per turn
    group_size: int  # G
    outcome_advantages: torch.Tensor  # (n,), what the outcome alone gives every turn
    batch_size: int | None = None  # N, rollouts of the batch over all ranks, logged or not


def finite(values: list[float | None] | None) -> list[float | None] | None:
    """The values with None for NaN and infinities, which JSON does not have.

    >>> finite([0.5, float("nan"), float("-inf"), None])
    [0.5, None, None, None]
    """
    return values and [None if value is None or not math.isfinite(value) else value for value in values]


def turn_columns(
    output: dict[str, Any], records: list[Record], owners: list[int], rollouts: list[Rollout]
) -> list[list[dict[str, list | None]]]:
    """For each rollout and turn the `TOKEN_COLUMNS`: a value per sampled token, as the loss reads them.

    A turn that is in no row of the loss has a mask of zeros. `trainer_logprobs` is None where the trainer computed
    none before its step.

    Args:
        output: TRL's batch of M rows: `tool_mask` and `advantages` (M, C), and maybe `old_per_token_logps`.
        records: The M records of those rows.
        owners: The rollout of each record.
        rollouts: Those that are asked for, the first ones of the batch.
    """
    names = ("tool_mask", "advantages", "old_per_token_logps")
    lengths = [[len(turn.token_ids) for turn in rollout.turns] for rollout in rollouts]
    found: list[list[dict[str, list | None]]] = [
        [dict(zip(TOKEN_COLUMNS, ([0] * length, [0.0] * length, None))) for length in row] for row in lengths
    ]
    for i, (record, owner) in enumerate(zip(records, owners, strict=True)):
        if owner >= len(rollouts):
            continue
        rows = [output[name][i].tolist() if output.get(name) is not None else None for name in names]
        at = 0
        for k, turn in zip(numbers_of(record), record.turns):
            here = slice(at, at + len(turn.token_ids))
            found[owner][k] = {name: row and row[here] for name, row in zip(TOKEN_COLUMNS, rows)}
            at += len(turn.token_ids) + len(turn.observation_ids)
    return found


def numbers_of(record: Record) -> list[int] | range:
    """The numbers of a record's turns in their rollout."""
    return range(len(record.turns)) if record.numbers is None else record.numbers


def pictures_read(rollout: Rollout) -> list[Picture]:
    """The pictures of a rollout's records, each once, in the order in which they were read."""
    found = (pictures_in(record.prompt_ids + record.completion_ids) for record in rollout.records)
    return list(dict.fromkeys(picture for pictures in found for picture in pictures))


def image_rows(rollout: Rollout) -> list[dict[str, Any]]:
    """Names, sizes in pixels and tokens of the pictures that a rollout read."""
    return [
        {"name": each.name, "width": each.image.width, "height": each.image.height, "tokens": each.num_tokens}
        for each in pictures_read(rollout)
    ]


def rollout_rows(
    rollouts: list[Rollout],
    inputs: list[dict[str, Any]],
    scored: Scored,
    columns: list[list[dict[str, list | None]]],
    tokenizer: Any = None,
) -> list[dict[str, Any]]:
    """Whole conversations as rows of the rollout log.

    Args:
        rollouts: The n rollouts to log.
        inputs: Their dataset rows.
        scored: What they were given.
        columns: Of `turn_columns`.
        tokenizer: Given where turns have their tokens.
    """
    lists = scored.rewards.tolist(), scored.turn_rewards.tolist(), scored.advantages.tolist()
    return [
        {
            "index": rollout.index,
            "group": rollout.index // scored.group_size,
            "group_size": scored.group_size,
            "batch_size": scored.batch_size,
            "messages": rollout.prompt_messages + rollout.messages,
            "num_prompt_messages": len(rollout.prompt_messages),
            "stop_reason": rollout.stop_reason,
            "reward": reward,
            "rewards": dict(zip(scored.names, finite(per_function), strict=True)),
            "turn_rewards": finite(per_turn[: len(rollout.turns)]),
            "turn_advantages": finite(advantage[: len(rollout.turns)]),
            "outcome_advantage": outcome,
            "answer": row.get("answer"),
            "turns": turn_rows(rollout, of_rollout, tokenizer),
            "images": image_rows(rollout),
            "num_prompt_tokens": len(rollout.prompt_ids),
            "num_tokens": rollout.new_tokens,
            "records": len(rollout.records),
            "policy_version": rollout.policy_version,
            "error": None if rollout.error is None else str(rollout.error),
            "info": [json_text(turn.info, ensure_ascii=False, default=str, skipkeys=True) for turn in rollout.turns],
        }
        for rollout, row, reward, per_function, per_turn, advantage, outcome, of_rollout in zip(
            rollouts, inputs, finite(scored.reward.tolist()), *lists, scored.outcome_advantages.tolist(), columns
        )
    ]


def turn_rows(rollout: Rollout, columns: list[dict[str, list | None]], tokenizer: Any = None) -> list[dict[str, Any]]:
    """The turns of a row: which record each is in, and where one begins what the model read before.

    What the first record begins with are the row's own messages.
    """
    rows = [turn_row(turn, of_turn, tokenizer) for turn, of_turn in zip(rollout.turns, columns)]
    for number, record in enumerate(rollout.records):
        numbers = numbers_of(record)
        for before, k in zip([None, *numbers], numbers):
            turn, begins = rollout.turns[k], before is None and number > 0
            rows[k] |= {
                "record": number,
                "after": before,
                "context": [message_row(each) for each in turn.context.messages] if begins else None,
                "tools": None if turn.tools is None else json_text(turn.tools, ensure_ascii=False, default=str),
                **({"prompt_ids": record.prompt_ids if before is None else None} if tokenizer is not None else {}),
            }
    return rows


def message_row(message: Message) -> dict[str, Any]:
    """A message with its text, and with all else that it has as JSON.

    >>> message_row({"role": "tool", "content": "2", "tool_call_id": "a"})
    {'role': 'tool', 'content': '2', 'more': '{"tool_call_id": "a"}'}
    """
    content = message.get("content")
    more = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    text = {"ensure_ascii": False, "default": str}
    return {
        "role": message["role"],
        "content": content if isinstance(content, str) else json_text(content, **text),
        "more": json_text(more, **text) if more else None,
    }


def turn_row(turn: Turn, columns: dict[str, list | None], tokenizer: Any = None) -> dict[str, Any]:
    """A turn of a row. Arguments of calls are JSON as text, since each tool has others."""
    logprobs = [value for value in finite(turn.logprobs) or [] if value is not None]
    row = {
        "text": turn.text, "answer": turn.answer, "finish_reason": turn.finish_reason, "seconds": turn.seconds,
        "calls": [{"name": call.name, "arguments": json_text(call.arguments, ensure_ascii=False, default=str),
                   "error": call.error} for call in turn.calls],
        "results": [{"text": result.text, "error": result.error, "seconds": result.seconds, "reward": result.reward}
                    for result in turn.results],
        "observation": further_text(turn), "num_tokens": len(turn.token_ids), "num_read": len(turn.observation_ids),
        "num_trained": int(sum(columns["loss_mask"])), "reward": turn.reward, "policy_versions": versions_of(turn),
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "min_logprob": min(logprobs, default=None),
    }  # fmt: skip
    if tokenizer is not None:
        row |= {
            "token_ids": turn.token_ids,
            "token_texts": token_texts(tokenizer, turn.token_ids),
            "logprobs": finite(turn.logprobs),
            **columns,
            "trainer_logprobs": finite(columns["trainer_logprobs"]),
            "read_ids": turn.observation_ids,
            "read_texts": token_texts(tokenizer, turn.observation_ids),
        }
    return row


def further_text(turn: Turn) -> str | None:
    """The text after the results of a turn: messages of an environment or a user. None without any.

    >>> from mt_grpo.rollout import ToolResult
    >>> said = [{"role": "user", "content": "<result>4</result>"}, {"role": "user", "content": "Sure?"}]
    >>> further_text(Turn([], None, "", "stop", results=[ToolResult("4")], messages=said))
    'Sure?'
    """
    results = [result.text for result in turn.results if result.text]
    said = [str(message["content"]) for message in turn.messages]
    return "\n".join(text for text in said if not any(result in text for result in results)) or None


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token alone, with the space that some tokenizers drop at the start of a text.

    A token that is a part of a character is U+FFFD.
    """
    return [
        f" {text}" if piece.startswith("\u2581") and not text.startswith((" ", "\u2581")) else text
        for text, piece in zip(
            (tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False) for i in ids),
            (tokenizer.convert_ids_to_tokens(i) or "" for i in ids),
        )
    ]


SCHEMA = 1  # raised where a column changes its meaning
SEGMENT_BYTES = 64 * 2**20  # after which a segment is closed
LOG_FILES = re.compile(r"rollouts\.rank(\d+)(\.\d{5})?\.jsonl(\.gz)?")
IMAGE_FOLDER, MOST_IMAGES = "images", 1000  # the folder beside the log, and how many a rank writes into it
MOST_BYTES = 4 * 2**30  # of a rank's segments; the oldest go first


def write_rows(path: Path, rows: list[dict[str, Any]], fresh: bool = False) -> None:
    """Append the rows to a file as lines of JSON; `fresh` empties the file first.

    Raises `OSError` if the file cannot be written. It then holds no incomplete line.
    """
    # Half of a character, which a model may write in JSON, has no UTF-8: it is escaped, as JSON does.
    texts = [readable(json.dumps(row, ensure_ascii=False, default=str)) for row in rows]
    lines = [text.encode("utf-8", "backslashreplace") for text in texts]
    path.parent.mkdir(parents=True, exist_ok=True)
    size = whole_lines(path) if path.is_file() and not fresh else 0
    try:
        with open(path, "wb" if fresh else "ab") as file:
            file.writelines(line + b"\n" for line in lines)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def whole_lines(path: Path) -> int:
    """The size of a file, without half of a line that a kill has left, which is cut off."""
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                size = path.read_bytes().rfind(b"\n") + 1
                file.truncate(size)
        return size


def write_rollouts(path: Path, rows: list[dict[str, Any]], fresh: bool) -> None:
    """Add rows to the open segment, and close it where it is full. `fresh` deletes what an earlier run has written.

    Warns where that fails: neither a full disk nor what an environment says may end the run.
    """
    try:
        for old in [*segments(path), *path.parent.glob(f".{path.stem}.*.part")] if fresh else ():
            old.unlink()
        write_rows(path, rows, fresh)
        if path.stat().st_size >= SEGMENT_BYTES:
            close_segment(path)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        logger.warning(
            f"Step {rows[0]['step']}: the rollouts could not be written to {path}: {error}. Training continues."
        )


class RolloutLog:
    """Writes a rank's whole conversations to `rollouts.rank<r>.jsonl`.

    A new run begins it anew, and deletes an earlier run's, also where it logs none itself.

    Args:
        folder: The run's `output_dir`.
        rank: Of this process.
        num_ranks: Of the run.
        most: Rollouts of a batch that are written, per rank.
        names: (F,), of the reward functions.
        tokenizer: Given where turns have their tokens.
    """

    def __init__(
        self, folder: str | Path, rank: int, num_ranks: int, most: int, names: list[str], tokenizer: Any = None
    ):
        self.path = Path(folder) / f"rollouts.rank{rank}.jsonl"
        self.rank, self.num_ranks, self.most = rank, num_ranks, most
        self.names, self.tokenizer, self.begun, self.num_images = names, tokenizer, False, 0  # written by this process

    def _begin(self, step: int) -> bool:
        """Whether the log begins anew, which it does at the start of a new run."""
        fresh = not self.begun and step == 0
        self.begun = True
        if fresh and self.rank == 0:
            delete_other_ranks(self.path.parent, self.num_ranks if self.most else 0)
        return fresh

    def add(
        self,
        batch: Batch,
        output: dict[str, Any],
        advantages: torch.Tensor,
        outcome: torch.Tensor,
        step: int,
    ) -> None:
        """Write the first rollouts of a batch.

        Args:
            batch: With all that it is filled in with.
            output: TRL's batch for the loss.
            advantages: Of all N rollouts, (N, K).
            outcome: What the outcome alone gives them, (N,).
            step: Optimizer steps so far. A run that is resumed begins with others than 0, and its log goes on.
        """
        count = min(self.most, len(batch.rollouts))
        fresh = self._begin(step)
        if not count:
            return
        tables = [batch.own(x)[:count] for x in (batch.reward, batch.logged, batch.rewards.turn, advantages)]
        part = batch.own(outcome)[:count]
        scored = Scored(self.names, *tables, batch.group_size, part, len(advantages))
        rollouts = batch.rollouts[:count]
        columns = turn_columns(output, batch.records, batch.owners, rollouts)
        self._write(rollouts, batch.rows, scored, columns, {"step": step, "mode": batch.mode}, fresh)

    def _write(
        self, rollouts: list[Rollout], inputs: list[dict], scored: Scored, columns: list, about: dict, fresh: bool
    ) -> None:
        """Write rollouts and their images. `about`: the columns `step` and `mode`."""
        self._save_images(rollouts)
        about = {"schema": SCHEMA, "rank": self.rank, **about}
        rows = rollout_rows(rollouts, inputs, scored, columns, self.tokenizer)
        write_rollouts(self.path, [{**about, **row} for row in rows], fresh)

    def _save_images(self, rollouts: list[Rollout]) -> None:
        """Write the pictures that these rollouts read beside the log, each once, by its name in it (`readable`).

        A full disk does not end the run, and neither does an image that cannot be written.
        """
        folder = self.path.parent / IMAGE_FOLDER
        for picture in {each for rollout in rollouts for each in pictures_read(rollout)}:
            path = folder / f"{picture.name}.png"
            if self.num_images >= MOST_IMAGES or path.is_file():
                continue
            try:
                folder.mkdir(parents=True, exist_ok=True)
                partial = path.with_suffix(f".{os.getpid()}.partial")  # other ranks may write the same picture
                picture.image.save(partial, "PNG")
                partial.rename(path)
            except OSError as error:
                logger.warning(f"{path} cannot be written: {error}. Training continues without this image.")
                self.num_images = MOST_IMAGES
                return
            self.num_images += 1
            if self.num_images == MOST_IMAGES:
                logger.warning(
                    f"{folder} got {MOST_IMAGES} images. The log of later rollouts only names their images."
                )

    def add_dropped(self, batch: Batch, places: list[int], step: int) -> None:
        """Write rollouts of a batch that are dropped, with the mode `dropped`: they train nothing.

        Args:
            batch: Scored.
            places: Of this rank's rollouts that are dropped. At most as many are written as of a batch.
            step: Optimizer steps so far.
        """
        places = places[: self.most]
        if not places:
            return
        rollouts = [batch.rollouts[i] for i in places]
        index = torch.tensor([batch.first + i for i in places], dtype=torch.long)
        rewards = batch.reward[index], batch.logged[index.to(batch.logged.device)], batch.rewards.turn[index]
        nothing = torch.zeros(batch.rewards.turn.shape)[index], batch.group_size, torch.zeros(len(places))
        scored = Scored(self.names, *rewards, *nothing, len(batch.rewards.outcome))
        inputs, about = [batch.rows[i] for i in places], {"step": step, "mode": "dropped"}
        self._write(rollouts, inputs, scored, turn_columns({}, [], [], rollouts), about, self._begin(step))


def delete_other_ranks(folder: Path, world_size: int) -> None:
    """Delete what ranks have written that the run does not have, of an earlier one."""
    for path in folder.glob("rollouts.rank*"):
        if (found := LOG_FILES.fullmatch(path.name)) and int(found[1]) >= world_size:
            try:
                path.unlink()
            except OSError as error:
                logger.warning(f"{path} belongs to an earlier run and cannot be deleted: {error}. Delete it yourself.")


def logged_ranks(folder: Path) -> list[int]:
    """The ranks that have written into an output directory."""
    names = (path.name for path in folder.glob("rollouts.rank*"))
    return sorted({int(found[1]) for name in names if (found := LOG_FILES.fullmatch(name))})


def segment_number(path: Path) -> int:
    """Number of a closed segment, parsed from its file name, such as 12 of `rollouts.rank0.00012.jsonl.gz`."""
    return int(LOG_FILES.fullmatch(path.name)[2][1:])


def segments(path: Path) -> list[Path]:
    """The closed segments of an open one, oldest first: compressed, or plain where a run was killed in between."""
    pattern = re.compile(re.escape(path.stem) + r"\.(\d{5})\.jsonl(\.gz)?")
    found = sorted(each for each in path.parent.glob(f"{path.stem}.*") if pattern.fullmatch(each.name))
    return [each for each in found if each.suffix == ".gz" or each.with_name(each.name + ".gz") not in found]


def close_segment(path: Path) -> None:
    """Compress the open segment, and delete the oldest ones where all of them together are too large.

    A kill leaves a plain segment, which is compressed with the next one; where both are there, the plain one is over.
    """
    for each in segments(path):
        if each.suffix == ".gz":
            each.with_suffix("").unlink(missing_ok=True)
    closed = segments(path)
    number = segment_number(closed[-1]) + 1 if closed else 1
    path.rename(path.with_name(f"{path.stem}.{number:05d}.jsonl"))
    for plain in segments(path):
        if plain.suffix == ".jsonl":
            part = plain.with_name(f".{plain.name}.part")  # no reader takes it for a segment
            with open(plain, "rb") as source, open(part, "wb") as target:
                with gzip.GzipFile("", "wb", compresslevel=6, fileobj=target) as compressed:
                    shutil.copyfileobj(source, compressed)
                target.flush()
                os.fsync(target.fileno())
            part.rename(plain.with_name(plain.name + ".gz"))
            plain.unlink()
    closed = segments(path)
    sizes = [segment.stat().st_size for segment in closed]
    while len(closed) > 1 and sum(sizes) > MOST_BYTES:
        logger.warning(f"{closed[0]} is deleted: the log of rollouts may have {MOST_BYTES / 2**30:g} GiB at most.")
        closed.pop(0).unlink()
        sizes.pop(0)


def rollout_features(folder: str | Path) -> Any:
    """The `datasets.Features` of a log, for `load_dataset("json", ..., features=...)`.

    Without them the types of columns are taken from the first 10 MB, which fails where nothing was answered or called
    in them. The names of reward functions and the type of `answer` are those of the first row: a dict, and a list of
    other things than texts, is `Json`. Raises `ValueError` where there is none.
    """
    from datasets import Features, Json, List, Value

    first = next(read_rollouts(folder), None)
    if first is None:
        raise ValueError(f"{folder} has no rollouts. Expected the output_dir of a run with log_rollouts above 0.")
    text, number, whole = Value("string"), Value("float64"), Value("int64")
    kinds: dict[type, Any] = {list: List(text), float: number, int: whole, bool: Value("bool")}
    turn = {
        "text": text, "answer": text, "finish_reason": text, "seconds": number,
        "calls": List({"name": text, "arguments": text, "error": text}),
        "results": List({"text": text, "error": text, "seconds": number, "reward": number}),
        "observation": text, "num_tokens": whole, "num_read": whole, "num_trained": whole, "reward": number,
        "policy_versions": List(whole),
        "mean_logprob": number, "min_logprob": number, "record": whole, "after": whole,
        "context": List({"role": text, "content": text, "more": text}), "tools": text,
    }  # fmt: skip
    if any("token_ids" in each for each in first["turns"]):
        turn |= {
            "token_ids": List(whole), "token_texts": List(text), "logprobs": List(number), "loss_mask": List(whole),
            "advantages": List(number), "trainer_logprobs": List(number), "read_ids": List(whole),
            "read_texts": List(text), "prompt_ids": List(whole),
        }  # fmt: skip
    answer = first["answer"]
    nested = isinstance(answer, dict) or (isinstance(answer, list) and not all(isinstance(e, str) for e in answer))
    columns = {
        "schema": whole, "rank": whole, "step": whole, "mode": text, "index": whole, "group": whole,
        "group_size": whole, "batch_size": whole, "outcome_advantage": number,
        "messages": List({"role": text, "content": text}), "num_prompt_messages": whole,
        "stop_reason": text, "reward": number, "rewards": dict.fromkeys(first["rewards"], number),
        "turn_rewards": List(number), "turn_advantages": List(number),
        "answer": Json() if nested else kinds.get(type(answer), text), "turns": List(turn),
        "images": List({"name": text, "width": whole, "height": whole, "tokens": whole}),
        "num_prompt_tokens": whole, "num_tokens": whole, "records": whole,
        "policy_version": whole, "error": text,
        "info": List(text),
    }  # fmt: skip
    return Features({name: columns[name] for name in first if name in columns})


def read_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of an output directory, rank by rank, oldest first. A warning counts the lines that are no JSON."""
    lost = 0
    for rank in logged_ranks(Path(folder)):
        path = Path(folder) / f"rollouts.rank{rank}.jsonl"
        for segment in [*segments(path), *([path] if path.exists() else [])]:
            try:
                with (gzip.open if segment.suffix == ".gz" else open)(segment, "rt", encoding="utf-8") as file:
                    for line in file:
                        try:
                            yield json.loads(line)
                        except json.JSONDecodeError:
                            lost += 1
            except (EOFError, gzip.BadGzipFile) as error:
                logger.warning(f"{segment} is truncated, and the rest of it is skipped: {error}")
    if lost:
        logger.warning(
            f"{folder}: {lost} lines are not JSON and are skipped. A killed run may have left an incomplete line."
        )
