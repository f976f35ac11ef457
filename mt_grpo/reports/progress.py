"""One readable line per log in place of a dictionary of sixty numbers, and what the run is doing meanwhile."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from mt_grpo.reports.rollout_log import write_rows

logger = logging.getLogger(__name__)


# The log of metrics: a row of JSON per log in `metrics.jsonl`, by which a running job can be followed.


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
                logger.warning(f"The metrics could not be written to {path}: {error}. Training continues.")
            self.failed = True


def as_json(value: Any) -> Any:
    """A metric as a value of JSON.

    >>> as_json(float("nan")), as_json(0.5), as_json("a")
    (None, 0.5, 'a')
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The logs of a run in an output directory, by step. Of what was trained again only the later attempt counts.

    Without `metrics.jsonl` the rows are those of `trainer_state.json`. A line that is no JSON is left out.
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
            kind = kind or name_of_evaluation(row)
            if kind == "reward":  # a run that was resumed before them: these steps were given up
                rows = {key: each for key, each in rows.items() if key[0] <= row["step"]}
            rows[row["step"], kind] = row
    return [rows[key] for key in sorted(rows)]


COLUMNS, MOST_NAME = 80, 16  # of a line of a step, and of a reward's name in it
CLEAR = "\r\x1b[K"  # empties the line of a terminal, and puts the cursor at its beginning


class ProgressLine(TrainerCallback):
    """Prints on rank 0, in place of transformers' dictionary of all metrics.

    A terminal shows what the run is doing in one line, which is written again every second. The cursor stays at the
    beginning of this line, so that a warning is written over it. Elsewhere the line is printed after each
    `QUIET_SECONDS` in which nothing else was printed: a log is not flooded, and a long step is not silent.
    """

    QUIET_SECONDS = 60.0
    TERMINAL_SECONDS = 1.0

    def __init__(self, trainer: Any):
        self.trainer, self.step_began, self.printed = trainer, 0.0, 0.0
        self.steps: list[float] = []  # seconds of each
        self.new_steps = 0  # since the last line
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def on_init_end(self, args, state, control, **kwargs):
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.remove_callback(ProgressCallback)

    def on_train_begin(self, args, state, control, **kwargs):
        self.steps, self.new_steps, self.printed = [], 0, time.monotonic()
        if state.is_world_process_zero:
            self._over = threading.Event()
            self._thread = threading.Thread(target=self._watch, args=(self._over,), name="progress", daemon=True)
            self._thread.start()

    def on_step_begin(self, args, state, control, **kwargs):
        self.step_began = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(time.monotonic() - self.step_began)
        self.new_steps += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and state.is_world_process_zero:
            # Steps that train again on a batch are short: a mean is over whole batches, each with its rollouts.
            last = self.steps[-max(self.new_steps, steps_per_batch(args)) :]
            seconds = sum(last) / len(last) if last else None
            outcome = self.trainer.reward_functions.main_outcome
            self.say(log_line(logs, state.global_step, state.max_steps, outcome, seconds))
            self.new_steps = self.new_steps if any(key.startswith("eval_") for key in logs) else 0

    def on_train_end(self, args, state, control, **kwargs):
        self.end_of_run()

    def say(self, text: str, end: str = "\n") -> None:
        """Print a text in place of the line that a terminal shows at the moment."""
        with self._lock:
            self.printed = time.monotonic()
            print(f"{CLEAR if sys.stdout.isatty() else ''}{text}", end=end, flush=True)

    def end_of_run(self) -> None:
        """Print no further lines about what the run is doing."""
        if not self._over.is_set():
            self._over.set()
            if self._thread is not None:
                self._thread.join(timeout=5.0)
            if sys.stdout.isatty():
                self.say("", end="")

    def _watch(self, over: threading.Event) -> None:
        terminal = sys.stdout.isatty()
        began, before = time.monotonic(), ""
        while not over.wait(self.TERMINAL_SECONDS if terminal else self.QUIET_SECONDS / 10):
            doing = what_it_does(self.trainer)
            if doing.partition(" ")[0] != before:
                began, before = time.monotonic(), doing.partition(" ")[0]
            step = self.trainer.state.global_step
            where = f"step {step + 1}" if self.trainer.model.training else f"evaluation at step {step}"
            text = f"{where}: {doing} ({time.monotonic() - began:.0f} s)"
            if over.is_set():
                return
            if terminal:
                self.say(text, end="\r")
            elif time.monotonic() - self.printed >= self.QUIET_SECONDS:
                self.say(text)


