"""What a run prints: a line per log, and how many rollouts are finished meanwhile."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
from test_first_batch import recipe_file

import mt_grpo_trainer as mt
from mt_grpo.reports.progress import ProgressLine, log_line


def all_ended() -> bool:
    """Whether no thread of a run counts rollouts any more."""
    threads = [thread for thread in threading.enumerate() if thread.name == "progress"]
    for thread in threads:
        thread.join(timeout=5.0)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("disable_tqdm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_prints_lines(disable_tqdm, tmp_path, capsys):
    """One per step and evaluation, in the words of what they measure; no dictionary, no thread is left."""
    path = recipe_file(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2, dataset_test_split="test[:2]",
                       per_device_eval_batch_size=16, save_strategy="no", disable_tqdm=disable_tqdm)  # fmt: skip
    mt.main(["--config", path])
    rows, *lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("first batch")]
    assert rows.startswith("rows: each prompt is computed once")
    assert lines[4:] == ["", f"output    {tmp_path}/out", f"curves    python scripts/view_rollouts.py {tmp_path}/out"]
    number = r"-?\d+\.\d\d"
    step = rf"{{}}/2  reward {number}  exact_match {number}  turns [12]\.\d  calls ok \d+%  "
    assert re.fullmatch(step.format(1) + r"\d+\.\d s  \d+ (s|min) left", lines[0]), lines
    assert re.fullmatch(step.format(2) + r"\d+\.\d s", lines[1]), lines
    assert re.match(rf"evaluation 2/2  reward {number}  exact_match {number}  turns", lines[2]), lines
    assert re.fullmatch(r"trained 2 steps in \d+ (s|min)", lines[3])
    assert all_ended()


def test_finished_rollouts_are_counted_when_nothing_else_is_printed(capsys, monkeypatch):
    """Once in a while, which here is a moment, by a thread that ends with the run."""
    monkeypatch.setattr(ProgressLine, "QUIET_SECONDS", 0.01)
    state = SimpleNamespace(is_world_process_zero=True, global_step=3)
    rollouts = [SimpleNamespace(stop_reason=None), SimpleNamespace(stop_reason="answered")]
    in_flight = SimpleNamespace(current=[SimpleNamespace(rollouts=rollouts)])
    line, said = ProgressLine(SimpleNamespace(state=state, in_flight=in_flight)), ""
    line.on_train_begin(None, state, None)
    while said.count("after step 3: 1 of 2 rollouts finished\n") < 2:
        said += capsys.readouterr().out
        time.sleep(0.01)
    line.end_of_run()
    assert all_ended()


@pytest.mark.parametrize("value", [None, float("nan")])
def test_what_is_no_number_is_left_out(value):
    logs = {"reward": value, "turns/mean": 2.0, "tools/failure_frequency": value}
    assert log_line(logs, 1, 2, None, None) == "1/2  turns 2.0"
