"""Training and test rows: generated, from files, or from the Hub."""

from __future__ import annotations

import difflib
import functools
import json
import math
import random
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from mt_grpo.base.errors import error_line
from mt_grpo.base.rows import DataRow, JsonLines, Rows
from mt_grpo.conversation.sampling import content_of


def make_arithmetic(num_rows: int, seed: int, split: str = "train") -> list[dict[str, str]]:
    """Sums, differences and products of two or three numbers from 2 to 99, without repeats.

    An expression belongs to `test` if its CRC-32 is divisible by 10, so that no test problem is ever trained on.

    >>> make_arithmetic(1, 0)
    [{'question': 'What is 99 - 55 * 7?', 'answer': '-286'}]
    """
    rng = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < num_rows:
        numbers = [rng.randint(2, 99) for _ in range(rng.choice((2, 3)))]
        signs = [rng.choice("+-*") for _ in numbers[1:]]
        expression = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs, numbers[1:], strict=True))
        if (zlib.crc32(expression.encode()) % 10 == 0) == (split == "test"):
            rows[expression] = {"question": f"What is {expression}?", "answer": str(eval(expression))}
    return list(rows.values())


def make_chain(num_rows: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
    """Chains of three or four operations on one number, without repeats. Every value is from 0 to 999.

    A question belongs to `test` by the rule of `make_arithmetic`.

    >>> make_chain(1, 16)
    [{'question': 'Start with 9, then + 6, then - 7, then * 4.', 'steps': ['15', '8', '32'], 'answer': '32'}]
    """
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
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


def make_seeds(num_rows: int, seed: int, split: str = "train") -> list[dict[str, int]]:
    """Rows with a `seed` alone, for an environment that draws its own start from it. No seed is of both splits.

    >>> make_seeds(2, 0), make_seeds(1, 1, "test")
    ([{'seed': 0}, {'seed': 1}], [{'seed': 1000000}])
    """
    first = MOST_GENERATED if split == "test" else 0
    return [{"seed": first + i} for i in range(num_rows)]


def check_prompt(prompt: Any, where: str) -> None:
    """Raise `ValueError` unless a prompt is a list of messages whose roles and contents are text."""
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) for m in prompt):
        raise ValueError(f"{where}: a prompt must be a list of messages with role and content, got {prompt!r:.200}.")
    for message in prompt:
        for key in ("role", "content"):
            value = content_of(message, where) if key == "content" else message.get(key)
            if key == "content" and isinstance(value, list):  # with images
                continue
            if key == "content" and value == "":
                continue
            if not isinstance(value, str):
                raise ValueError(
                    f"{where}: a prompt must be a list of messages with role and content, which are text, got "
                    f"{key}: {message.get(key)!r:.100} in {message!r:.200}."
                )
            try:
                value.encode()
            except UnicodeEncodeError as error:  # JSON can hold half of a pair of surrogates; no tokenizer reads it
                raise ValueError(f"{where}: the {key} of a message is no text: {error}.") from None


def to_row(row: DataRow, where: str, needs_prompt: bool = True) -> DataRow:
    """One row of training: all that the data's row has, as it is, and a `prompt` of messages.

    The prompt is made from the column `prompt` (text, or messages) or from `question`. No other column is changed.
    Raises `ValueError` for a row without them, unless it needs no prompt; `where` names the row in the message.

    >>> to_row({"question": "2+2?", "answer": "It is 2 and 2.\\n#### 4"}, "")["answer"]
    'It is 2 and 2.\\n#### 4'
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {row!r:.100}, expected an object with 'question' and 'answer', or 'prompt'.")
    if not needs_prompt and not row.get("prompt") and not {"question", "answer"} <= row.keys():
        return row
    if "prompt" in row:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError(f"{where}: prompt is {prompt!r:.100}, expected text or messages.")
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list):
            prompt = [{**m, "content": content_of(m, where)} if isinstance(m, dict) else m for m in prompt]
        check_prompt(prompt, where)
        if isinstance(answer := row.get("answer"), float) and math.isnan(answer):
            raise ValueError(f"{where}: answer is nan, expected one, or null where the row has none.")
        return {**row, "prompt": prompt}
    if "question" not in row or "answer" not in row:
        raise ValueError(f"{where} has columns {sorted(row)}, expected 'question' and 'answer', or 'prompt'.")
    question = row["question"]
    no_answer = row["answer"] is None or row["answer"] != row["answer"]  # NaN: a table writes it where none is
    if not isinstance(question, str) or not question.strip() or no_answer:
        key, expected = ("answer", "one") if no_answer else ("question", "text")
        raise ValueError(f"{where}: {key} is {row[key]!r:.100}, expected {expected}.")
    prompt = [{"role": "user", "content": question}]
    check_prompt(prompt, where)
    return {**row, "prompt": prompt}


def accepted_answers(answer: Any) -> list[str]:
    """The texts that a row's `answer` accepts, in whichever of the known forms it is: for people, and for `evaluate`.

    >>> accepted_answers("It is 2 and 2.\\n#### 1,004"), accepted_answers({"value": "Ada", "aliases": ["Lovelace"]})
    (['1004'], ['Ada', 'Lovelace'])
    >>> accepted_answers(["a", "b"]), accepted_answers(7), accepted_answers(None)
    (['a', 'b'], ['7'], [])
    """
    if isinstance(answer, dict) and "value" in answer:  # TriviaQA
        aliases = answer.get("aliases") or []
        answer = [answer["value"], *([aliases] if isinstance(aliases, str) else aliases)]
    if isinstance(answer, str) and "####" in answer:  # GSM8K
        answer = answer.rpartition("####")[2].strip().replace(",", "")
    answers = answer if isinstance(answer, list) else [answer]
    return list(dict.fromkeys(str(each) for each in answers if each is not None))


def with_prompts(data: Any, name: str, needs_prompt: bool = True) -> Any:
    """Rows of a list of dicts, or of a `Dataset` with `question` and no `prompt`. Other data is returned unchanged.

    Raises `ValueError` with the data's name for a row that has neither `prompt` nor `question` and `answer`.

    >>> with_prompts([{"question": "2 + 2?", "answer": "4"}], "train_dataset")[0]["prompt"]
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    if isinstance(data, dict):
        return {key: with_prompts(split, f"{name}[{key!r}]", needs_prompt) for key, split in data.items()}
    has_questions = isinstance(data, Dataset) and "question" in data.column_names and "prompt" not in data.column_names
    if isinstance(data, list) or has_questions:
        return Rows(data, functools.partial(made_row, name=name, needs_prompt=needs_prompt))
    return data


