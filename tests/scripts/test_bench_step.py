"""The step's benchmark: its conversations, a real pair of steps, and the report by hand-written numbers."""

import json
import os

import pytest
from bench import step as bench
from bench.common import markers

SMOKE = {**bench.DEFAULTS, "title": "smoke", "rollouts": 8, "tokens": 60, "pairs": 2}
MACHINE = {"cpu": "Some CPU", "torch": "2.13", "trl": "1.16"}


def row(title, wall, cpu, memory):
    """A shape's row with two pairs of steps: TRL's take a second, so that ours take the ratio."""
    seconds = {"trl": {"wall": 1.0, "cpu": 1.0}, "ours": {"wall": wall, "cpu": cpu}}
    figures = bench.figures_of([seconds] * 2, {"peak_mib": {"trl": 1000.0, "ours": 1000.0 * memory}})
    facts = {"rollouts": 64, "tokens": 1090, "longest": 2000, "prompt": 300}
    return {"title": title, **facts, "per_trained": {"trl": 4.0, "ours": 1.5}, **figures}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Results and page in a folder of their own."""
    begin, end = markers("step")
    monkeypatch.setattr(bench.FRAME, "results", tmp_path / "docs/results/step.json")
    monkeypatch.setattr(bench.FRAME, "short_results", tmp_path / "runs/short.json")
    monkeypatch.setattr(bench.FRAME, "page", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    (tmp_path / "docs/results").mkdir(parents=True)
    return tmp_path


def test_the_report_quotes_the_results_file(folders, capsys):
    shapes = {"recipe": row("tiny recipe", 0.5, 0.4, 0.8), "spread": row("long completions", 0.2, 0.25, 0.7)}
    results = {"machine": MACHINE, "threads": 2, "shapes": shapes}
    bench.FRAME.results.write_text(json.dumps(results))
    bench.main(["--report"])
    text = bench.FRAME.page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    cells = "1.00 s | 2.00 (2.00 to 2.00) | 2.50 (2.50 to 2.50) | 800 of 1,000 MiB | 4.0, 1.5 |"
    assert f"| tiny recipe: 64 rollouts | 300 | 1,090, 2,000 | {cells}" in text and "2 threads" in text
    assert "| 2.50 (2.50 to 2.50) |" in capsys.readouterr().out  # shown as well


def test_the_short_form_leaves_the_page_alone(folders, monkeypatch):
    taken = []
    monkeypatch.setattr(bench, "run_shape", lambda shape, threads: taken.append(shape) or row("x", 1.0, 1.0, 1.0))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = bench.FRAME.page.read_text()
    bench.main(["--short"])
    assert [(shape["rollouts"], shape["pairs"]) for shape in taken] == [(64, 8), (16, 2), (16, 2)]
    assert bench.FRAME.page.read_text() == before
    assert not bench.FRAME.results.exists() and bench.FRAME.short_results.is_file()
    bench.main([])
    assert bench.FRAME.page.read_text() != before and len(taken) == 3 + len(bench.SHAPES)


def test_lengths_are_those_that_a_shape_says():
    """Log-normal: the mean within a tenth of a large sample, the 99th percentile cut at five times the mean."""
    rng, shape = bench.random.Random(0), {**SMOKE, "tokens": 400, "lengths": "log-normal"}
    drawn = sorted(bench.draw_length(rng, shape, False) for _ in range(20_000))
    assert drawn[-1] == 2000 and drawn[0] == 20 and 100 < drawn[10_000] < 300
    normal = [bench.draw_length(rng, {**SMOKE, "tokens": 58, "lengths": "normal"}, k == 0) for k in range(5000)]
    assert normal[0] == 154 and 56 < sum(normal) / 5000 < 61 and min(normal) == 20


def test_the_order_of_a_pair_leaves_no_trace():
    """Where the first step of a pair takes twice the second's time, whoever takes it, ours is still 1.1 of TRL's."""
    pairs = []
    for number in range(6):
        first, second = bench.SIDES if number % 2 == 0 else bench.SIDES[::-1]
        seconds = {first: 2.0, second: 1.0}
        seconds["ours"] *= 1.1
        pairs.append({side: {"wall": seconds[side], "cpu": seconds[side]} for side in bench.SIDES})
    figures = bench.figures_of(pairs, {"peak_mib": {"trl": 1.0, "ours": 1.0}})
    assert figures["ratio"]["wall"] == pytest.approx({"min": 1.1, "median": 1.1, "max": 1.1})


def test_both_sides_get_the_same_conversations():
    shape = {**SMOKE, "rollouts": 64, "tokens": 200}
    conversations = bench.make_conversations(shape)
    assert conversations == bench.make_conversations(shape)
    lists, rollouts = bench.as_lists(conversations), bench.as_rollouts(conversations)
    assert lists["env_mask"] == [r.loss_mask for r in rollouts] and lists["prompt_ids"] == [
        r.prompt_ids for r in rollouts
    ]
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
