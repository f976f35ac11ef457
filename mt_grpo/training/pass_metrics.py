"""Metrics of TRL's loss over the passes of a step, so that they do not depend on how passes are cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mt_grpo.training.passes import Pass

OF_ROWS = ("clip_ratio/", "vespo/")  # with a ratio per sequence TRL's means are over rows


class PassMetrics:
    """What TRL logs in each call of its loss, put together: means by tokens, smallest and largest by passes.

    Args:
        per_row: Whether the ratios of the loss are of sequences.
    """

    def __init__(self, per_row: bool):
        self.per_row = per_row
        self._values: dict[str, list[tuple[float, float]]] = defaultdict(list)  # name -> (value, what it weighs)

    @contextmanager
    def of(self, metrics: dict[str, dict[str, list[float]]], mode: str, each: Pass) -> Iterator[None]:
        """Within it TRL's metrics are those of one pass. A pass without a trained token has none.

        Args:
            metrics: TRL's `_metrics`.
            mode: `train` or `eval`.
            each: The pass.
        """
        logged, metrics[mode] = metrics[mode], defaultdict(list)
        try:
            yield
            for name, values in metrics[mode].items():
                self.add(name, values[-1], each)
        finally:
            metrics[mode] = logged

    def add(self, name: str, value: float, each: Pass) -> None:
        """A value of one pass, the same on all ranks."""
        by_row = self.per_row and name.startswith(OF_ROWS)
        self._values[name].append((value, each.num_rows if by_row else each.num_tokens))

    def finish(self, metrics: dict[str, list[float]]) -> None:
        """One value per name for all passes since the last call.

        >>> values, first, second = PassMetrics(False), Pass(), Pass()
        >>> first.num_tokens, second.num_tokens = 3, 1
        >>> for name in ("entropy", "clip_ratio/low_min"):
        ...     values.add(name, 1.0, first), values.add(name, 5.0, second)
        (None, None)
        (None, None)
        >>> metrics = defaultdict(list)
        >>> values.finish(metrics)
        >>> dict(metrics)
        {'entropy': [2.0], 'clip_ratio/low_min': [1.0]}
        """
        for name, found in self._values.items():
            counted = [(value, weight) for value, weight in found if weight > 0] or found[-1:]
            values = [value for value, _ in counted]
            if name.endswith("_min") or name.endswith("/min"):
                metrics[name].append(min(values))
            elif name.endswith("_max") or name.endswith("/max"):
                metrics[name].append(max(values))
            else:
                total = sum(weight for _, weight in counted) or 1.0
                mean = sum(value * weight for value, weight in counted) / total
                metrics[name].append(mean if total else values[-1])
        self._values.clear()