MOST_GENERATED = 1_000_000  # rows; the generators have not many more without repeats
GENERATED_DATASETS = {"arithmetic": make_arithmetic, "chain": make_chain, "seeds": make_seeds}
HUB_DATASETS = {  # short name -> (Hub name, configuration, name of the test split)
    "trivia_qa": ("mandarjoshi/trivia_qa", "rc.wikipedia", "validation"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
}


def load_rows(
    name: str,
    split: str,
    size: int | None = None,
    config: str | None = None,
    needs_prompt: bool = True,
) -> Rows:
    """Training or test rows with `prompt` (messages), and each column as the data has it.

    Args:
        name: `arithmetic`, `chain` or `seeds` (generated), `trivia_qa` or `gsm8k` (Hub), any Hub name, a `.jsonl`
            file, or a folder with `<split>.jsonl`.
        split: `train`, `test`, or another name of a split of the dataset. `test[:100]` has its first 100 rows.
        size: How many rows to take at most, from the start. None: all (4,096 of a generated dataset).
        config: The Hub dataset's configuration. None: the one in `HUB_DATASETS`.
        needs_prompt: False where an environment may bring the prompts; a row may then be of any form.

    Raises:
        ValueError: The dataset does not exist or is empty, a line is not JSON, or a row is none.
    """
    hub = False
    if first_rows := re.fullmatch(r"(\w+)\[:([1-9]\d*)\]", split):
        split, limit = first_rows[1], int(first_rows[2])
        size = min(limit, size or limit)
    if name in GENERATED_DATASETS:
        if split not in ("train", "test") or (size or 0) > MOST_GENERATED:
            raise ValueError(
                f"{name}: split {split!r}, size {size}. Expected train or test, at most {MOST_GENERATED} rows."
            )
        rows = GENERATED_DATASETS[name](size or 4096, seed=0 if split == "train" else 1, split=split)
        source = JsonLines(json.dumps(row).encode() for row in rows)
    elif name.endswith((".jsonl", ".json")) or Path(name).is_dir():
        path = Path(name) / f"{split}.jsonl" if Path(name).is_dir() else Path(name)
        if not Path(name).is_dir() and split not in ("train", "test"):
            raise ValueError(
                f"split {split!r} has no effect with dataset_name: {name!r}, one file for all splits. Remove it, or "
                f"name a folder with {split}.jsonl."
            )
        source = JsonLines(json_lines(path, size))
    elif Path(name).is_file() or Path(name).suffix in (".csv", ".tsv", ".parquet", ".txt") or name[0] in "/.~":
        raise ValueError(
            f"dataset_name: {name!r} {'cannot be read' if Path(name).is_file() else 'does not exist'}. Expected JSON "
            f"lines (.jsonl, .json), a folder of them, {', '.join(GENERATED_DATASETS)}, or a Hub name."
        )
    else:
        hub, source = True, load_from_hub(name, split, size, config)
    if config and not hub:
        raise ValueError(f"dataset_config={config!r} has no effect with dataset_name: {name!r}. Remove it.")
    if not len(source):
        raise ValueError(f"dataset_name: {name!r}, split {split!r}, is empty. Expected at least one row.")
    return Rows(source, functools.partial(made_row, name=name, needs_prompt=needs_prompt))


def made_row(row: DataRow, number: int, name: str, needs_prompt: bool) -> DataRow:
    """The row of this number in a data set of this name (`to_row`)."""
    return to_row(row, f"dataset {name!r}, row {number}", needs_prompt)


def empty_prompts(num_rows: int) -> Dataset:
    """Rows for an environment that brings all prompts: with nothing in them, as TRL's placeholders."""
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * num_rows})


