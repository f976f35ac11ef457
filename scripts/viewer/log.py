"""The newest rollouts of a run's log, in memory: filters, groups, and what was added since."""

from __future__ import annotations

import json
import re
import unicodedata
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_grpo.reports.rollout_log import SCHEMA, SEGMENT_BYTES, segments
from viewer.rows import clean, number_or_none, table_line, text_to_search

MOST_BYTES = 200 * 10**6  # of a log's lines; the newest ones are read


def plain(text: str) -> str:
    """The words of a text in lower case, without accents, each after a space. viewer.js has the same function."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
    return (" " + re.sub(r"[\W_]+", " ", text.lower()).strip()).rstrip()


@dataclass(frozen=True)
class Rollout:
    """A logged rollout: its line of the list, its words as `plain` has them, and its compressed row of the log."""

    line: dict[str, Any]
    words: str
    row: bytes

    def item(self) -> dict[str, Any]:
        """Return the line with its `row`, without the NaN and infinities that browsers cannot read in JSON."""
        row = json.loads(zlib.decompress(self.row), parse_constant=lambda name: None, parse_float=number_or_none)
        return {**self.line, "row": row}

    def matches(self, query: dict[str, str]) -> bool:
        """Whether this rollout matches the filters of the page. viewer.js has the same function."""

        def inside(value: float | None, low: str | None, high: str | None) -> bool:
            return not (low or high) or value is not None and float(low or "-inf") <= value <= float(high or "inf")

        line, asked = self.line, query.get
        name, error = asked("reward_name", "reward"), asked("error")
        reward = {**line["rewards"], "reward": line["reward"]}.get(name)
        return (
            inside(line["step"], asked("step_from"), asked("step_to"))
            and inside(reward, asked("reward_min"), asked("reward_max"))
            and all(asked(key) in (None, line[key]) for key in ("mode", "stop"))
            and asked("prompt", "").lower() in line["prompt"].lower()
            and ("tool" not in query or query["tool"] in line["tools"])
            and (error is None or error in line["errors"] or error == "any" and line["errors"] != [])
            and all(plain(word) in self.words for word in asked("text", "").split())
        )


@dataclass
class Position:
    """How far the log of a rank was read, and which of its rollouts are kept."""

    number: int  # of the segment that is being read
    at: int = 0  # how many bytes of it were read
    first_line: bytes = b""
    kept: deque[tuple[int, int]] = field(default_factory=deque)  # (id, bytes), the oldest first


class LogReader:
    """The newest rollouts of an output directory; `refresh` reads what was added. One thread at a time may use it.

    Args:
        folder: The output directory of a run.
        most_bytes: Bytes of the log that are kept; each rank has the same share.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES):
        self.folder, self.most_bytes, self.generation = folder, most_bytes, 0
        self._forget()

    def _forget(self) -> None:
        self.rollouts: dict[int, Rollout] = {}  # by their ids, in the order in which they were read
        self.positions: dict[int, Position] = {}
        self.attempts: Counter[tuple] = Counter()
        self.left_out: Counter[str] = Counter()
        self.last, self.has_more = 0, False
        self.generation += 1

    def refresh(self) -> int:
        """Read what was added to the log, and return how many rollouts were. A new run in the folder begins anew."""
        if self._is_another_run() and self._is_another_run():  # not a segment that was renamed between two looks
            self._forget()
        last, of_rank = self.last, segments(self.folder)
        for rank, files in of_rank.items():
            self._read_rank(rank, files, self.most_bytes // len(of_rank))
        return self.last - last

    def _is_another_run(self) -> bool:
        """Whether a segment that was being read is gone, has become shorter, or begins with another line."""
        of_rank = segments(self.folder)
        for rank, position in self.positions.items():
            path = of_rank.get(rank, {}).get(position.number)
            try:
                if path is None or path.stat().st_size < position.at:
                    return True
                with open(path, "rb") as file:
                    if not file.readline().startswith(position.first_line):
                        return True
            except FileNotFoundError:  # renamed at this moment
                continue
        return False

    def _read_rank(self, rank: int, files: dict[int, Path], most_bytes: int) -> None:
        if rank not in self.positions:
            newest = list(files)[-2 - most_bytes // SEGMENT_BYTES :]  # each closed one has at least SEGMENT_BYTES
            self.positions[rank] = Position(newest[0])
            self.has_more |= len(newest) < len(files)
        for number, path in files.items():
            position = self.positions[rank]
            if number > position.number:
                position.number, position.at, position.first_line = number, 0, b""
            try:
                if number < position.number:
                    continue
                with open(path, "rb") as file:
                    if segments(self.folder).get(rank, {}).get(number) != path:
                        return  # it was closed at this moment: the next refresh reads on
                    self._read_lines(position, file)
            except FileNotFoundError:
                return
            size = sum(size for _, size in position.kept)
            while size > most_bytes and len(position.kept) > 1:
                number_of_oldest, size_of_oldest = position.kept.popleft()
                del self.rollouts[number_of_oldest]
                size -= size_of_oldest
                self.has_more = True

    def _read_lines(self, position: Position, file: Any) -> None:
        file.seek(position.at)
        for text in file:
            if not text.endswith(b"\n"):  # it is being written, or was cut off by a kill
                return
            position.first_line = position.first_line or text
            position.at += len(text)
            try:
                self._add(text)
                position.kept.append((self.last, len(text)))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
                self.left_out[f"rows that are no rollout ({type(error).__name__}: {clean(error)})"[:200]] += 1

    def _add(self, text: bytes) -> None:
        row = json.loads(text)
        line, words = table_line(row), plain(text_to_search(row))
        place = line["mode"], line["step"], line["number"], line["rank"]
        attempt = self.attempts[place]  # evaluations have several batches, and a resumed run samples again
        self.attempts[place] += 1
        self.last += 1
        team = f"{line['mode']}/{line['step']}/{attempt}/{line['team']}"
        line |= {"id": self.last, "attempt": attempt, "team": team, "schema": row.get("schema")}
        self.rollouts[self.last] = Rollout(line, words, zlib.compress(text, 1))

    def info(self) -> dict[str, Any]:
        """Numbers, what can be chosen in the filters, and notes on what is not shown."""
        lines = [rollout.line for rollout in self.rollouts.values()]
        batches = {(line["mode"], line["step"], line["attempt"]): line["batch"] for line in lines}
        kept = f"only the newest {len(lines):,} rollouts are shown"
        more = f"The log has more than {self.most_bytes / 1e6:.0f} MB: {kept}."
        others = sum(line["schema"] != SCHEMA for line in lines)
        other = f"{others} rollouts are not of schema {SCHEMA}, which this viewer knows: it shows what it can."
        return {
            "generation": self.generation, "count": len(lines), "last": self.last,
            "sampled": sum(size for (mode, _, _), size in batches.items() if mode != "dropped"),
            "steps": sorted({(line["step"], line["mode"]) for line in lines}),
            "stops": sorted({line["stop"] for line in lines}),
            "modes": sorted({line["mode"] for line in lines}, reverse=True),
            **{key: sorted({name for line in lines for name in line[key]}) for key in ("rewards", "tools", "errors")},
            "notes": [more] * self.has_more + [other] * (others > 0)
            + [f"{count} {what}: left out." for what, count in sorted(self.left_out.items())[:20]],
        }  # fmt: skip

    def table(self, query: dict[str, str]) -> dict[str, Any]:
        """Return a page of the list: `total` rollouts match the filters, and `rows`. Raises `ValueError`."""
        query = {name: value for name, value in query.items() if value != ""}
        key, down = query.get("sort", "step"), query.get("descending") == "true"
        lines = [rollout.line for rollout in self.rollouts.values() if rollout.matches(query)]
        if "groups" in query:  # the first rollout of each
            lines = list({line["team"]: line for line in reversed(lines)}.values())
        lines.sort(key=lambda line: (line[key] is not None, line[key] or 0, line["id"]), reverse=down)
        first, count = max(0, int(query.get("offset", 0))), int(query.get("limit", 50))
        return {"total": len(lines), "rows": lines[first : first + min(count, 500)]}

    def rollout(self, number: int) -> dict[str, Any]:
        """Return one rollout: its line of the list and its `row` of the log. Raises `KeyError`."""
        if number not in self.rollouts:
            raise KeyError(f"There is no rollout {number}.")
        return self.rollouts[number].item()

    def group(self, number: int) -> list[dict[str, Any]]:
        """Return the logged rollouts of the group that this one is of. Raises `KeyError`."""
        team = self.rollout(number)["team"]
        same = [rollout.item() for rollout in self.rollouts.values() if rollout.line["team"] == team]
        return sorted(same, key=lambda item: (item["number"], item["id"]))
