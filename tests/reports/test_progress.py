"""What a run prints: a line per log, what it is doing meanwhile, or everything."""

import io
import json
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from test_first_batch import recipe_file

import mt_grpo_trainer as mt
from mt_grpo.reports.progress import METRICS_FILE, ProgressLine, log_line, read_metrics, what_it_does
from mt_grpo.training.rewards import RewardFunctions

SLOW = '''
import time

from tools.calculator import calculator as fast


def calculator(expression: str) -> str:
    """Compute.

    Args:
        expression: Numbers.
    """
    time.sleep(1.5)
    return fast(expression)


TOOL_FUNCTIONS = [calculator]
'''


@pytest.mark.parametrize("disable_tqdm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_prints_lines(disable_tqdm, tmp_path, capsys):
    """One per step and evaluation, in the words of what they measure; no dictionary, no thread is left."""
    path = recipe_file(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2, dataset_test_split="test[:2]",
                       per_device_eval_batch_size=16, save_strategy="no", disable_tqdm=disable_tqdm)  # fmt: skip
    mt.main(["--config", path])
    rows, *lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("first batch")]
    assert rows.startswith("rows: each prompt is computed once")
    assert lines[4:] == ["", f"output    {tmp_path}/out", f"curves    python scripts/view_rollouts.py {tmp_path}/out",
                         f"evaluate  python scripts/evaluate.py --config {path} --model {tmp_path}/out"]  # fmt: skip
    number = r"-?\d+\.\d\d"
    step = rf"{{}}/2  reward {number}  exact_match {number}  turns [12]\.\d  calls ok \d+%  "
    assert re.fullmatch(step.format(1) + r"\d+\.\d s  \d+ s left", lines[0]), lines
    assert re.fullmatch(step.format(2) + r"\d+\.\d s", lines[1]), lines
    assert re.match(rf"evaluation 2/2  reward {number}  exact_match {number}  turns", lines[2]), lines
    assert re.fullmatch(r"trained 2 steps in \d+ s", lines[3])
    assert not [thread for thread in threading.enumerate() if thread.name == "progress" and thread.is_alive()]


def test_seconds_are_those_of_whole_batches(tmp_path, capsys):
    """A batch is trained on for two steps, of which only the first waits for rollouts."""
    trainer = SimpleNamespace(reward_functions=RewardFunctions([], [], 0))
    line, state = ProgressLine(trainer), SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=9)
    args = SimpleNamespace(steps_per_generation=4, num_iterations=1, gradient_accumulation_steps=2)
    for seconds in (5.0, 1.0, 5.0):
        line.steps.append(seconds)
        line.new_steps += 1
        line.on_log(args, state, None, {"reward": 0.0})
    shown = re.findall(r"(\d\.\d) s  \d", capsys.readouterr().out)
    assert shown == ["5.0", "3.0", "3.0"]


def test_what_it_is_doing_is_said_where_nothing_else_is(tmp_path, capsys, monkeypatch):
    """In a log once in a while, which here is half a second."""
    monkeypatch.setattr(ProgressLine, "QUIET_SECONDS", 0.5)
    (tmp_path / "slow.py").write_text(SLOW)
    path = recipe_file(tmp_path, max_steps=1, save_strategy="no", tools_script=str(tmp_path / "slow.py"))
    mt.main(["--config", path])
    line = r"^step 1: sampling, (\d+) turns? done, (\d+) of 16 rollouts finished, (\d+) waiting for tools \(\d+ s\)$"
    said = [list(map(int, found)) for found in re.findall(line, capsys.readouterr().out, re.M)]
    assert said and all(0 < calls <= 16 - done and turns >= done + calls for turns, done, calls in said)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminals_line_is_written_again(monkeypatch):
    """And gives way to a line that stays."""
    going = SimpleNamespace(stop_reason=None, turns=[SimpleNamespace(calls=[1], results=[])])
    batch = SimpleNamespace(over=False, rollouts=[going, SimpleNamespace(stop_reason="answered", turns=[])])
    trainer = SimpleNamespace(
        weight_sync=None,
        in_flight=SimpleNamespace(current=batch),
        state=SimpleNamespace(global_step=4),
        model=SimpleNamespace(training=True),
    )
    assert what_it_does(trainer) == "sampling, 1 turn done, 1 of 2 rollouts finished, 1 waiting for tools"
    trainer.weight_sync = SimpleNamespace(pushed=None)
    assert what_it_does(trainer) == "syncing the weights"
    trainer.weight_sync.pushed, batch.over = "v1", True
    assert what_it_does(trainer) == "training"
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(ProgressLine, "TERMINAL_SECONDS", 0.05)
    progress = ProgressLine(trainer)
    watching = threading.Thread(target=progress._watch, args=(progress._over,))
    watching.start()
    deadline = time.monotonic() + 20
    while "training" not in sys.stdout.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    progress.say("step 4/9")
    progress.end_of_run()
    watching.join()
    written = sys.stdout.getvalue()
    assert written.startswith("\r\x1b[Kstep 5: training (0 s)\r") and "\r\x1b[Kstep 4/9\n" in written
    assert written.endswith("\r\x1b[K")


@pytest.mark.parametrize("value", [None, float("nan")])
def test_what_is_no_number_is_left_out(value):
    assert log_line({"reward": value, "turns/mean": 2.0}, 1, 2, None, None) == "1/2  turns 2.0"


def test_a_line_has_80_columns_at_most():
    logs = {"reward": -10.25, "rewards/right_answers_without_a_hint/mean": -0.25, "turns/mean": 12.5,
            "tools/call_frequency": 3.0, "tools/failure_frequency": 0.0}  # fmt: skip
    line = log_line(logs, 10000, 20000, "right_answers_without_a_hint", 2345.6)
    assert len(line) <= 80 and "right_answers_w… -0.25" in line and line.endswith(" h left")


def test_steps_that_a_resumed_run_gave_up_are_not_on_the_curve(tmp_path):
    """To step 4, again from 2, and at 3 now. The evaluation at 4 is of the attempt that is gone, too."""
    rows = [{"step": step, "reward": value} for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4))]
    rows += [{"step": 2, "eval_reward": 2.0}, {"step": 4, "eval_reward": 4.0}, {"step": 3, "reward": 3.0}]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["step"], row.get("reward"), row.get("eval_reward")) for row in read_metrics(tmp_path)] == [
        (1, 0.1, None), (2, None, 2.0), (2, 0.2, None), (3, 3.0, None)
    ]  # fmt: skip
