"""One line per log instead of a dictionary of all metrics, how far the rollouts are meanwhile, and `metrics.jsonl`."""

from __future__ import annotations

import logging
import re
import shlex
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from mt_grpo.reports.rollout_log import write_rows

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class MetricsLog(TrainerCallback):
    """Writes each log with its step, and the means by turn and depth, to `metrics.jsonl` on rank 0.

    A failure is a warning, and training goes on. A new run deletes the file. A resumed run appends to it, and may log
    some steps again: the later row is valid.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step == 0:
            (Path(args.output_dir) / METRICS_FILE).unlink(missing_ok=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and state.is_world_process_zero:
            try:
                lines = self.trainer.layout.metrics.depth.lines if "loss" in logs else {}  # of training
                write_rows(Path(args.output_dir) / METRICS_FILE, [{"step": state.global_step, **logs, **lines}])
            except OSError as error:
                logger.warning(f"The metrics could not be written: {error}. Training continues.")


def evaluation_prefix(logs: dict[str, Any]) -> str:
    """What an evaluation's metrics begin with: `eval_`, or `eval_name_` of one of several datasets; else empty."""
    names = [name for name in logs if re.fullmatch("eval_(.+_)?reward", name)]
    return min(names, key=len, default="").removesuffix("reward")


class ProgressLine(TrainerCallback):
    """Prints a line per log on rank 0, and how far the rollouts are when nothing was printed for a while."""

    QUIET_SECONDS = 10.0 if sys.stdout.isatty() else 60.0

    def __init__(self, trainer: Any):
        self.trainer, self.printed, self.began, self.first_step = trainer, 0.0, 0.0, 0
        self._over = threading.Event()

    def on_init_end(self, args, state, control, **kwargs):
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.remove_callback(ProgressCallback)

    def on_train_begin(self, args, state, control, **kwargs):
        self.printed = self.began = time.monotonic()
        self.first_step = state.global_step
        if state.is_world_process_zero:
            self._over = threading.Event()
            threading.Thread(target=self._watch, args=[self._over], name="progress", daemon=True).start()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and state.is_world_process_zero:
            done, ahead = state.global_step - self.first_step, state.max_steps - state.global_step
            left = (time.monotonic() - self.began) / done * ahead if done else None
            step = done if "train_runtime" in logs else state.global_step
            self.say(log_line(logs, step, state.max_steps, self.trainer.reward_functions.main_outcome, left))

    def on_train_end(self, args, state, control, **kwargs):
        self.end_of_run()
        if state.is_world_process_zero:
            folder = str(args.output_dir).removeprefix(f"{Path.cwd()}/")
            self.say(f"\noutput    {folder}\ncurves    python scripts/view_rollouts.py {shlex.quote(folder)}")

    def end_of_run(self) -> None:
        """Print no further lines about rollouts. Called if a run ends with an error, too."""
        self._over.set()

    def say(self, text: str) -> None:
        """Print a text."""
        self.printed = time.monotonic()
        with suppress(OSError):  # nobody reads any more, or the disk is full: the run goes on
            print(text, flush=True)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(self.QUIET_SECONDS / 10):
            if time.monotonic() - self.printed >= self.QUIET_SECONDS:
                rollouts = [rollout for batch in self.trainer.in_flight.current for rollout in batch.rollouts]
                ended = sum(rollout.stop_reason is not None for rollout in rollouts)
                self.say(f"after step {self.trainer.state.global_step}: {ended} of {len(rollouts)} rollouts finished")


def log_line(logs: dict[str, Any], step: int, steps: int, outcome: str | None, left: float | None) -> str:
    """A line about some of `steps` optimizer steps, an evaluation, or the end of a run that may take `left` seconds.

    >>> logs = {"reward": 0.86, "rewards/exact_match_reward_func/mean": 0.39, "turns/mean": 1.94, "grad_norm": 0.5,
    ...         "tools/call_frequency": 1.0, "tools/failure_frequency": 0.25, "step_time": 2.1}
    >>> log_line(logs, 12, 75, "exact_match_reward_func", 130.0)
    '12/75  reward 0.86  exact_match 0.39  turns 1.9  calls ok 75%  2.1 s  2 min left'
    >>> log_line({"eval_hard_reward": 0.5, "eval_hard_runtime": 3.0}, 12, 75, None, 130.0)
    'evaluation hard 12/75  reward 0.50  3.0 s'
    >>> log_line({"train_runtime": 140.2, "train_loss": 0.1}, 75, 75, None, None)
    'trained 75 steps in 2 min'
    """
    if "train_runtime" in logs:
        return f"trained {step:,} steps in {duration(logs['train_runtime'])}"
    prefix, label = evaluation_prefix(logs), (outcome or "").removesuffix("_reward_func")
    values = {name.removeprefix(prefix): value for name, value in logs.items() if is_shown(value)}
    if "tools/failure_frequency" in values:
        values["calls ok"] = 1 - values["tools/failure_frequency"]
    names = "reward", f"rewards/{outcome}/mean", "turns/mean", "calls ok", "runtime" if prefix else "step_time"
    texts = "reward {:.2f}", label + " {:.2f}", "turns {:.1f}", "calls ok {:.0%}", "{:.1f} s"
    parts = [f"{prefix.replace('eval', 'evaluation', 1).replace('_', ' ')}{step}/{steps}"]
    parts += [text.format(values[name]) for name, text in zip(names, texts) if name in values]
    return "  ".join(parts + ([f"{duration(left)} left"] if left and not prefix else []))


def is_shown(value: Any) -> bool:
    """Whether a metric is a number, which NaN and None are not."""
    return isinstance(value, (int, float)) and value == value


def duration(seconds: float) -> str:
    """Format seconds for people: 50 s, 2 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