def steps_per_batch(args: Any) -> int:
    """Optimizer steps from one batch of rollouts.

    >>> from types import SimpleNamespace
    >>> steps_per_batch(SimpleNamespace(steps_per_generation=8, num_iterations=2, gradient_accumulation_steps=4))
    4
    """
    return max(1, args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def what_it_does(trainer: Any) -> str:
    """Describe what the run is doing, as far as rank 0 can tell."""
    if trainer.weight_sync is not None and trainer.weight_sync.pushed is None:
        return "syncing the weights"
    batch = trainer.in_flight.current
    if batch is not None and not batch.over:
        going = [rollout for rollout in batch.rollouts if rollout.stop_reason is None]
        calling = sum(bool(r.turns and r.turns[-1].calls and not r.turns[-1].results) for r in going)
        turns, finished = sum(len(r.turns) for r in batch.rollouts), len(batch.rollouts) - len(going)
        tools = f", {calling} waiting for tools" if calling else ""
        done = f"{turns} turn{'s' * (turns != 1)} done, {finished} of {len(batch.rollouts)} rollouts finished"
        return f"sampling, {done}{tools}"
    return "training"


def log_line(logs: dict[str, Any], step: int, steps: int, outcome: str | None, seconds: float | None) -> str:
    """A line about the metrics of some steps, of an evaluation, or of the end of a run, of at most 80 columns.

    What does not fit is left out: first the turns, then the seconds.

    Args:
        logs: Metrics by their names.
        step: The optimizer step.
        steps: The optimizer steps of the whole run.
        outcome: The name of the outcome reward to show.
        seconds: The mean seconds of a step; None if no step was taken.

    >>> logs = {"reward": 0.86, "rewards/exact_match_reward_func/mean": 0.39, "turns/mean": 1.94, "grad_norm": 0.5,
    ...         "tools/call_frequency": 1.0, "tools/failure_frequency": 0.25, "rollout/wait_seconds": 0.91}
    >>> log_line(logs, 12, 75, "exact_match_reward_func", 2.1)
    '12/75  reward 0.86  exact_match 0.39  turns 1.9  calls ok 75%  2.1 s  2 min left'
    >>> log_line(logs, 1200, 7500, "exact_match_reward_func", 2.1)
    '1200/7500  reward 0.86  exact_match 0.39  calls ok 75%  2.1 s  3.7 h left'
    >>> log_line({"eval_reward": 0.5, "eval_runtime": 3.0}, 12, 75, None, 2.1)
    'evaluation 12/75  reward 0.50  3.0 s'
    >>> log_line({"eval_hard_reward": 0.5, "eval_hard_runtime": 3.0}, 12, 75, None, 2.1)
    'evaluation hard 12/75  reward 0.50  3.0 s'
    >>> log_line({"train_runtime": 140.2, "train_loss": 0.1}, 75, 75, None, None)
    'trained 75 steps in 2 min'
    """
    if "train_runtime" in logs:
        return f"trained {step:,} steps in {duration(logs['train_runtime'])}"
    evaluation, data = any(name.startswith("eval_") for name in logs), name_of_evaluation(logs)
    values = {name.removeprefix("eval_").removeprefix(f"{data}_"): value for name, value in logs.items()}
    what = " ".join(filter(None, ["evaluation", data, f"{step}/{steps}"]))
    parts = {"step": what if evaluation else f"{step}/{steps}"}
    label = (outcome or "").removesuffix("_reward_func")
    label = label if len(label) <= MOST_NAME else f"{label[: MOST_NAME - 1]}…"
    shown = [("reward", "reward", 2), (f"rewards/{outcome}/mean", label, 2), ("turns/mean", "turns", 1)]
    for name, words, digits in shown:
        if is_shown(values.get(name)):
            parts[name] = f"{words} {values[name]:.{digits}f}"
    if values.get("tools/call_frequency") and is_shown(values["tools/failure_frequency"]):
        parts["calls"] = f"calls ok {1 - values['tools/failure_frequency']:.0%}"
    took = values.get("runtime") if evaluation else seconds
    if took is not None:
        parts["seconds"] = f"{took:.1f} s"
    if not evaluation and seconds is not None and step < steps:
        parts["left"] = f"{duration(seconds * (steps - step))} left"
    for least in ("turns/mean", "seconds"):
        if len("  ".join(parts.values())) > COLUMNS:
            parts.pop(least, None)
    return "  ".join(parts.values())


def name_of_evaluation(logs: Iterable[str]) -> str:
    """The dataset of a row of an evaluation, where there are several; else empty. A metric may end in `_reward`, too.

    >>> name_of_evaluation({"eval_hard_reward": 1, "eval_hard_reward_std": 0}), name_of_evaluation({"eval_reward": 1})
    ('hard', '')
    """
    if "eval_reward" in logs:
        return ""
    found = (re.fullmatch(r"eval_(.+)_reward", name) for name in logs)
    return min((match[1] for match in found if match), key=len, default="")  # others are metrics of functions


def is_shown(value: Any) -> bool:
    """Whether a metric is a number. NaN is none."""
    return isinstance(value, (int, float)) and value == value


def duration(seconds: float) -> str:
    """Format seconds for people.

    >>> duration(50), duration(130), duration(9000)
    ('50 s', '2 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
