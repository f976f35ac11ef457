"""The GPU benchmark: its table from hand-written rows, and its cases with the bundled model on a CPU."""

import argparse
import json

import pytest
from bench import gpu as bench


@pytest.mark.slow
def test_shared_prompts_come_to_the_gradients_of_a_row_per_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "WARM_UP", 0)
    names = ["prompt", "records", "checkpointing", "LoRA"]
    monkeypatch.setattr(bench, "SHAPES_OF", {"gradients": names, "step": ["prompt", "records"]})
    options = argparse.Namespace(steps=1, tiny=True, out=str(tmp_path / "found.json"))
    found = bench.run_gradients(options, str(tmp_path))["gradients"]
    assert list(found) == names
    for row in found.values():
        assert row["a row per rollout, float32"] == 0.0 < row["shared prompts, float32"] < 5e-5
        assert all(1e-4 < row[f"{each}, bf16"] < 0.2 for each in ("a row per rollout", "shared prompts"))
    steps = bench.run_step(options, str(tmp_path))["steps"]
    assert list(steps["prompt"]) == list(bench.STEP_SIDES)
    assert list(steps["records"]) == list(bench.STEP_SIDES)[1:]  # TRL has no rows for them
    assert all(len(side["seconds"]) == 1 for side in steps["prompt"].values())
    assert json.loads((tmp_path / "found.json").read_text())["steps"]["prompt"] == steps["prompt"]


@pytest.mark.slow
def test_its_cases_run_with_the_bundled_model(monkeypatch, tmp_path):
    pytest.importorskip("vllm")
    results = tmp_path / "results.json"
    monkeypatch.setattr(bench.FRAME, "short_results", results)
    cases = ["in process", "TRL, in process", "server, disk"]
    assert bench.main(["--tiny", *(word for case in cases for word in ("--case", case))]) == 0
    (run,) = json.loads(results.read_text())["runs"]
    rows = run["cases"]
    assert list(rows) == cases and rows["server, disk"]["summary"]["sync"] > 0
    assert rows["in process"]["summary"]["rollouts"] > 0
