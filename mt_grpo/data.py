"""Training and test rows: generated, from files, or from the Hub."""

from __future__ import annotations

import difflib
import json
import random
import zlib
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from mt_grpo.json_types import fits_type


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
            total, term = 0, numbers[0]  # `term`: a product that is not yet added
            for sign, number in zip(signs, numbers[1:], strict=True):
                total, term = (
                    (total, term * number) if sign == "*" else (total + term, {"+": 1, "-": -1}[sign] * number)
                )
            rows[expression] = {"question": f"What is {expression}?", "answer": str(total + term)}
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
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"{where}: a prompt must be a list of messages with role and content, which are text, got "
                    f"{key}: {message.get(key)!r:.100} in {message!r:.200}."
                )


def plain_content(content: Any, where: str) -> Any:
    """A message's content. A list of text parts becomes one text; other parts, as images, raise `ValueError`."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
            raise ValueError(
                f"{where}: a message has the part {part!r:.100}. Rollouts are text only: expected text parts."
            )
    return "".join(part["text"] for part in content)


def to_row(row: dict[str, Any], where: str, needs_prompt: bool = True) -> dict[str, Any]:
    """One training row from a row of TriviaQA, of GSM8K, with a plain question and answer, or with a prompt.

    Raises `ValueError` for a row of any other form, unless it needs no prompt; `where` names the row in the message.

    >>> to_row({"question": "2+2?", "answer": "It is 2 and 2.\\n#### 4"}, "")["answer"]
    '4'
    >>> to_row({"question": "Who?", "answer": {"value": "Ada", "aliases": ["Ada", "Lovelace"]}}, "")["answer"]
    ['Ada', 'Lovelace']
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {row!r:.100}, expected an object with 'question' and 'answer', or 'prompt'.")
    if not needs_prompt and not row.get("prompt") and not {"question", "answer"} <= row.keys():
        return row
    if "prompt" in row:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}] if prompt.strip() else None
        if isinstance(prompt, list):
            prompt = [
                {**m, "content": plain_content(m.get("content"), where)} if isinstance(m, dict) else m for m in prompt
            ]
        check_prompt(prompt, where)
        return {**row, "prompt": prompt}
    if "question" not in row or "answer" not in row:
        raise ValueError(f"{where} has columns {sorted(row)}, expected 'question' and 'answer', or 'prompt'.")
    answer = row["answer"]
    if isinstance(answer, dict):  # TriviaQA
        if "value" not in answer:
            raise ValueError(f"{where}: answer has {sorted(answer)}, expected 'value' and 'aliases'.")
        aliases = answer.get("aliases") or []
        if not fits_type(aliases, list[str]) or not isinstance(answer["value"], str):
            raise ValueError(
                f"{where}: answer is {answer!r:.100}, expected text as 'value', a list of it as 'aliases'."
            )
        answer = list(dict.fromkeys([answer["value"], *aliases]))
    elif isinstance(answer, str) and "####" in answer:  # GSM8K
        answer = answer.rpartition("####")[2].strip().replace(",", "")
    question = row["question"]
    if not isinstance(question, str) or not question.strip() or answer is None:
        key, value = ("answer", answer) if answer is None else ("question", question)
        raise ValueError(f"{where}: {key} is {value!r:.100}, expected {'one' if key == 'answer' else 'text'}.")
    return {**row, "prompt": [{"role": "user", "content": question}], "question": question, "answer": answer}


MOST_GENERATED = 1_000_000  # rows; the generators have not many more without repeats
GENERATED_DATASETS = {"arithmetic": make_arithmetic, "chain": make_chain, "seeds": make_seeds}
HUB_DATASETS = {  # short name -> (Hub name, configuration, name of the test split)
    "trivia_qa": ("mandarjoshi/trivia_qa", "rc.wikipedia", "validation"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
}


def load_rows(
    name: str, split: str, size: int | None = None, config: str | None = None, needs_prompt: bool = True
) -> Dataset:
    """Training or test rows with `prompt` (messages), `question` and `answer`.

    Args:
        name: `arithmetic`, `chain` or `seeds` (generated), `trivia_qa` or `gsm8k` (Hub), any Hub name, a `.jsonl`
            file, or a folder with `<split>.jsonl`.
        split: `train`, `test`, or another name of a split of the dataset.
        size: How many rows to take from the start. None: all (4,096 of a generated dataset).
        config: The Hub dataset's configuration. None: the one in `HUB_DATASETS`.
        needs_prompt: False where an environment may bring the prompts; a row may then be of any form.

    Raises:
        ValueError: The dataset does not exist or is empty, a line is not JSON, or a column is missing.
    """
    hub = False
    if name in GENERATED_DATASETS:
        if split not in ("train", "test") or (size or 0) > MOST_GENERATED:
            raise ValueError(
                f"{name}: split {split!r}, size {size}. Expected train or test, at most {MOST_GENERATED} rows."
            )
        rows = GENERATED_DATASETS[name](size or 4096, seed=0 if split == "train" else 1, split=split)
    elif name.endswith((".jsonl", ".json")) or Path(name).is_dir():
        path = Path(name) / f"{split}.jsonl" if Path(name).is_dir() else Path(name)
        rows = read_jsonl(path, size)
    elif Path(name).is_file() or Path(name).suffix in (".csv", ".tsv", ".parquet", ".txt") or name[0] in "/.~":
        raise ValueError(
            f"dataset_name: {name!r} {'cannot be read' if Path(name).is_file() else 'does not exist'}. Expected JSON "
            f"lines (.jsonl, .json), a folder of them, {', '.join(GENERATED_DATASETS)}, or a Hub name."
        )
    else:
        hub, rows = True, load_from_hub(name, split, size, config)
    if config and not hub:
        raise ValueError(f"dataset_config={config!r} has no effect with dataset_name: {name!r}. Remove it.")
    if not len(rows):
        raise ValueError(f"dataset_name: {name!r}, split {split!r}, is empty. Expected at least one row.")
    return to_dataset([to_row(row, f"dataset {name!r}, row {i}", needs_prompt) for i, row in enumerate(rows)], name)


def empty_prompts(num_rows: int) -> Dataset:
    """Rows for an environment that brings all prompts: with nothing in them, as TRL's placeholders."""
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * num_rows})


