"""Where a reward function raised, and for which rollout."""

from __future__ import annotations

import functools
import inspect
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from mt_grpo.base.rows import row_text
from mt_grpo.conversation.tools.threads import ToolTimeout

SEARCH_SECONDS = 10.0  # for all calls with one rollout each; the run waits so long to end


class RewardError(RuntimeError):
    """A reward function raised.

    Attributes:
        func: It.
        place: The place in the batch of the first rollout for which it raises alone; None: not known.
    """

    def __init__(self, message: str, func: Callable, place: int | None = None):
        super().__init__(message)
        self.func, self.place = func, place


def file_of(func: Callable) -> str | None:
    """The file in which a function, or the class of a callable object, is written; None for a built-in one."""
    while isinstance(func, functools.partial):
        func = func.func
    func = inspect.unwrap(func)
    try:
        return inspect.getsourcefile(func if inspect.isroutine(func) or isinstance(func, type) else type(func))
    except TypeError:
        return None


def where_raised(func: Callable, error: BaseException) -> str:
    """The file and the line of the function's own file that ran last, and of what it called, if that raised.

    >>> import json
    >>> try:
    ...     json.loads("{")
    ... except ValueError as error:
    ...     where_raised(json.loads, error).rpartition("/")[2].rpartition(",")[0]
    'decoder.py'
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown location"
    own = [frame for frame in frames if frame.filename == file_of(func)]
    places = dict.fromkeys(f"{short(frame.filename)}, line {frame.lineno}" for frame in [*own[-1:], frames[-1]])
    return ", which called ".join(places)


def short(path: str) -> str:
    """A path as one types it, from the working directory if it lies below."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def raises_alone(func: Callable, error: BaseException, columns: dict[str, Any], call: Callable) -> list[int]:
    """The places of the rollouts for which a function raises alone, the same kind of error at the same line.

    The function is called once more with each rollout alone, for `SEARCH_SECONDS` at most. It logs nothing meanwhile.
    A call that takes longer ends the search.

    Args:
        func: It has raised `error`.
        error: What it raised.
        columns: What it got: a list per column, and what is of no single rollout.
        call: Calls it with columns, and seconds that it may take.
    """
    where, end, places = where_raised(func, error), time.monotonic() + SEARCH_SECONDS, []
    silent = {name: lambda *args: None for name in ("log_extra", "log_metric") if name in columns}
    for i in range(len(columns["prompts"])):
        part = {key: [v[i]] if isinstance(v, list) else v for key, v in columns.items()} | silent
        try:
            call(part, max(end - time.monotonic(), 0.001))
        except ToolTimeout:
            break
        except Exception as again:
            if type(again) is type(error) and where_raised(func, again) == where:
                places.append(i)
        if time.monotonic() >= end:
            break
    return places


def row_shown(columns: dict[str, list], place: int) -> str:
    """A rollout's row, without what is no column of the data, as JSON that is cut."""
    return row_text({key: values[place] for key, values in columns.items()})
