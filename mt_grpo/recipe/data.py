"""Training and test rows: generated, from files, or from the Hub."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from mt_grpo.base.rows import DataRow, Rows
from mt_grpo.conversation.conversations import check_conversations


def make_arithmetic(num_rows: int, seed: int, split: str = "train") -> list[dict[str, str]]:
    """Sums, differences and products of two or three numbers from 2 to 99, without repeats.

    An expression belongs to `test` if its CRC-32 is divisible by 10, so that no test problem is ever trained on.

    >>> make_arithmetic(1, 0)
    [{'question': 'What is 99 - 55 * 7?', 'answer': '-286'}]
    """
    rng = random.Random(seed)
    rows = {}  # by expression
    while len(rows) < num_rows:
        numbers = [rng.randint(2, 99) for _ in range(rng.choice((2, 3)))]
        signs = [rng.choice("+-*") for _ in numbers[1:]]
        expression = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs, numbers[1:], strict=True))
        if (zlib.crc32(expression.encode()) % 10 == 0) == (split == "test"):
            rows[expression] = {"question": f"What is {expression}?", "answer": str(eval(expression))}
    return list(rows.values())


def make_chain(num_rows: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
    """Chains of three or four operations, without repeats, of values from 0 to 999. Splits: as in `make_arithmetic`.

    >>> make_chain(1, 16)
    [{'question': 'Start with 9, then + 6, then - 7, then * 4.', 'steps': ['15', '8', '32'], 'answer': '32'}]
    """
    rng = random.Random(seed)
    rows = {}  # by question
    while len(rows) < num_rows:
        value = rng.randint(2, 20)
        question, steps = f"Start with {value}", []
        for _ in range(rng.choice((3, 4))):
            sign, number = rng.choice("+-*"), rng.randint(2, 9)
            value = {"+": value + number, "-": value - number, "*": value * number}[sign]
            question += f", then {sign} {number}"
            steps.append(str(value))
        held_out = zlib.crc32(question.encode()) % 10 == 0
        if held_out == (split == "test") and all(0 <= int(step) <= 999 for step in steps):
            rows[question] = {"question": f"{question}.", "steps": steps, "answer": steps[-1]}
    return list(rows.values())


MOST_GENERATED = 500_000  # rows; the generators have not many more test rows without repeats


def make_seeds(num_rows: int, seed: int, split: str = "train") -> list[dict[str, int]]:
    """Rows with a `seed` alone, for an environment that draws its own start from it. No seed is of both splits.

    >>> make_seeds(2, 0), make_seeds(1, 1, "test")
    ([{'seed': 0}, {'seed': 1}], [{'seed': 1000000}])
    """
    return [{"seed": i + 1_000_000 * (split == "test")} for i in range(num_rows)]


def to_row(row: DataRow, number: int, name: str = "", needs_prompt: bool = True) -> DataRow:
    """A row with a `prompt` of messages, made from the column `prompt` (text, or messages) or from `question`.

    No other column is changed. Raises `ValueError` for a row without them, unless it needs no prompt.

    >>> to_row({"question": "2+2?", "answer": "It is 2 and 2.\\n#### 4"}, 0)["answer"]
    'It is 2 and 2.\\n#### 4'
    """
    if not row.get("prompt") and not needs_prompt and not {"question", "answer"} <= row.keys():
        return row
    key = "prompt" if "prompt" in row else "question"
    prompt, answer, where = row.get(key), row.get("answer"), f"dataset {name!r}, row {number}"
    is_nan = isinstance(answer, float) and answer != answer  # a table writes it where none is
    is_blank = not prompt or (isinstance(prompt, str) and not prompt.strip())
    if is_nan or is_blank or (key == "question" and answer is None):
        raise ValueError(f"{where}: {row!r:.300} needs a prompt of text or messages, or a question and its answer.")
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {**row, "prompt": check_conversations([prompt], where, images=True)[0]}


def with_prompts(data: Any, name: str, needs_prompt: bool = True) -> Any:
    """Rows of a list of dicts, or of a `Dataset` with `question` and no `prompt`. Other data is returned unchanged.

    >>> with_prompts([{"question": "2 + 2?", "answer": "4"}], "train_dataset")[0]["prompt"]
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    if isinstance(data, dict):
        return {key: with_prompts(split, f"{name}[{key!r}]", needs_prompt) for key, split in data.items()}
    has_questions = isinstance(data, Dataset) and "question" in data.column_names and "prompt" not in data.column_names
    if isinstance(data, list) or has_questions:
        return Rows(data, functools.partial(to_row, name=name, needs_prompt=needs_prompt))
    return data


