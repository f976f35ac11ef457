"""The log of metrics: a row of JSON per log in `metrics.jsonl`, which a running job can be followed by."""

from __future__ import annotations

import json
import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mt_grpo.rollout_log import write_rows

logger = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"


class MetricsLog(TrainerCallback):
    """Writes on rank 0 what is logged, with its step. NaN becomes null, which JSON has.

    A new run begins the file anew. A resumed one goes on, and logs some steps again: the later row is the valid one.
    A file that cannot be written is a warning, once, and training goes on.
    """

    def __init__(self):
        self.failed = False

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step == 0:
            self._write(args, [], fresh=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and state.is_world_process_zero:
            self._write(args, [{"step": state.global_step, **{name: as_json(value) for name, value in logs.items()}}])

    def _write(self, args: Any, rows: list[dict[str, Any]], fresh: bool = False) -> None:
        path = Path(args.output_dir) / METRICS_FILE
        try:
            write_rows(path, rows, fresh)
        except OSError as error:
            if not self.failed:
                logger.warning(f"Metrics are not in {path}: {error}. Training goes on.")
            self.failed = True


def as_json(value: Any) -> Any:
    """A metric as a value of JSON.

    >>> as_json(float("nan")), as_json(0.5), as_json("a")
    (None, 0.5, 'a')
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run in an output directory has logged, by step; of a step that was trained again the later row.

    Where there is no `metrics.jsonl`, the rows are those of `trainer_state.json`. What is no JSON is left out.
    """
    logs: list[Any] = []
    with suppress(OSError), open(folder / METRICS_FILE, encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                logs.append(json.loads(line))
    if not logs:
        with suppress(OSError, ValueError, KeyError, TypeError):
            logs = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    rows: dict[tuple, dict[str, Any]] = {}
    for row in logs:
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            row = {name: as_json(value) for name, value in row.items()}
            kind = next((kind for kind in ("eval_reward", "reward", "train_runtime") if kind in row), "")
            rows[row["step"], kind] = row
    return [rows[key] for key in sorted(rows)]