def load_splits(script_args: Any, eval_strategy: str, environments: Any = None) -> tuple[Rows | None, Rows | None]:
    """(training rows, test rows) of a recipe.

    Args:
        script_args: With `dataset_name` and the keys that go with it.
        eval_strategy: Whether there are test rows.
        environments: `Environments` of the conversation, which may bring the prompts; None: it has none.

    The test rows are None if `eval_strategy` is `no`. The training rows are None without `dataset_name`, which an
    environment that brings the prompts does not need. Raises `ValueError` as `load_rows` does.
    """
    name, config, needs_prompt = script_args.dataset_name, script_args.dataset_config, environments is None
    if not name:
        check_no_data(script_args, eval_strategy, needs_prompt)
        return None, None
    how = {"config": config, "needs_prompt": needs_prompt}
    train_rows = load_rows(name, script_args.dataset_train_split, script_args.dataset_size, **how)
    if eval_strategy != "no":
        return train_rows, load_rows(name, script_args.dataset_test_split, **how)
    return train_rows, None


def check_no_data(script_args: Any, eval_strategy: str, needs_prompt: bool) -> None:
    """Raise `ValueError` unless a recipe can do without `dataset_name`."""
    if needs_prompt:
        raise ValueError(
            "dataset_name is not set. Add a line `dataset_name: ...` to the recipe; hf_recipes/ has examples."
        )
    if eval_strategy != "no":
        raise ValueError(
            f"eval_strategy={eval_strategy} needs test rows, and dataset_name is not set. Set one of them."
        )
    for key in ("dataset_config", "dataset_size"):
        if getattr(script_args, key) is not None:
            raise ValueError(f"{key} has no effect without dataset_name. Remove it.")


def not_here(name: str) -> str:
    """What to add to an error of the Hub where a name may be a mistyped path: its first part is a folder here."""
    path = Path(name)
    if path.is_absolute() or len(path.parts) < 2 or path.exists() or not path.parent.is_dir():
        return ""
    return f" There is a folder {str(path.parent)!r} in {Path.cwd()}, and no {path.name!r} in it: is it mistyped?"


def load_from_hub(name: str, split: str, size: int | None, config: str | None) -> Dataset:
    """Rows of a dataset on the Hub. Raises `ValueError` with the dataset's name for every failure."""
    hub_name, hub_config, test_split = HUB_DATASETS.get(name, (name, None, "test"))
    split = test_split if split == "test" else split
    try:
        rows = load_dataset(hub_name, config or hub_config, split=split)
    except Exception as error:  # network, Hub and file errors have no common class
        known = [] if name in HUB_DATASETS else [*GENERATED_DATASETS, *HUB_DATASETS]
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(
            f"dataset_name: {name!r} ({config or hub_config or 'no configuration'}, split {split!r}) cannot be "
            f"loaded from the Hub: {error_line(error)}." + (f" Did you mean {near[0]!r}?" if near else not_here(name))
        ) from error
    if name in HUB_DATASETS:  # TriviaQA's articles, most of its size, are not needed
        rows = rows.select_columns(["question", "answer"])
    return rows.select(range(min(size, len(rows)))) if size else rows


def json_lines(path: Path, size: int | None) -> Iterator[bytes]:
    """The first `size` lines of a file that hold an object of JSON (None: all), each as its bytes.

    Raises `ValueError` with the line's number for a line that is none, and what is wrong with the file.
    """
    if not path.is_file():
        raise ValueError(f"dataset_name: {str(path)!r} is not a file. Expected JSON lines with question and answer.")
    number = found = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if size is not None and found >= size:
                    break
                if text := line.decode("utf-8-sig").strip():  # with or without a byte order mark
                    if not isinstance(read_json_line(text, path, number), dict):
                        raise ValueError(f"{path}, line {number} is {text:.80}, expected an object on each line.")
                    found += 1
                    yield text.encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number} is not UTF-8 text: {error}. Save the file as UTF-8.") from None
    except (OSError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} cannot be read: {error}.") from error


def read_json_line(text: str, path: Path, number: int) -> Any:
    """Parse a line of JSON. Raises `ValueError` with the line's number, also for a number of too many digits."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        array = " It looks like an array: `jq -c '.[]'` makes lines of it." if text.startswith("[") else ""
        raise ValueError(
            f"{path}, line {number} is not JSON: {error.msg}. Expected an object on each line.{array}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}, line {number} cannot be read: {error}.") from None
