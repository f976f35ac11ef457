"""A data set's rows as they were written: no row takes keys or types from another one.

A table of Arrow gives every dict of a column the keys of all dicts, makes 1 a float where another row has 2.5, and
refuses columns of several types. Here a row is kept as JSON, and is decoded at each access.
"""

from __future__ import annotations

import array
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from datasets import Dataset

from mt_grpo.base.pictures import image_or_str

DataRow = dict[str, Any]
MOST_SHOWN_OF_ROW = 300  # characters
IMAGE_COLUMNS = ("image", "images")  # which TRL's trainer reads by itself


class WrittenRow(dict):
    """A row in which each None was written. In a row of a table, a plain dict, None may be a key of another row."""


class JsonLines(Sequence):
    """Lines of JSON in one buffer. Each access decodes its line anew, so that nobody can change a row for others.

    They take the bytes of the file and 8 more per row. As objects, 100,000 rows would take several times as much.

    >>> lines = JsonLines([b'{"a": 1}', b'{"a": 2.5, "b": null}'])
    >>> len(lines), lines[0], lines[-1]
    (2, {'a': 1}, {'a': 2.5, 'b': None})
    """

    def __init__(self, lines: Iterable[bytes]):
        self._text, self._ends = bytearray(), array.array("q", [0])
        for line in lines:
            self._text += line
            self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> DataRow:
        at = range(len(self))[index]
        return json.loads(self._text[self._ends[at] : self._ends[at + 1]].decode())


class Rows(Sequence):
    """Rows that are made at each access. A row has no key that was not written in it.

    Rows are `WrittenRow`, unless their source is a table (`Dataset`).

    Args:
        source: A sequence of dicts: `JsonLines`, a `Dataset`, a list.
        make: A function that makes a row of a dict and its number. It raises `ValueError` for a dict that cannot be a
            row. All rows are made once here, for `column_names`.

    `rows[3]` is a row, `rows[:3]` a list of rows, and `rows["answer"]` a list with None where a row lacks the column.
    """

    def __init__(self, source: Sequence, make: Callable[[DataRow, int], DataRow] = lambda row, number: row):
        self._source, self._make, self._columns = source, make, None
        self._kind = dict if isinstance(source, Dataset) else WrittenRow
        self._places: Sequence[int] = range(len(source))
        self.column_names = list(dict.fromkeys(key for row in self for key in row))

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[DataRow]:
        whole = isinstance(self._places, range)  # a table is several times as fast in its own order
        source = self._source if whole else (self._source[place] for place in self._places)
        return (self._row(row, place) for row, place in zip(source, self._places, strict=True))

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            if key not in self.column_names:
                raise KeyError(f"There is no column {key!r}, expected one of {', '.join(self.column_names)}.")
            return [row.get(key) for row in self.select_columns([key])]
        if isinstance(key, slice):
            return [self[i] for i in range(len(self))[key]]
        place = self._places[operator.index(key)]
        return self._row(self._source[place], place)

    def _row(self, row: DataRow, place: int) -> DataRow:
        row = self._make(row, place)
        return self._kind(row if self._columns is None else {name: row[name] for name in self._columns if name in row})

    def select(self, indices: Iterable[int]) -> Rows:
        """Select rows by their indices, in this order."""
        chosen = self._copy()
        chosen._places = [self._places[i] for i in indices]
        return chosen

    def select_columns(self, names: str | list[str]) -> Rows:
        """The rows with these columns alone. A row that has none of them is empty."""
        chosen = self._copy()
        chosen._columns = chosen.column_names = [names] if isinstance(names, str) else list(names)
        return chosen

    def _copy(self) -> Rows:
        copied = Rows.__new__(Rows)
        vars(copied).update(vars(self))
        return copied


