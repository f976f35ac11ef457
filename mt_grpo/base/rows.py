"""A data set's rows as they were written: no row takes keys or types from another one.

A table of Arrow gives every dict of a column the keys of all dicts, makes 1 a float where another row has 2.5, and
refuses columns of several types. Here a row is kept as JSON, and is decoded at each access.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from datasets import Dataset

DataRow = dict[str, Any]
IMAGE_COLUMNS = ("image", "images")  # which TRL's trainer reads by itself


class WrittenRow(dict):
    """A row in which each None was written. In a row of a table, a plain dict, None may be a key of another row."""


class Rows(Sequence):
    """Rows that are made at each access: `WrittenRow`, unless their source is a table (`Dataset`).

    `rows[3]` is a row, and `rows["answer"]` a list with None where a row lacks the column. `source` has dicts, or JSON
    as bytes. `make` makes a row of such a dict and its number, and raises `ValueError` for a dict that is none.
    """

    def __init__(self, source: Sequence, make: Callable[[DataRow, int], DataRow] = lambda row, number: row):
        self._source, self._make = source, make
        self.column_names = list(dict.fromkeys(key for row in self for key in row))

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[DataRow]:  # a table is several times as fast in its own order
        return (self._row(row, number) for number, row in enumerate(self._source))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            if key not in self.column_names:
                raise KeyError(f"There is no column {key!r}, expected one of {', '.join(self.column_names)}.")
            return [row.get(key) for row in self]
        number = range(len(self))[operator.index(key)]
        return self._row(self._source[number], number)

    def _row(self, row: DataRow | bytes, number: int) -> DataRow:
        row = json.loads(row) if isinstance(row, bytes) else row  # anew: nobody can change a row for others
        return (dict if isinstance(self._source, Dataset) else WrittenRow)(self._make(row, number))


def for_trl(data: Any) -> Any:
    """A stand-in of the same length for TRL's constructor, which takes only its own kinds of data."""
    if isinstance(data, dict):
        return {name: for_trl(split) for name, split in data.items()}
    return Dataset.from_dict({"prompt": [""] * len(data)}) if isinstance(data, Rows) else data


def without_padding(value: Any) -> Any:
    """Dicts without the keys that are None, at every depth: a table has None where only another row has a key."""
    if isinstance(value, dict):
        return {key: without_padding(each) for key, each in value.items() if each is not None}
    return [without_padding(each) for each in value] if isinstance(value, list) else value


def with_own_keys(row: DataRow, columns: Iterable[str]) -> DataRow:
    """A row as integrations take it: the columns of these names hold keyword arguments, without a table's padding."""
    if isinstance(row, WrittenRow):
        return row
    return {key: without_padding(value) if key in columns else value for key, value in row.items()}


def row_text(row: DataRow) -> str:
    """A row as JSON in one line of at most 300 characters, as messages show it."""
    text = json.dumps(row, ensure_ascii=False, default=image_or_str)
    return text if len(text) <= 300 else f"{text[:300]}..."


def prompts_of(rows: Iterable[DataRow]) -> list[list]:
    """The prompts of rows. A row whose prompt an environment brings has an empty one."""
    return [row.get("prompt") or [] for row in rows]


def column_lists(rows: list[DataRow], data: Any = None) -> dict[str, list]:
    """Columns as rewards get them: a list per column but `prompt`, with None for each row that lacks the column.

    Columns that no row of the batch has are passed, too, if `data`, the data set of these rows, is `Rows`.
    """
    of_data = data.column_names if isinstance(data, Rows) else []
    names = dict.fromkeys([*of_data, *(key for row in rows for key in row)])
    return {name: [row.get(name) for row in rows] for name in names if name != "prompt"}


def data_of(trainer: Any) -> Any:
    """The data set of a trainer's batch; None for an evaluation that was not begun by `evaluate`."""
    if trainer.model.training:
        return trainer.train_dataset
    return getattr(trainer.callback_handler.eval_dataloader, "dataset", None)


def rows_for_trl(rows: list[DataRow]) -> list[DataRow]:
    """The rows as TRL's step takes them: with a prompt, and without the columns in which it looks for images."""
    return [
        {**{key: value for key, value in row.items() if key not in IMAGE_COLUMNS}, "prompt": prompt}
        for row, prompt in zip(rows, prompts_of(rows))
    ]


def json_text(value: Any, **options: Any) -> str:
    """A value as JSON that every reader takes: NaN and infinities, which JSON does not have, become null."""
    # Python writes them as constants, and `parse_constant` is called for each, at every depth.
    return json.dumps(json.loads(json.dumps(value, **options), parse_constant=lambda name: None), **options)


MOST_NESTED = 64  # levels of lists and dicts in a call; clients of agents raise at some 250


def is_nested(value: Any, most: int = MOST_NESTED) -> bool:
    """Whether a value has more than this number of levels of lists and dicts."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (most == 0 or any(is_nested(each, most - 1) for each in inner))


def is_image(value: Any) -> bool:
    """Whether a value is a PIL image. PIL need not be installed."""
    return hasattr(value, "tobytes") and hasattr(value, "getbands")


def digest_of_image(image: Any, reader: str) -> str:
    """A digest of a PIL image: of its size, its pixels, and the settings of what reads it."""
    size = "{}x{}:".format(*image.size).encode()
    return hashlib.blake2b(reader.encode() + size + image.tobytes(), digest_size=32).hexdigest()


def image_or_str(value: Any) -> str:
    """JSON `default` for hashing rows: an image becomes a hash of its pixels, other values become text."""
    return digest_of_image(value, value.mode) if is_image(value) else str(value)  # its text has its address in memory
