"""What a run prints: a line per log, what it is doing meanwhile, or everything."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
from test_first_batch import recipe_file

import mt_grpo_trainer as mt
from mt_grpo.reports.progress import ProgressLine, log_line, what_it_does


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
    assert not [thread for thread in threading.enumerate() if thread.name == "progress" and thread.is_alive()]


def test_what_it_is_doing_is_said_where_nothing_else_is(capsys, monkeypatch):
    """In a log once in a while, which here is a moment, by a thread that ends with the run."""
    monkeypatch.setattr(ProgressLine, "QUIET_SECONDS", 0.01)
    state = SimpleNamespace(is_world_process_zero=True, global_step=3)
    trainer = SimpleNamespace(
        state=state, model=SimpleNamespace(training=True), weight_sync=SimpleNamespace(pushed=None)
    )
    line, said = ProgressLine(trainer), ""
    line.on_train_begin(None, state, None)
    while said.count("step 4: syncing the weights\n") < 2:
        said += capsys.readouterr().out
        time.sleep(0.01)
    line.end_of_run()
    assert not line._thread.is_alive()


def test_what_it_does_is_said_in_words():
    going = SimpleNamespace(stop_reason=None, turns=[SimpleNamespace(calls=[1], results=[], token_ids=[1, 2, 3])])
    batch = SimpleNamespace(over=lambda: False, rollouts=[going, SimpleNamespace(stop_reason="answered", turns=[])])
    sync = SimpleNamespace(pushed=None)
    trainer = SimpleNamespace(weight_sync=None, in_flight=SimpleNamespace(current=[batch]))
    assert (
        what_it_does(trainer) == "sampling, 1 turns and 3 tokens done, 1 of 2 rollouts finished, 1 waiting for tools"
    )
    trainer.weight_sync = sync
    assert what_it_does(trainer) == "syncing the weights"
    sync.pushed, batch.over = "v1", lambda: True
    assert what_it_does(trainer) == "training"


@pytest.mark.parametrize("value", [None, float("nan")])
def test_what_is_no_number_is_left_out(value):
    logs = {"reward": value, "turns/mean": 2.0, "tools/failure_frequency": value}
    assert log_line(logs, 1, 2, None, None) == "1/2  turns 2.0"
