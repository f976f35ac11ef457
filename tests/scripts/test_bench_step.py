"""The benchmark of the step: hand-written numbers, and a real pair of steps."""

import pytest
from bench import step as bench

SMOKE = {**bench.DEFAULTS, "title": "smoke", "rollouts": 8, "tokens": 60, "pairs": 2}
MACHINE = {"cpu": "Some CPU", "torch": "2.13", "trl": "1.16"}


def test_pairs_leave_no_trace_of_their_order():
    """Where the first step of a pair takes twice the second's time, whoever takes it, ours is still 1.1 of TRL's."""
    pairs = []
    for number in range(6):
        first, second = bench.SIDES if number % 2 == 0 else bench.SIDES[::-1]
        seconds = {first: 2.0, second: 1.0}
        seconds["ours"] *= 1.1
        pairs.append({side: {"wall": seconds[side], "cpu": seconds[side]} for side in bench.SIDES})
    figures = bench.figures_of(pairs, {"peak_mib": {"trl": 1.0, "ours": 1.0}})
    assert figures["ratio"]["wall"] == pytest.approx({"min": 1.1, "median": 1.1, "max": 1.1})


def test_a_pair_of_steps(warm_processes, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = bench.run_shape(SMOKE, threads=1)
    assert result["pairs"] == 2 and result["rollouts"] == 8
    for side in bench.SIDES:
        seconds, memory = result["median_seconds"][side], result["memory"]
        assert 0 < seconds["wall"] < 60 and 0 < seconds["cpu"] < 60
        assert memory["peak_mib"][side] > 100
    assert 1 < result["per_trained"]["ours"] < result["per_trained"]["trl"] < 4
    assert bench.section({"machine": MACHINE, "threads": 1, "shapes": {"smoke": result}}).count("\n") == 4
