"""The benchmarks of the step and of a push: hand-written numbers, and a real pair of steps."""

import pytest
from bench import step as bench, sync

SMOKE = {**bench.DEFAULTS, "title": "smoke", "rollouts": 8, "tokens": 60, "pairs": 2}
MACHINE = {"cpu": "Some CPU", "torch": "2.13", "trl": "1.16"}


def test_pairs_leave_no_trace_of_their_order_and_share_conversations():
    """Where the first step of a pair takes twice the second's time, whoever takes it, ours is still 1.1 of TRL's."""
    pairs = []
    for number in range(6):
        first, second = bench.SIDES if number % 2 == 0 else bench.SIDES[::-1]
        seconds = {first: 2.0, second: 1.0}
        seconds["ours"] *= 1.1
        pairs.append({side: {"wall": seconds[side], "cpu": seconds[side]} for side in bench.SIDES})
    figures = bench.figures_of(pairs, {"peak_mib": {"trl": 1.0, "ours": 1.0}})
    assert figures["ratio"]["wall"] == pytest.approx({"min": 1.1, "median": 1.1, "max": 1.1})
    shape = {**SMOKE, "rollouts": 64, "tokens": 200}
    conversations = bench.make_conversations(shape)
    assert conversations == bench.make_conversations(shape)
    lists, rollouts = bench.as_lists(conversations), bench.as_rollouts(conversations)
    assert lists["env_mask"] == [r.loss_mask for r in rollouts]
    assert lists["prompt_ids"] == [r.prompt_ids for r in rollouts]
    assert {len(rollout.turns) for rollout in rollouts} == {2, 3}
    lengths = [len(ids) for ids in lists["completion_ids"]]
    assert 0.9 * 200 < sum(lengths) / 64 < 1.1 * 200 and min(lengths) > 100 and max(lengths) < 300
    assert bench.as_rollouts(conversations)[0].turns[0] is not rollouts[0].turns[0]  # nothing stays warm


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


MODEL = {"parameters": 250_000_000, "tensors": 3, "bytes": 1_000_000_000}


def pushes(*totals):
    """Pushes with half a second of check."""
    return [
        {"gather": 0.25, "write": 0.5, "load": t - 1.25, "check": 0.5, "total": t, "peak": 1_500_000_000}
        for t in totals
    ]


def test_a_row_has_spreads_speeds_and_multiples():
    plain = [{"write": 0.5, "read": 0.25}, {"write": 0.7, "read": 0.25}, {"write": 0.4, "read": 0.25}]
    got = sync.summary("0.6B", "float32", MODEL, pushes(5.0, 2.0, 3.5), plain, plain)
    assert got["seconds"]["total"] == {"min": 2.0, "median": 3.5, "max": 5.0}
    assert list(got["seconds"]) == ["gather", "write", "load", "check", "total"]
    assert got["plain_gb_per_s"] == {"write": 2.0, "read": 4.0}  # 1 GB
    assert got["times_plain"] == 4.0  # a push without its check, 3 s, over 0.5 + 0.25
    assert got["peak_multiple"] == 1.5
    assert got["repetitions"] == 3
