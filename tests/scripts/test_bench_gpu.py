"""The GPU benchmark: its table from hand-written rows, and its cases with the bundled model on a CPU."""

import argparse
import json

import pytest
from bench import gpu as bench


def test_nccl_needs_two_gpus_or_a_library_that_takes_one_twice(monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert [bench.why_not("server, nccl", gpus=n) for n in (1, 2)] == ["needs 2 GPUs", None]
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [bench.why_not("server, nccl", gpus=n) for n in (0, 1)] == ["needs 2 GPUs", None]


@pytest.mark.slow
def test_shared_prompts_come_to_the_gradients_of_a_row_per_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "WARM_UP", 0)
    options = argparse.Namespace(steps=1, tiny=True, shapes=["prompt"], out=str(tmp_path / "found.json"))
    found = bench.run_gradients(options, str(tmp_path))["gradients"]["prompt"]
    assert found["a row per rollout, float32"] == 0.0 < found["shared prompts, float32"] < 1e-5
    assert all(1e-4 < found[f"{each}, bf16"] < 0.2 for each in ("a row per rollout", "shared prompts"))
    steps = bench.run_step(options, str(tmp_path))["steps"]["prompt"]
    assert list(steps) == list(bench.STEP_SIDES) and all(len(side["seconds"]) == 1 for side in steps.values())
    assert json.loads((tmp_path / "found.json").read_text())["steps"]["prompt"] == steps


@pytest.mark.slow
def test_so_do_edited_histories_checkpointing_and_a_lora(tmp_path):
    names = ["records", "checkpointing", "LoRA"]
    options = argparse.Namespace(steps=1, tiny=True, shapes=names, out=None)
    found = bench.run_gradients(options, str(tmp_path))["gradients"]
    assert list(found) == names
    for row in found.values():
        assert row["a row per rollout, float32"] == 0.0 < row["shared prompts, float32"] < 5e-5
        assert all(1e-3 < row[f"{each}, bf16"] < 0.2 for each in ("a row per rollout", "shared prompts"))
    options.shapes = ["records"]
    steps = bench.run_step(options, str(tmp_path))["steps"]
    assert all(list(sides) == list(bench.STEP_SIDES)[1:] for sides in steps.values())  # TRL has no rows for them


def test_rows_that_share_nothing_are_not_measured_as_shared_ones(tmp_path):
    shape = bench.shapes_of(["prompt"], argparse.Namespace(tiny=True))["prompt"]
    with pytest.raises(
        RuntimeError, match="long prompt: the rows are each with its prompt.*pad_to_multiple_of is set"
    ):
        bench.train_canned(
            "ours", shape, str(tmp_path), bench.meter(), use_cpu=True, max_steps=1, pad_to_multiple_of=8
        )


@pytest.mark.slow
def test_its_cases_run_with_the_bundled_model(monkeypatch, tmp_path):
    pytest.importorskip("vllm")
    results = tmp_path / "results.json"
    monkeypatch.setattr(bench.FRAME, "short_results", results)
    cases = ["in process", "TRL, in process", "server, disk", "tiny recipe"]
    assert bench.main(["--tiny", *(word for case in cases for word in ("--case", case))]) == 0
    (run,) = json.loads(results.read_text())["runs"]
    rows = run["cases"]
    assert list(rows) == cases and rows["server, disk"]["summary"]["sync"] > 0
    assert rows["in process"]["summary"]["rollouts"] > 0 and rows["tiny recipe"]["exact_match"]["steps"] == 2