def with_prompts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the key `prompt`, which is empty where an environment brings the prompt."""
    return [{**row, "prompt": row.get("prompt") or []} for row in rows]


def load_splits(
    script_args: Any, eval_strategy: str, needs_prompt: bool = True
) -> tuple[Dataset | None, Dataset | None]:
    """(training rows, test rows) of a recipe.

    The test rows are None if `eval_strategy` is `no`. The training rows are None without `dataset_name`, which an
    environment that brings the prompts does not need. Raises `ValueError` as `load_rows` does.
    """
    name, config = script_args.dataset_name, script_args.dataset_config
    if not name:
        check_no_data(script_args, eval_strategy, needs_prompt)
        return None, None
    train_rows = load_rows(name, script_args.dataset_train_split, script_args.dataset_size, config, needs_prompt)
    if eval_strategy != "no":
        size = script_args.eval_dataset_size
        return train_rows, load_rows(name, script_args.dataset_test_split, size, config, needs_prompt)
    if script_args.eval_dataset_size is not None:
        raise ValueError("eval_dataset_size has no effect with eval_strategy: no. Remove it, or set eval_strategy.")
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
    for key in ("dataset_config", "dataset_size", "eval_dataset_size"):
        if getattr(script_args, key) is not None:
            raise ValueError(f"{key} has no effect without dataset_name. Remove it.")


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
            f"loaded from the Hub: {type(error).__name__}: {' '.join(str(error).split())}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        ) from error
    if name in HUB_DATASETS:  # TriviaQA's articles, most of its size, are not needed
        rows = rows.select_columns(["question", "answer"])
    return rows.select(range(min(size, len(rows)))) if size else rows


def to_dataset(rows: list[dict[str, Any]], name: str) -> Dataset:
    """The rows as a `Dataset`; a missing value becomes None. Raises `ValueError` for a column of mixed types."""
    columns = list(dict.fromkeys(key for row in rows for key in row))  # `from_list` reads only the first row's
    try:
        return Dataset.from_list([{key: row.get(key) for key in columns} for row in rows])
    except (ValueError, TypeError, OverflowError) as error:
        for key in columns:
            first: dict[str, int] = {}
            for i, row in enumerate(rows):
                if row.get(key) is not None:
                    first.setdefault(type(row[key]).__name__, i)
            if len(first) > 1:
                found = ", ".join(f"{kind} in row {i}" for kind, i in first.items())
                raise ValueError(f"dataset {name!r}: {key!r} is {found}. Expected one type in all rows.") from error
        raise ValueError(f"dataset {name!r} cannot be made a table: {error}") from error


def read_jsonl(path: Path, size: int | None) -> list[dict[str, Any]]:
    """The first `size` objects of a file of JSON lines (None: all). Raises `ValueError` with the line's number."""
    if not path.is_file():
        raise ValueError(f"dataset_name: {str(path)!r} is not a file. Expected JSON lines with question and answer.")
    rows, number = [], 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if size is not None and len(rows) >= size:
                    break
                if text := line.decode("utf-8-sig").strip():  # with or without a byte order mark
                    rows.append(json.loads(text))
                    if not isinstance(rows[-1], dict):
                        raise ValueError(f"{path}, line {number} is {text:.80}, expected an object on each line.")
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error.msg}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number} is not UTF-8 text: {error}. Save the file as UTF-8.") from None
    except (OSError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} cannot be read: {error}.") from error
    return rows
