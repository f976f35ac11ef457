"""Errors of one rank are raised on all ranks, so that no rank waits for one that has stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from mt_grpo.base.errors import RunError, RunStopped, ServerError, ServerLost, error_line


def raise_on_all_ranks(
    error: Exception | None, what: str, step: int, stopped: int | None = None, counts: tuple[int, ...] = ()
) -> list[int]:
    """Raise `RunStopped` on all ranks if any rank got a signal (`stopped`), or `RunError` if any failed. Collective.

    Every rank calls it after work (`what`) that can fail on a single one. Returns `counts`, summed over the ranks.
    """
    text = error and f"rank {PartialState().process_index}: {error_line(error)}"
    texts, signals, numbers = zip(*gather_object([(text, stopped, counts)]))
    if any(signals):
        raise RunStopped(next(filter(None, signals)), f" at step {step}")
    if any(texts):
        raise RunError(f"{what} failed at step {step}: {'; '.join(filter(None, texts))}") from error
    return [sum(column) for column in zip(*numbers)]


def on_main_process(function: Callable[[], Any]) -> Any:
    """Run `function` on rank 0. Every rank returns its result, or raises its error as `ServerError`. Collective."""
    outcome: list[Any] = [None, None]  # result, error
    if PartialState().is_main_process:
        try:
            outcome[0] = function()
        except Exception as error:  # every rank raises it below
            text = str(error) if isinstance(error, ServerError) else error_line(error)
            outcome[1] = (ServerLost if isinstance(error, ServerLost) else ServerError)(text)
    broadcast_object_list(outcome, from_process=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
