"""What a run prints: a line per log, and how many rollouts are finished meanwhile."""

import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mt_grpo.reports.progress import ProgressLine, log_line


def all_ended() -> bool:
    """Whether no thread of a run counts rollouts any more."""
    threads = [thread for thread in threading.enumerate() if thread.name == "progress"]
    for thread in threads:
        thread.join(timeout=5.0)
    return not any(thread.is_alive() for thread in threads)


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
    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=Mock(side_effect=OSError("the disk is full"))))
    line.say("goes on")


@pytest.mark.parametrize("value", [None, float("nan")])
def test_what_is_no_number_is_left_out(value):
    logs = {"reward": value, "turns/mean": 2.0, "tools/failure_frequency": value}
    assert log_line(logs, 1, 2, None, None) == "1/2  turns 2.0"
