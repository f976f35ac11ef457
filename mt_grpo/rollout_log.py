"""The log of rollouts: a row of JSON per rollout, in segments of which all but the open one are compressed.

`rollouts.rank0.jsonl` is the open segment, to which rows are added; `rollouts.rank0.00001.jsonl.gz` is the first one
that was closed. A compressed file that is cut off cannot be read, and a plain one can, but for its last line.
docs/rollouts.md has the schema.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mt_grpo.log_rows import Scored, rollout_rows, turn_columns

logger = logging.getLogger(__name__)
SCHEMA = 1  # raised where a column changes its meaning
SEGMENT_BYTES = 64 * 2**20  # after which a segment is closed
LOG_FILES = re.compile(r"rollouts\.rank(\d+)(\.\d{5})?\.jsonl(\.gz)?")
MOST_BYTES = 4 * 2**30  # of a rank's segments; the oldest go first


def write_rows(path: Path, rows: list[dict[str, Any]], fresh: bool = False) -> None:
    """Append the rows to a file as lines of JSON; `fresh` empties the file first.

    Raises `OSError` if the file cannot be written. It then holds no incomplete line.
    """
    # Half of a character, which a model may write in JSON, has no UTF-8: it is escaped, as JSON does.
    lines = [json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") for row in rows]
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
        logger.warning(f"Step {rows[0]['step']}: rollouts are not in {path}: {error}. Training goes on.")


def log_rollouts(
    trainer: Any, inputs: list[dict[str, Any]], output: dict[str, Any], advantages: torch.Tensor, group_size: int
) -> None:
    """Add whole conversations of this rank to `rollouts.rank<r>.jsonl`.

    A new run begins it anew, and deletes an earlier run's, also where it logs none itself.

    Args:
        trainer: It has the batch's rollouts, records and rewards.
        inputs: The B dataset rows.
        output: TRL's batch for the loss.
        advantages: Of all N rollouts, (N, K).
        group_size: G.
    """
    args, rank, rollouts = trainer.args, trainer.accelerator.process_index, trainer._rollouts
    count = min(args.log_rollouts, len(rollouts))
    path = Path(args.output_dir) / f"rollouts.rank{rank}.jsonl"
    fresh = not trainer._wrote_rollouts and trainer.state.global_step == 0  # not a resumed run, whose log goes on
    if fresh and rank == 0:
        delete_other_ranks(path.parent, args.world_size if count else 0)
    if not count:
        return
    tables = trainer._logged_rewards, trainer._reward_table.turn, advantages
    scored = Scored(trainer.reward_func_names, trainer.reward_weights, *tables, group_size)
    columns = turn_columns(output, trainer._records, trainer._owners, rollouts[:count])
    tokenizer = trainer.processing_class if args.log_rollout_tokens else None
    rows = rollout_rows(rollouts[:count], inputs, scored.rows(rank * len(rollouts), count), columns, tokenizer)
    about = {"schema": SCHEMA, "rank": rank, "step": trainer.state.global_step, "mode": trainer._mode}
    write_rollouts(path, [{**about, **row} for row in rows], fresh)


def delete_other_ranks(folder: Path, world_size: int) -> None:
    """Delete what ranks have written that the run does not have, of an earlier one."""
    for path in folder.glob("rollouts.rank*"):
        if (found := LOG_FILES.fullmatch(path.name)) and int(found[1]) >= world_size:
            try:
                path.unlink()
            except OSError as error:
                logger.warning(f"{path} is of an earlier run and cannot be deleted: {error}. Delete it by hand.")


def logged_ranks(folder: Path) -> list[int]:
    """The ranks that have written into an output directory."""
    names = (path.name for path in folder.glob("rollouts.rank*"))
    return sorted({int(found[1]) for name in names if (found := LOG_FILES.fullmatch(name))})


def segment_number(path: Path) -> int:
    """Of a closed segment.

    >>> segment_number(Path("rollouts.rank0.00012.jsonl.gz"))
    12
    """
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
        logger.warning(f"{closed[0]} is deleted: the log of rollouts has {sum(sizes)} bytes, of {MOST_BYTES}.")
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
            "read_texts": List(text),
        }  # fmt: skip
    answer = first["answer"]
    nested = isinstance(answer, dict) or (isinstance(answer, list) and not all(isinstance(e, str) for e in answer))
    columns = {
        "schema": whole, "rank": whole, "step": whole, "mode": text, "index": whole, "group": whole,
        "messages": List({"role": text, "content": text}), "num_prompt_messages": whole,
        "stop_reason": text, "reward": number, "rewards": dict.fromkeys(first["rewards"], number),
        "turn_rewards": List(number), "turn_advantages": List(number),
        "answer": Json() if nested else kinds.get(type(answer), text), "turns": List(turn),
        "num_prompt_tokens": whole, "num_tokens": whole, "records": whole, "policy_version": whole, "error": text,
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
                logger.warning(f"{segment} is cut off, and what is behind is left out: {error}")
    if lost:
        logger.warning(
            f"{folder}: {lost} lines are no JSON, and left out. A run that was killed may have left half of one."
        )
