"""Metrics of TRL's loss over the passes of a step, so that they do not depend on how passes are cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mt_grpo.training.passes import Pass


class PassMetrics:
    """What TRL logs in each call of its loss, put together: means by tokens, smallest and largest by passes."""

    def __init__(self):
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
        self._values[name].append((value, each.weight))

    def finish(self, metrics: dict[str, list[float]]) -> None:
        """One value per name for all passes since the last call.

        >>> values, first, second = PassMetrics(), Pass(), Pass()
        >>> first.weight, second.weight = 3, 1
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
            counted = [(value, weight) for value, weight in found if weight > 0]
            if not counted:  # no token is trained: as TRL has it
                metrics[name].append(found[-1][0])
            elif name.endswith("min"):
                metrics[name].append(min(value for value, _ in counted))
            elif name.endswith("max"):
                metrics[name].append(max(value for value, _ in counted))
            else:
                total = sum(weight for _, weight in counted)
                metrics[name].append(sum(value * weight for value, weight in counted) / total)
        self._values.clear()