GENERATED_DATASETS = {"arithmetic": make_arithmetic, "chain": make_chain, "seeds": make_seeds}
HUB_DATASETS = {  # short name -> (Hub name, configuration, name of the test split)
    "trivia_qa": ("mandarjoshi/trivia_qa", "rc.wikipedia", "validation"),
    "hotpot_qa": ("hotpotqa/hotpot_qa", "distractor", "validation"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
}


def load_rows(
    name: str, split: str, size: int | None = None, config: str | None = None, needs_prompt: bool = True
) -> Rows:
    """Training or test rows with `prompt` (messages), and each column as the data has it.

    `name` is `arithmetic`, `chain` or `seeds` (generated), one of `HUB_DATASETS`, any Hub name, a `.jsonl`
    file, or a folder with `<split>.jsonl`. The split `test[:100]` has the first 100 rows, and `size` is how many rows
    to take at most (None: all, and 4,096 of a generated dataset). Without `needs_prompt` a row may be of any form.
    """
    path = Path(name)
    if first_rows := re.fullmatch(r"(\w+)\[:([1-9]\d*)\]", split):
        split, limit = first_rows[1], int(first_rows[2])
        size = min(limit, size or limit)
    generated, in_files = name in GENERATED_DATASETS, path.is_dir() or path.suffix in (".jsonl", ".json")
    if (generated or (in_files and not path.is_dir())) and split not in ("train", "test"):
        raise ValueError(f"dataset_name: {name!r} has no split {split!r}, only train and test.")
    if generated and (size or 0) > MOST_GENERATED:
        raise ValueError(f"dataset_size={size}: {name} has {MOST_GENERATED} rows at most.")
    if generated:
        rows = GENERATED_DATASETS[name](size or 4096, seed=0 if split == "train" else 1, split=split)
        source = [json.dumps(row).encode() for row in rows]
    elif in_files:
        source = list(json_lines(path / f"{split}.jsonl" if path.is_dir() else path, size))
    else:
        hub_name, hub_config, test_split = HUB_DATASETS.get(name, (name, None, "test"))
        source = load_dataset(hub_name, config or hub_config, split=re.sub(r"^test(?=\[|$)", test_split, split))
        if name in HUB_DATASETS:  # articles, most of the size, are not needed
            source = source.select_columns(["question", "answer"])
        source = source.select(range(min(size, len(source)))) if size else source
    if not len(source):
        raise ValueError(f"dataset_name: {name!r}, split {split!r}, is empty. Expected at least one row.")
    return Rows(source, functools.partial(to_row, name=name, needs_prompt=needs_prompt))


def empty_prompts(num_rows: int) -> Dataset:
    """Rows for an environment that brings all prompts: with nothing in them, as TRL's placeholders."""
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * num_rows})


def json_lines(path: Path, size: int | None) -> Iterator[bytes]:
    """The first `size` lines (None: all) of objects of JSON, as bytes. Raises `ValueError` with a line's number."""
    with open(path, "rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip(b"\xef\xbb\xbf \t\r\n"))
        for number, line in itertools.islice(lines, size):
            try:
                text = line.decode("utf-8-sig").strip()  # with or without a byte order mark
                if not isinstance(json.loads(text), dict):
                    raise ValueError(f"got {text:.80}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: expected an object of JSON: {error}.") from None
            yield text.encode()
