"""Warnings of a run in trouble, once each: what its metrics say over the last logs, and what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from transformers import TrainerCallback

from mt_grpo.first_batch import FirstBatch
from mt_grpo.metrics_log import MetricsLog
from mt_grpo.progress import ProgressLine, main_outcome

logger = logging.getLogger(__name__)
WINDOW = 20  # logs: a batch of a hundred rollouts is too few to judge by
NO_SIGNAL, CLIPPED, CLIPPED_UP, AT_TURN_LIMIT, ENTROPY, UNSOLVED, STUCK = 1.0, 0.3, 0.1, 0.8, 0.01, 0.9, 0.5
UP, DOWN, FLOOR = 0.05, 0.1, 0.01  # of its value, and at least: what the reward gains while the outcome loses


class History:
    """The metrics of a run's logs."""

    def __init__(self, outcome: str | None = None):
        self.logs: list[dict[str, Any]] = []
        self.outcome = f"rewards/{outcome}/mean"

    def now(self, name: str) -> float | None:
        """The mean over the last `WINDOW` logs; None where there are fewer, or one lacks it."""
        return self._mean(name, self.logs[-WINDOW:])

    def before(self, name: str) -> float | None:
        """The mean over the `WINDOW` logs before those."""
        return self._mean(name, self.logs[-2 * WINDOW : -WINDOW])

    @staticmethod
    def _mean(name: str, logs: list[dict[str, Any]]) -> float | None:
        values = [log.get(name) for log in logs]
        if len(values) < WINDOW or any(value is None or value != value for value in values):
            return None
        return mean(values)


@dataclass(frozen=True)
class Alarm:
    """A rule. `says` is filled in with `now` and `before` of the metric `name`."""

    name: str
    when: Callable[[History, float, float | None], bool]
    says: str


def hacked(history: History, now: float, before: float | None) -> bool:
    """Whether the reward rises while its main outcome falls."""
    outcome = history.now(history.outcome), history.before(history.outcome)
    if before is None or None in outcome:
        return False
    up, down = max(UP * abs(before), FLOOR), max(DOWN * abs(outcome[1]), FLOOR)
    return now > before + up and outcome[0] < outcome[1] - down


ALARMS = (
    Alarm(
        "credit/frac_groups_without_signal", lambda history, now, before: now >= NO_SIGNAL,
        "No group has had rewards that differ in the last {window} logs, so nothing is learned. Look at "
        "rollouts.*.jsonl: is the task always or never solved? Take other prompts, raise num_generations or the "
        "temperature.",
    ),
    Alarm(
        "reward", hacked,
        "The reward rises ({before:.2f} to {now:.2f}) while its main outcome falls: the policy is paid for something "
        "else. Compare the reward functions in the metrics, and lower the weight of the one that rises.",
    ),
    Alarm(
        "stop/max_turns", lambda history, now, before: now >= AT_TURN_LIMIT,
        "{now:.0%} of the rollouts still call tools in their last turn and give no answer. Raise max_env_steps, or "
        "tell the model how many calls it has.",
    ),
    Alarm(
        "completions/clipped_ratio",
        lambda history, now, before: before is not None and now >= CLIPPED and now >= before + CLIPPED_UP,
        "More rollouts are cut off ({before:.0%} before, {now:.0%} now): the policy writes ever more. Raise "
        "max_completion_length, set max_turn_tokens, or give a reward that falls with the length.",
    ),
    Alarm(
        "entropy",
        lambda history, now, before: now < ENTROPY and (history.now(history.outcome) or 0.0) < UNSOLVED
        and (history.now("credit/frac_groups_without_signal") or 0.0) >= STUCK,
        "The entropy is gone ({now:.2g}) though the task is not solved: all rollouts of a group are the same. Go back "
        "to an earlier checkpoint, with a lower learning_rate, a beta above 0, or a higher temperature.",
    ),
)  # fmt: skip


class Watch(TrainerCallback):
    """Warns on rank 0, once for each alarm."""

    def __init__(self, trainer: Any):
        self.trainer, self.history, self.told = trainer, History(), set()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "reward" not in logs or not state.is_world_process_zero:
            return
        self.history.outcome = f"rewards/{main_outcome(self.trainer)}/mean"
        self.history.logs = [*self.history.logs, logs][-2 * WINDOW :]
        for alarm in ALARMS:
            now, before = self.history.now(alarm.name), self.history.before(alarm.name)
            if alarm.name not in self.told and now is not None and alarm.when(self.history, now, before):
                self.told.add(alarm.name)
                text = alarm.says.format(now=now, before=before or 0.0, window=WINDOW)
                logger.warning(f"Step {state.global_step}, {alarm.name}: {text}")


def run_reports(trainer: Any) -> list[TrainerCallback]:
    """What tells people about a run: its first batch, a line per log, alarms, the file of metrics."""
    return [FirstBatch(trainer), ProgressLine(trainer), Watch(trainer), MetricsLog()]