def for_trl(data: Any) -> Any:
    """A stand-in of the same length for TRL's constructor, which takes only its own kinds of data.

    It holds no row. The data takes its place behind the constructor.

    >>> for_trl(Rows([{"prompt": 1}] * 3)), for_trl({"a": Rows([])})
    (Dataset({
        features: ['prompt'],
        num_rows: 3
    }), {'a': Dataset({
        features: ['prompt'],
        num_rows: 0
    })})
    """
    if isinstance(data, dict):
        return {name: for_trl(split) for name, split in data.items()}
    return Dataset.from_dict({"prompt": [""] * len(data)}) if isinstance(data, Rows) else data


def without_padding(value: Any) -> Any:
    """Dicts without the keys that are None, at every depth: a table has None where only another row has a key.

    >>> without_padding({"files": {"a": "x", "b": None}, "calls": [{"c": None}, None]})
    {'files': {'a': 'x'}, 'calls': [{}, None]}
    """
    if isinstance(value, dict):
        return {key: without_padding(each) for key, each in value.items() if each is not None}
    return [without_padding(each) for each in value] if isinstance(value, list) else value


def with_own_keys(row: DataRow, columns: Iterable[str]) -> DataRow:
    """A row as adapters take it. The columns of these names hold keyword arguments, so they lose a table's padding.

    >>> row = {"options": {"a": None}, "answer": {"b": None}}
    >>> with_own_keys(row, ["options"]), with_own_keys(WrittenRow(row), ["options"])
    ({'options': {}, 'answer': {'b': None}}, {'options': {'a': None}, 'answer': {'b': None}})
    """
    if isinstance(row, WrittenRow):
        return row
    return {key: without_padding(value) if key in columns else value for key, value in row.items()}


def row_text(row: DataRow) -> str:
    """A row as JSON in one line, cut, as messages show it.

    >>> row_text({"answer": 4, "prompt": []})
    '{"answer": 4, "prompt": []}'
    """
    text = json.dumps(row, ensure_ascii=False, default=image_or_str)
    return text if len(text) <= MOST_SHOWN_OF_ROW else f"{text[:MOST_SHOWN_OF_ROW]}..."


def prompts_of(rows: Iterable[DataRow]) -> list[list]:
    """The prompts of rows. A row whose prompt an environment brings has an empty one."""
    return [row.get("prompt") or [] for row in rows]


def column_lists(rows: list[DataRow], data: Any = None) -> dict[str, list]:
    """Columns as rewards get them: a list per column but `prompt`, with None for each row that lacks the column.

    Args:
        rows: The rows of a batch.
        data: Their data set. If it is `Rows`, all its columns are passed, also those that no row of the batch has.

    >>> column_lists([{"prompt": [], "a": 1}, {"b": None}])
    {'a': [1, None], 'b': [None, None]}
    """
    names = dict.fromkeys(
        [*(data.column_names if isinstance(data, Rows) else []), *(key for row in rows for key in row)]
    )
    return {name: [row.get(name) for row in rows] for name in names if name != "prompt"}


def data_of(trainer: Any) -> Any:
    """The data set of a trainer's batch; None for an evaluation that was not begun by `evaluate`."""
    if trainer.model.training:
        return trainer.train_dataset
    return getattr(trainer.callback_handler.eval_dataloader, "dataset", None)


def number_of(row: DataRow, data: Iterable[DataRow] | None) -> int | None:
    """The number of the first row of a data set that equals `row`; None if no row does.

    >>> number_of({"a": 1}, [{"a": 1, "b": None}, {"a": 1}])
    1
    """
    wanted = json.dumps(row, default=image_or_str)
    return next((i for i, each in enumerate(data or ()) if json.dumps(each, default=image_or_str) == wanted), None)


def rows_for_trl(rows: list[DataRow]) -> list[DataRow]:
    """The rows as TRL's step takes them: with a prompt, and without the columns in which it looks for images."""
    return [
        {**{key: value for key, value in row.items() if key not in IMAGE_COLUMNS}, "prompt": prompt}
        for row, prompt in zip(rows, prompts_of(rows))
    ]
