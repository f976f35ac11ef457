"""The metrics of a run in an output directory."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from mt_grpo.reports.progress import METRICS_FILE, evaluation_prefix


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The logs of a run in an output directory, by step. Steps that a resumed run trained again count once, the later.

    A line that is not JSON is left out.
    """
    logs: list[Any] = []
    with suppress(OSError), open(folder / METRICS_FILE, encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                logs.append(json.loads(line, parse_constant=lambda name: None))  # NaN and infinities
    rows: dict[tuple, dict[str, Any]] = {}
    for row in logs:
        if isinstance(row, dict) and "step" in row:
            if "reward" in row:  # of a resumed run: the steps after this one were given up
                rows = {key: each for key, each in rows.items() if key[0] <= row["step"]}
            rows[row["step"], evaluation_prefix(row) or ("reward" if "reward" in row else "")] = row
    return [rows[key] for key in sorted(rows)]
