"""scripts/plot_run.py: the curves of runs that are over, that go on, and of none."""

import json
import math

import plot_run
import pytest
from plot_run import PANELS, lines_of, read_run


def write_run(folder, steps, name="trainer_state.json", **more):
    """A run whose reward is a tenth of the step."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = [{"step": step, "reward": step / 10, "rewards/match_reward_func/mean": math.nan, **more} for step in steps]
    (folder / name).write_text(json.dumps({"log_history": [*logs, {"step": steps[-1], "train_runtime": 3.0}]}))
    return folder


def test_a_run_that_is_not_over_is_drawn_from_its_newest_checkpoint(tmp_path):
    write_run(tmp_path / "run/checkpoint-5", range(1, 6))
    write_run(tmp_path / "run/checkpoint-10", range(1, 11))
    assert [row["step"] for row in read_run(tmp_path / "run")] == list(range(1, 11))
    write_run(tmp_path / "run", range(1, 13))
    assert len(read_run(tmp_path / "run")) == 12


def test_what_a_panel_shows(tmp_path):
    """Numbers alone, by their short names; shares that stay near 0 are left out."""
    stops = {"stop/answered": 0.9, "stop/max_turns": 0.001, "rewards/calls/mean": 0.5, "rewards/calls/std": 0.1}
    logs = read_run(write_run(tmp_path, [1, 2], **stops))
    panels = {title: lines_of(logs, metrics) for title, metrics in PANELS}
    assert panels["Rewards"] == {"reward, weighted": ([1, 2], [0.1, 0.2]), "calls": ([1, 2], [0.5, 0.5])}
    assert panels["How conversations end"] == {"answered": ([1, 2], [0.9, 0.9])}
    assert panels["Seconds"] == {}


def test_pictures_are_written(tmp_path, capsys):
    first, second = (write_run(tmp_path / name, range(1, 4), **{"stop/answered": 0.5}) for name in ("a", "b"))
    plot_run.main([str(first)])
    plot_run.main([str(first), str(second), "--output", str(tmp_path / "both.png")])
    assert capsys.readouterr().out.split() == [f"{first}/curves.png", f"{tmp_path}/both.png"]
    for path in (first / "curves.png", tmp_path / "both.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 20_000


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: [folder / "none"], "has no trainer_state.json, and no checkpoint with one"),
        (lambda folder: [write_run(folder / "x", [1]).parent / "x"] * 5, "got 5 runs, expected at most 4"),
    ],
)
def test_what_cannot_be_drawn_is_told(make, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        plot_run.main([str(path) for path in make(tmp_path)])
    (tmp_path / "trainer_state.json").write_text('{"log_history": []}')
    with pytest.raises(SystemExit, match="has no training steps with a reward"):
        plot_run.main([str(tmp_path)])
