"""The report of the study of the real model, from made-up results."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from bench import real_model as bench  # noqa: E402
from bench.common import markers  # noqa: E402


def found(exact):
    return {
        "tool_executed": 0.5, "result_found": 0.25, "exact_match": exact, "mean_turns": 2.0,
        "rewards": {"outcome": {"f1_reward_func": exact / 4}},
    }  # fmt: skip


def run(method, seed, exact, **changes):
    curve = [{"step": k, "rewards/exact_match_reward_func/mean": exact * k / 3, "num_tokens": 1000.0 * k,
              "rewards/answer_in_search_results_reward_func/mean": 0.25} for k in (1, 2, 3)]  # fmt: skip
    after = {"sampled": found(exact), "greedy": found(exact + 0.1)}
    return {"method": method, "seed": seed, "steps": 3, "after": after, "seconds": 600.0 + 60 * seed,
            "resumed": False, "curve": curve, **changes}  # fmt: skip


@pytest.fixture
def results():
    return {
        "machine": {"cpu": "a processor", "cores": 2}, "before": {"sampled": found(0.0), "greedy": found(0.1)},
        "runs": [run("outcome", 0, 0.2), run("mt_grpo", 0, 0.3), run("outcome", 1, 0.4), run("mt_grpo", 1, 0.5)],
    }  # fmt: skip


def test_the_table_has_means_over_seeds_and_their_interval(results):
    lines = bench.section(results).splitlines()
    assert lines[0] == "| sampled | before | `outcome` | `mt_grpo` |"
    # Two values 0.2 apart: t is 12.706, and the standard error 0.1.
    assert "| exact match | 0.00 | 0.30 ± 1.27 | 0.40 ± 1.27 |" in lines
    assert "| exact match | 0.10 | 0.40 ± 1.27 | 0.50 ± 1.27 |" in lines  # greedy
    assert "| F1 | 0.00 | 0.15 ± 0.64 | 0.20 ± 0.64 |" in lines  # the reward is half of F1
    assert lines[-1].endswith(
        "2 seeds, mean ± 95% interval; 3 steps of 32 rollouts in 10 to 11 minutes, the server's start included, and "
        "3,000 tokens, on 2 cores (a processor)."
    )


def test_of_one_seed_there_is_no_interval_and_a_resumed_run_has_no_time(results):
    results["runs"] = [run("mt_grpo", 0, 0.3), run("mt_grpo", 1, 0.3, resumed=True)]
    assert "in 10 minutes" in bench.section(results)
    results["runs"] = results["runs"][:1]
    assert "| exact match | 0.00 | 0.30 |" in bench.section(results) and "; 1 seed; " in bench.section(results)


def test_finished_runs_are_not_run_again(results, tmp_path, monkeypatch):
    """A file of a run, and of what was before, is taken as it is; the picture is drawn."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "RUNS", tmp_path)
    monkeypatch.setattr(bench, "prepare", lambda: None)
    for name in ("results", "picture", "page"):
        monkeypatch.setattr(
            bench.FRAME, name, tmp_path / {"results": "r.json", "picture": "p.png", "page": "p.md"}[name]
        )
    (tmp_path / "before.json").write_text(json.dumps(results["before"]))
    for each in results["runs"]:
        path = tmp_path / f"{bench.name_of(each['method'], each['seed'], 3)}.json"
        path.write_text(json.dumps(each))
    (tmp_path / "p.md").write_text("\n".join(markers("real_model")))
    bench.main(["--seeds", "0", "1", "--steps", "3"])
    kept = json.loads((tmp_path / "r.json").read_text())
    assert [(each["method"], each["seed"]) for each in kept["runs"]] == [
        ("outcome", 0), ("mt_grpo", 0), ("outcome", 1), ("mt_grpo", 1)
    ]  # fmt: skip
    assert "| exact match | 0.00 | 0.30 ± 1.27" in (tmp_path / "p.md").read_text() and (tmp_path / "p.png").is_file()
