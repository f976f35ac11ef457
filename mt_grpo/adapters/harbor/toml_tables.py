"""Tables of a task.toml, read with their types. Keys that nobody here knows are left alone, as Harbor does."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BrokenTask(ValueError):
    """A task folder that Harbor could not run either: its author must mend it."""


class NeedsMore(Exception):
    """A task that is whole, and needs what is not here.

    Args:
        reason: What, in a few words. Tasks are counted by it.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Healthcheck:
    """A command that must succeed before anybody works. The numbers are those of Docker's HEALTHCHECK, in seconds."""

    command: str
    interval: float = 5.0
    timeout: float = 30.0
    start_period: float = 0.0  # in which it may fail, and is tried each `start_interval`
    start_interval: float = 5.0
    retries: int = 3


NETWORKS = ("public", "no-network", "allowlist")


class TomlTable:
    """A table of a task.toml.

    Args:
        values: What it holds.
        where: Its name in errors, such as `[agent]`.
    """

    def __init__(self, values: Any, where: str):
        if not isinstance(values, dict):
            raise BrokenTask(f"task.toml: {where} is {values!r:.60}, expected a table.")
        self.values, self.where = values, where

    def table(self, name: str) -> TomlTable:
        """A table in it; an empty one where there is none."""
        where = f"{self.where[:-1]}.{name}]" if self.where.startswith("[") else f"[{name}]"
        return TomlTable(self.values.get(name, {}), where)

    def tables(self, name: str) -> list[TomlTable]:
        """An array of tables; empty where there is none."""
        found = self.values.get(name) or []
        if not isinstance(found, list):
            raise BrokenTask(f"task.toml: {name} is {found!r:.60}, expected tables [[{name}]].")
        return [TomlTable(each, f"[{name}]") for each in found]

    def has(self, name: str) -> bool:
        """Whether a key is there, and says something: not false, 0, or empty."""
        return bool(self.values.get(name))

    def number(self, name: str, least: float = 0.0) -> float | None:
        """A number above `least`; None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < math.inf:
            raise BrokenTask(f"task.toml: {self.where} {name} is {value!r:.60}, expected a number above {least:g}.")
        return float(value)

    def text(self, name: str) -> str | None:
        """A text; None where there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise BrokenTask(f"task.toml: {self.where} {name} is {value!r:.60}, expected a text.")
        return value

    def choice(self, name: str, values: tuple[str, ...]) -> str | None:
        """One of several texts; None where there is none."""
        value = self.text(name)
        if value is not None and value not in values:
            raise BrokenTask(f"task.toml: {self.where} {name} is {value!r:.60}, expected one of {', '.join(values)}.")
        return value

    def user(self) -> None:
        """Raise `NeedsMore` for a user that is not root, which a sandbox does not have."""
        value = self.values.get("user")
        if value not in (None, "root", 0, "0"):
            raise NeedsMore(f"{self.where} user")

    def megabytes(self, name: str, old: str) -> int | None:
        """A size: `memory_mb = 2048`, or as it was written before, `memory = "2G"`."""
        value = self.number(name)
        if value is None and self.values.get(old) is not None:
            value = megabytes_of(self.text(old), f"{self.where} {old}")
        return None if value is None else max(1, int(value))

    def healthcheck(self) -> Healthcheck | None:
        """The table `healthcheck`; None where there is none."""
        if not self.has("healthcheck"):
            return None
        table = self.table("healthcheck")
        if not (command := table.text("command")):
            raise BrokenTask(f"task.toml: {table.where} has no command.")
        names = ("interval", "timeout", "start_period", "start_interval")
        found = {name: table.number(f"{name}_sec", -1.0 if name == "start_period" else 0.0) for name in names}
        found["retries"] = table.number("retries")
        return Healthcheck(command, **{name: value for name, value in found.items() if value is not None})

    def network(self) -> str | None:
        """`network_mode`, or what it was before, `allow_internet`; None where neither is there."""
        allowed = self.values.get("allow_internet")
        if allowed not in (None, True, False):
            raise BrokenTask(f"task.toml: {self.where} allow_internet is {allowed!r:.60}, expected true or false.")
        old = None if allowed is None else "public" if allowed else "no-network"
        return self.choice("network_mode", NETWORKS) or old

    def env(self) -> dict[str, str]:
        """Variables, in which `${NAME:-default}` is the default.

        A variable of this machine may be a secret, and the policy's commands would see it: none is read. Raises
        `NeedsMore` for one without a default.
        """
        found = self.values.get("env") or {}
        if not isinstance(found, dict):
            raise BrokenTask(f"task.toml: {self.where} env is {found!r:.60}, expected a table of texts.")
        read = {}
        for name, value in found.items():
            if not isinstance(value, str):
                raise BrokenTask(f"task.toml: {self.where} env.{name} is {value!r:.60}, expected a text.")
            if asked := re.search(r"\$\{(\w+)\}", value):
                raise NeedsMore(f"the machine's variable {asked[1]} in {self.where} env")
            read[name] = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
        return read


def megabytes_of(text: str, where: str) -> float:
    """A size as Harbor wrote it once.

    >>> megabytes_of("2G", ""), megabytes_of("512m", ""), megabytes_of("2048K", "")
    (2048.0, 512.0, 2.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([GMK])", text.strip().upper())
    if not match:
        raise BrokenTask(f"task.toml: {where} is {text!r:.60}, expected a size such as '2G' or '512M'.")
    return float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]]


TEXT_BYTES = 2**20  # of a file of a task that is read as text


def text_of(file: Path, task: Path) -> str:
    """A text file of a task. Raises `BrokenTask` where it is missing, is empty, is too long or is not UTF-8."""
    name = file.relative_to(task)
    if not file.is_file():
        raise BrokenTask(f"{name} is missing.")
    if file.stat().st_size > TEXT_BYTES:
        raise BrokenTask(f"{name} has more than {TEXT_BYTES} bytes.")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokenTask(f"{name} cannot be read as UTF-8: {error}.") from None
    if not text.strip():
        raise BrokenTask(f"{name} is empty.")
    return text
