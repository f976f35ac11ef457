"""An SQLite index of a run's log of rollouts: rows by pages, search in their text, and what was added since."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_grpo.reports.rollout_log import SCHEMA, logged_ranks, segment_number, segments
from viewer.rows import LARGEST, Unreadable, clean, is_number, number_or_none, summary

INDEX_FILE = "rollouts.view.sqlite"  # in the output directory, or in a temporary folder where it cannot be written
INDEX_VERSION = 4  # raised where the tables change: an older index is built anew
BATCH = 1000  # rows per transaction
STILL_SECONDS = 5.0  # after which half a line is no line that is being written
NUMBERS = {"rank", "step", "index", "num_tokens", "policy_version", "reward"}
# Columns of the log that the viewer has a place for.
KNOWN = set(
    "schema rank index group step mode messages num_prompt_messages answer stop_reason reward rewards turn_rewards "
    "turn_advantages outcome_advantage group_size batch_size turns images num_prompt_tokens num_tokens records "
    "num_copied_turns policy_version error info".split()
)
KNOWN_OF_TURN = set(
    "text answer finish_reason seconds calls results observation num_tokens num_read num_trained reward mean_logprob "
    "min_logprob policy_versions record after context tools token_ids token_texts logprobs loss_mask advantages "
    "trainer_logprobs read_ids read_texts prompt_ids".split()
)
SORTED_BY = ("step", "reward", "turns", "tokens", "seconds")
TABLES = """
CREATE TABLE IF NOT EXISTS segment (
    rank INT, number INT, head TEXT, bytes INT, over INT, size INT, PRIMARY KEY (rank, number)
);
CREATE TABLE IF NOT EXISTS note (kind TEXT, name TEXT, count INT, PRIMARY KEY (kind, name));
CREATE TABLE IF NOT EXISTS rollout (
    id INTEGER PRIMARY KEY, rank INT, step INT, mode TEXT, number INT, attempt INT, team TEXT, prompt TEXT,
    stop TEXT, reward REAL, rewards TEXT, turns INT, tokens INT, seconds REAL, tools TEXT, errors TEXT, version INT,
    batch INT,
    body BLOB
);
CREATE INDEX IF NOT EXISTS by_place ON rollout (mode, step, number, rank);
CREATE INDEX IF NOT EXISTS by_step ON rollout (step, id);
CREATE INDEX IF NOT EXISTS by_reward ON rollout (reward);
CREATE INDEX IF NOT EXISTS by_stop ON rollout (stop, id);
CREATE INDEX IF NOT EXISTS by_team ON rollout (team);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (text, content='');
"""
# What a line of the table shows. INVARIANT: viewer.js reads the same names.
SHOWN = ("id", "rank", "step", "mode", "number", "attempt", "team", "prompt", "stop", "reward", "rewards", "turns",
         "tokens", "seconds", "tools", "errors", "version")  # fmt: skip


# JSON as browsers know it: without NaN and infinities, which Python reads and writes.
JSON_ALONE: dict[str, Any] = {"parse_constant": lambda name: None, "parse_float": lambda text: number_or_none(text)}


@dataclass(frozen=True)
class Query:
    """Which rollouts, in which order; None: all.

    `text` is words: each of them, or its beginning, stands somewhere in the rollout.
    """

    step_from: int | None = None
    step_to: int | None = None
    mode: str | None = None
    prompt: str | None = None
    reward_name: str = "reward"
    reward_min: float | None = None
    reward_max: float | None = None
    stop: str | None = None
    tool: str | None = None
    error: str | None = None
    text: str | None = None
    sort: str = "step"
    descending: bool = False
    offset: int = 0
    limit: int = 50

    @classmethod
    def read(cls, given: dict[str, str]) -> Query:
        """From the parameters of an address. Raises `ValueError` for one that is unknown, or no number."""
        whole_numbers = dict.fromkeys(("step_from", "step_to", "offset", "limit"), int)
        kinds = {
            **whole_numbers,
            "reward_min": finite_number,
            "reward_max": finite_number,
            "descending": true_or_false,
        }
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"{name} is no filter. Expected one of {', '.join(cls.__dataclass_fields__)}.")
            if value != "":
                try:
                    values[name] = kinds.get(name, str)(value)
                except (ValueError, KeyError):
                    expected = "true or false" if name == "descending" else "a number"
                    raise ValueError(f"{name} is {value!r}, expected {expected}.") from None
        query = cls(**values)
        if query.sort not in SORTED_BY or not 1 <= query.limit <= 500 or not 0 <= query.offset < LARGEST:
            raise ValueError(f"expected sort in {', '.join(SORTED_BY)}, limit from 1 to 500, offset from 0.")
        if any(abs(step or 0) >= LARGEST for step in (query.step_from, query.step_to)):
            raise ValueError("a step is too large.")
        return query

    def where(self) -> tuple[str, list[Any]]:
        """(condition of SQL, its values)."""
        value = "reward" if self.reward_name == "reward" else "(SELECT value FROM json_each(rewards) WHERE key = ?)"
        name = [] if self.reward_name == "reward" else [self.reward_name]
        words = [
            word
            for word in (self.text or "").replace("\0", " ").split()
            if any(character.isalnum() for character in word)
        ]
        phrases = " ".join('"{}"*'.format(word.replace('"', " ")) for word in words)
        conditions: list[tuple[Any, str, list[Any]]] = [
            (self.step_from, "step >= ?", [self.step_from]),
            (self.step_to, "step <= ?", [self.step_to]),
            (self.mode, "mode = ?", [self.mode]),
            (self.prompt, "instr(lower(prompt), lower(?)) > 0", [self.prompt]),
            (self.reward_min, f"{value} >= ?", [*name, self.reward_min]),
            (self.reward_max, f"{value} <= ?", [*name, self.reward_max]),
            (self.stop, "stop = ?", [self.stop]),
            (self.tool, "instr(tools, ?) > 0", [f"\n{self.tool}\n"]),
            (self.error if self.error == "any" else None, "errors != ''", []),
            (self.error if self.error != "any" else None, "instr(errors, ?) > 0", [f"\n{self.error}\n"]),
            (phrases or None, "id IN (SELECT rowid FROM words WHERE words MATCH ?)", [phrases]),
        ]
        used = [(condition, values) for asked, condition, values in conditions if asked is not None]
        return " AND ".join(condition for condition, _ in used) or "1", [v for _, values in used for v in values]


class RolloutIndex:
    """The rollouts of one output directory.

    A row is kept whole and compressed in it, so that segments are read once. One thread at a time may use it; others
    have an index of their own with the same `path`.

    Args:
        folder: The output directory of a run.
        path: The file of the index.
    """

    def __init__(self, folder: Path, path: Path | None = None):
        self.folder = folder
        self.path = path or folder / INDEX_FILE
        if path is None and not os.access(folder, os.W_OK):
            self._temporary = tempfile.TemporaryDirectory(prefix="rollouts-")  # deleted at the end of the program
            self.path = Path(self._temporary.name) / INDEX_FILE
        self.db = self._open()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.OperationalError:  # it is locked, or the disk is full: what is there may be an index
            raise
        except sqlite3.DatabaseError:
            self.path.unlink()
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")  # it can be built anew
            if db.execute("PRAGMA user_version").fetchone()[0] not in (0, INDEX_VERSION):
                raise sqlite3.DatabaseError("an index of another version")
            db.executescript(TABLES)
            db.execute(f"PRAGMA user_version = {INDEX_VERSION}")
        except sqlite3.DatabaseError:
            db.close()
            raise
        return db

    def close(self) -> None:
        self.db.close()

    # -- reading the log --

    def refresh(self, is_over: Callable[[], bool] = lambda: False) -> int:
        """Read what was added to the log since, and return the number of rows. It ends early where `is_over` says."""
        if self._is_another_run() and self._is_another_run():  # not a segment that was closed between two looks
            self._forget()
        added = 0
        for rank, number, path in self._segments():
            for rows in self._new_rows(rank, number, path):
                added += rows
                if is_over():
                    return added
        return added

    def _segments(self) -> list[tuple[int, int, Path]]:
        """(rank, number, file) of each segment, the open one last."""
        found = []
        for rank in logged_ranks(self.folder):
            path = self.folder / f"rollouts.rank{rank}.jsonl"
            closed = [(rank, segment_number(each), each) for each in segments(path)]
            last = closed[-1][1] if closed else 0
            found += closed + ([(rank, last + 1, path)] if path.exists() else [])
        return found

    def _is_another_run(self) -> bool:
        """Whether a segment begins otherwise than it did, since a new run has begun its log anew, or was replaced."""
        known = {
            (rank, number): rest
            for rank, number, *rest in self.db.execute("SELECT rank, number, head, over, size FROM segment")
        }
        for rank, number, path in self._segments():
            if (rank, number) in known:
                head, over, size = known[rank, number]
                if head_of(path) not in (None, "", head) or over and size_of(path) not in (None, size):
                    return True
        return False

    def _forget(self) -> None:
        with self._transaction():
            for table in ("rollout", "segment", "note"):
                self.db.execute(f"DELETE FROM {table}")
            self.db.execute("INSERT INTO words (words) VALUES ('delete-all')")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing. A second viewer of the folder waits meanwhile, and then finds the rows there."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:  # a full disk has ended it already
                self.db.execute("ROLLBACK")
            raise

    def _new_rows(self, rank: int, number: int, path: Path) -> Iterator[int]:
        """Add what a segment has behind the rows that were read; yields how many were added, by transactions."""
        asked = "SELECT bytes, over FROM segment WHERE rank = ? AND number = ?", (rank, number)
        closed = path.suffix == ".gz"
        at, over = self.db.execute(*asked).fetchone() or (0, 0)
        head = None if over else head_of(path)
        if head is None or not closed and path.stat().st_size <= at:
            return
        with opened(path) as file:
            while not over:
                with self._transaction():
                    at, over = self.db.execute(*asked).fetchone() or (0, 0)
                    count, at, more = self._add_lines(file, at, path.name)
                    over = int(closed and not more)
                    values = (rank, number, head, at, over, size_of(path))
                    self.db.execute("INSERT OR REPLACE INTO segment VALUES (?, ?, ?, ?, ?, ?)", values)
                yield count
                if not more:
                    return

    def _add_lines(self, file: Any, at: int, name: str) -> tuple[int, int, bool]:
        """(rows added, position behind them, whether there are more lines), at most `BATCH` lines."""
        count = 0
        try:
            file.seek(at)
            for _ in range(BATCH):
                line = file.readline()
                if not line.endswith(b"\n"):  # the end, or a line that is being written or was cut off by a kill
                    return count, at, False
                at += len(line)
                count += self._add(line)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self._note("cut off", f"{name}: {error}")
            return count, at, False
        return count, at, True

    def _add(self, line: bytes) -> bool:
        """Add a row. What cannot be shown is counted."""
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise Unreadable("a line is no rollout")
            values, text = summary(row)
            self._insert(values, text, line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            self._note("left out", "lines that are no JSON")
            return False
        except (Unreadable, TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            self._note("left out", f"rows that are no rollout ({type(error).__name__}: {error})"[:200])
            return False
        for name in sorted(NUMBERS):
            if not is_number(row.get(name, 0)):
                self._note("odd", name)
        if row.get("schema") != SCHEMA:
            self._note("schema", f"{row.get('schema')!r}"[:40])
        for name in (set(row) - KNOWN) | {f"turns.{n}" for turn in row["turns"] for n in set(turn) - KNOWN_OF_TURN}:
            self._note("unknown", clean(name)[:60])
        return True

    def _insert(self, values: dict[str, Any], text: str, line: bytes) -> None:
        place = (values["mode"], values["step"], values["number"], values["rank"])
        (attempt,) = self.db.execute(
            "SELECT COUNT(*) FROM rollout WHERE mode = ? AND step = ? AND number = ? AND rank = ?", place
        ).fetchone()  # evaluations have several batches, and a resumed run rolls out again
        values |= {"attempt": attempt, "team": f"{place[0]}/{place[1]}/{attempt}/{values['team']}"}
        values["body"] = zlib.compress(line.rstrip(b"\n"), 3)
        marks = ", ".join("?" * len(values))
        cursor = self.db.execute(f"INSERT INTO rollout ({', '.join(values)}) VALUES ({marks})", list(values.values()))
        self.db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (cursor.lastrowid, text))

    def _note(self, kind: str, name: str) -> None:
        self.db.execute("INSERT INTO note VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1", (kind, name))

    # -- asking --

    def notes(self) -> list[str]:
        """What of the log is not shown, or not as it was meant."""
        says = {
            "cut off": "{name}. What is behind is left out.",
            "left out": "{count} {name}: left out.",
            "schema": f"{{count}} rollouts have schema {{name}}, this viewer knows {SCHEMA}: it shows what it can.",
            "odd": "{count} times {name} is no number: shown as what its text spells, else as 0 (a step as 1) or "
            "not at all.",
            "unknown": "{count} times a field {name} that this viewer does not know: it stands under `all fields`.",
        }
        rows = self.db.execute("SELECT kind, name, count FROM note ORDER BY kind, count DESC LIMIT 20")
        return [says[kind].format(name=name, count=count) for kind, name, count in rows] + self._unread()

    def _unread(self) -> list[str]:
        """Segments that are gone, and half lines at the end of what nobody writes to."""
        found, paths = [], {(rank, number): path for rank, number, path in self._segments()}
        for rank, number, at in self.db.execute("SELECT rank, number, bytes FROM segment"):
            path = paths.get((rank, number))
            if path is None:
                found.append(f"Segment {number} of rank {rank} is gone: its rollouts are from the index.")
            elif path.suffix == ".jsonl":
                with contextlib.suppress(FileNotFoundError):
                    rest, age = path.stat().st_size - at, time.time() - path.stat().st_mtime
                    if rest > 0 and age > STILL_SECONDS:
                        found.append(f"{path.name} ends with half a line, of {rest} bytes: left out.")
        return found

    def info(self) -> dict[str, Any]:
        """Numbers, and what can be chosen in the filters."""
        one = self.db.execute
        count, last, first, latest = one("SELECT COUNT(*), MAX(id), MIN(step), MAX(step) FROM rollout").fetchone()

        def split(column: str) -> list[str]:
            values = one(f"SELECT DISTINCT {column} FROM rollout").fetchall()
            return sorted({name for (value,) in values for name in value.split("\n") if name})

        rewards = one("SELECT DISTINCT key FROM (SELECT DISTINCT rewards FROM rollout LIMIT 1000), json_each(rewards)")
        sampled = one(
            "SELECT SUM(size) FROM (SELECT MAX(batch) AS size FROM rollout WHERE mode != 'dropped' "
            "GROUP BY mode, step, attempt)"
        ).fetchone()[0]
        head = one("SELECT head FROM segment ORDER BY number, rank LIMIT 1").fetchone()
        return {
            "generation": head and head[0], "count": count, "sampled": sampled or 0, "last": last,
            "steps": [first, latest],
            "stops": [stop for (stop,) in one("SELECT DISTINCT stop FROM rollout ORDER BY stop")],
            "modes": [mode for (mode,) in one("SELECT DISTINCT mode FROM rollout ORDER BY mode DESC")],
            "rewards": sorted(name for (name,) in rewards), "tools": split("tools"), "errors": split("errors"),
            "notes": self.notes(),
        }  # fmt: skip

    def table(self, query: Query) -> dict[str, Any]:
        """A page of rollouts: `total` of the filter, and `rows`."""
        where, values = query.where()
        (total,) = self.db.execute(f"SELECT COUNT(*) FROM rollout WHERE {where}", values).fetchone()
        order = f"{query.sort} {'DESC' if query.descending else 'ASC'}, id {'DESC' if query.descending else 'ASC'}"
        found = self.db.execute(
            f"SELECT {', '.join(SHOWN)} FROM rollout WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
            [*values, query.limit, query.offset],
        )
        return {"total": total, "rows": [shown(row) for row in found]}

    def rollout(self, number: int) -> dict[str, Any]:
        """One rollout: its line of the table and its `row` of the log. Raises `KeyError`."""
        found = self.db.execute(f"SELECT {', '.join(SHOWN)}, body FROM rollout WHERE id = ?", [number]).fetchone()
        if found is None:
            raise KeyError(f"There is no rollout {number}.")
        return {**shown(found[:-1]), "row": json.loads(zlib.decompress(found[-1]), **JSON_ALONE)}

    def group(self, number: int) -> list[dict[str, Any]]:
        """The logged rollouts of the group that this one is of. Raises `KeyError`."""
        team = self.rollout(number)["team"]
        found = self.db.execute("SELECT id FROM rollout WHERE team = ? ORDER BY number, id", [team]).fetchall()
        return [self.rollout(each) for (each,) in found]

    def by_step(self) -> list[dict[str, Any]]:
        """Means of training rollouts by step, under the names of the metrics: for runs whose metrics are not there."""
        rows: dict[int, dict[str, Any]] = {}
        found = self.db.execute(
            "SELECT step, COUNT(*), AVG(reward), AVG(turns), AVG(tokens) FROM rollout WHERE mode = 'train' "
            "GROUP BY step"
        )
        for step, count, reward, turns, tokens in found:
            rows[step] = {
                "step": step,
                "count": count,
                "reward": reward,
                "turns/mean": turns,
                "completions/mean_total_length": tokens,
            }
        found = self.db.execute("SELECT step, stop, COUNT(*) FROM rollout WHERE mode = 'train' GROUP BY step, stop")
        for step, stop, count in found:
            rows[step][f"stop/{stop}"] = count / rows[step]["count"]
        found = self.db.execute(
            "SELECT step, key, AVG(value) FROM rollout, json_each(rewards) WHERE mode = 'train' GROUP BY step, key"
        )
        for step, name, value in found:
            rows[step][f"rewards/{name}/mean"] = value
        return [rows[step] for step in sorted(rows)]

    def sample(self, most: int) -> tuple[list[int], str]:
        """(numbers of at most so many rollouts, words that say which): whole steps, evenly spread."""
        of_step: dict[int, list[int]] = {}
        for number, step in self.db.execute("SELECT id, step FROM rollout ORDER BY step, id"):
            of_step.setdefault(step, []).append(number)
        steps, total = list(of_step), sum(map(len, of_step.values()))
        if total <= most:
            return [number for numbers in of_step.values() for number in numbers], f"all {total:,} rollouts"
        every = next(
            (n for n in range(2, len(steps)) if sum(len(of_step[step]) for step in spread(steps, n)) <= most),
            len(steps),
        )
        chosen = [number for step in spread(steps, every) for number in of_step[step]]
        if len(chosen) > most:
            return chosen[:most], f"the first {most:,} of step {steps[-1]}, of {total:,} rollouts"
        named = ", ".join(map(str, spread(steps, every)[:4]))
        return chosen, f"{len(chosen):,} of {total:,} rollouts: one step in {every} ({named}, ...)"


def spread(keys: list, every: int) -> list:
    """Every so many of them, the last one among them.

    >>> spread([1, 2, 3, 4, 5, 6], 2), spread([1, 2, 3], 5)
    ([2, 4, 6], [3])
    """
    return keys[::-1][::every][::-1]


def shown(values: tuple) -> dict[str, Any]:
    """A line of the table: text columns that hold several names become lists."""
    row = dict(zip(SHOWN, values))
    row["rewards"] = json.loads(row["rewards"])
    for name in ("tools", "errors"):
        row[name] = [each for each in row[name].split("\n") if each]
    return row


def as_item(row: dict[str, Any], number: int) -> dict[str, Any]:
    """A row of the log as an index gives it, for a page without one. Raises `Unreadable`."""
    values, _ = summary(row)
    values |= {"id": number, "attempt": 0, "team": f"{values['mode']}/{values['step']}/0/{values['team']}"}
    return {**shown(tuple(values[name] for name in SHOWN)), "row": row}


def opened(path: Path) -> Any:
    """A segment, as bytes."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def size_of(path: Path) -> int | None:
    """In bytes. None where it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def head_of(path: Path) -> str | None:
    """What tells a segment from one of another run: its first line.

    None where there is none yet, and an empty text where it cannot be read.
    """
    try:
        with opened(path) as file:
            line = file.readline()
    except FileNotFoundError:  # renamed at this moment
        return None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return ""
    return hashlib.sha256(line).hexdigest() if line.endswith(b"\n") else None


def finite_number(text: str) -> float:
    """A number of a filter. Raises `ValueError`."""
    number = number_or_none(text)
    if number is None:
        raise ValueError(text)
    return number


def true_or_false(text: str) -> bool:
    """Raises `KeyError`."""
    return {"true": True, "false": False}[text]
