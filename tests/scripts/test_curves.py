"""The log of metrics, and the curves that the viewer draws of it."""

import json
import math
from types import SimpleNamespace

from test_first_batch import recipe_file
from view_rollouts import PANELS, lines_of
from viewer.metrics import read_metrics

import mt_grpo_trainer as mt
from mt_grpo.reports.progress import MetricsLog


def write_run(folder, steps, **more):
    """A run whose reward is a tenth of the step."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = [{"step": step, "reward": step / 10, "rewards/match_reward_func/mean": math.nan, **more} for step in steps]
    (folder / "trainer_state.json").write_text(
        json.dumps({"log_history": [*logs, {"step": steps[-1], "train_runtime": 3.0}]})
    )
    return folder


def test_a_run_that_is_not_over_is_drawn_from_its_log(tmp_path):
    """Of steps that were trained again the later rows count; an evaluation and a line that is cut off are no steps."""
    write_run(tmp_path, [1])  # an earlier run's
    rows = [{"step": 2, "reward": 0.1}, {"step": 3, "reward": 0.2}, {"step": 3, "eval_reward": 0.9},
            {"step": 2, "reward": 0.3}, {"step": 3, "reward": 0.4}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "rew')
    trained = [row for row in read_metrics(tmp_path) if "reward" in row]
    assert trained == [{"step": 2, "reward": 0.3}, {"step": 3, "reward": 0.4}]


def test_steps_that_a_resumed_run_gave_up_are_not_on_the_curve(tmp_path):
    """To step 4, again from 2, and at 3 now. The evaluation at 4 is of the attempt that is gone, too."""
    rows = [{"step": step, "reward": value} for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4))]
    rows += [{"step": 2, "eval_reward": 2.0}, {"step": 4, "eval_reward": 4.0}, {"step": 3, "reward": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["step"], row.get("reward"), row.get("eval_reward")) for row in read_metrics(tmp_path)] == [
        (1, 0.1, None), (2, None, 2.0), (2, 0.2, None), (3, 3.0, None)
    ]  # fmt: skip


def test_a_run_logs_its_metrics(tmp_path, caplog):
    """As Trainer's history has them, NaN apart; a resumed run goes on, a new one begins anew."""
    path = recipe_file(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    mt.main(["--config", path])
    history = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 2] and [row.get("reward") for row in rows[:2]] == [
        row["reward"] for row in history[:2]
    ]
    assert all("NaN" not in json.dumps(row) and set(row) == set(old) - {"epoch"} | {"epoch"} for row, old in
               zip(rows, history))  # fmt: skip
    mt.main(["--config", path, "--resume_from_checkpoint", str(tmp_path / "out/checkpoint-1")])
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2, 2, 2]
    mt.main(["--config", path, "--max_steps", "1"])
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == 2


def test_metrics_that_cannot_be_written_end_no_run(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").mkdir()
    log, args = MetricsLog(), SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    log.on_log(args, state, None, {"reward": 1.0})
    assert "The metrics could not be written" in caplog.text and "Training continues" in caplog.text


def test_what_a_panel_shows(tmp_path):
    """Numbers alone, by their short names; shares that stay near 0 are left out."""
    stops = {"stop/answered": 0.9, "stop/max_turns": 0.001, "rewards/calls/mean": 0.5, "rewards/calls/std": 0.1}
    logs = [row for row in read_metrics(write_run(tmp_path, [1, 2], **stops)) if "reward" in row]
    panels = {title: lines_of(logs, metrics) for title, metrics in PANELS}
    assert panels["Rewards"] == {"total reward": ([1, 2], [0.1, 0.2]), "calls": ([1, 2], [0.5, 0.5])}
    assert panels["Stop reasons"] == {"answered": ([1, 2], [0.9, 0.9])}
    assert panels["Seconds"] == {}
