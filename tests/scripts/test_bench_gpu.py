"""The GPU benchmark: its table from hand-written rows, and its cases with the bundled model on a CPU."""

import argparse
import json

import pytest
from bench import gpu as bench

LOG = [
    {"reward": 0.1, "rollout/wait_seconds": 1.0, "sync/seconds": 0.5, "sampling/sampling_logp_difference/mean": 0.02}
]
CASES = {
    "in process": {"seconds": [9.0, 9.0, 4.0, 4.5], "log": [{"reward": 0.1, "rollout/wait_seconds": 3.0}] * 4,
                   "allocated": 2**30, "used": 3 * 2**30},
    "TRL, in process": {"seconds": [9.0, 9.0, 5.0], "log": [{"reward": 0.1}] * 3, "allocated": 2**31, "used": 2**32},
    "colocate": {"error": "Traceback\n  File\nRuntimeError: no memory\n"},
    "server, disk": {"seconds": [9.0, 9.0, 4.0], "log": LOG * 3, "allocated": 2**30, "used": 2**32},
    "server, nccl": {"skipped": "needs 2 GPUs"},
    "step": {"steps": {
        "prompt": {"TRL": {"seconds": [9.0, 6.0, 3.0], "allocated": 2**31},
                   "shared prompts": {"seconds": [2.0, 1.0, 4.0], "allocated": 2**30}},
        "spread": {"TRL": {"seconds": [5.0], "allocated": 2**30}},
        "records": {"shared, checkpointing": {"seconds": [7.0], "allocated": 3 * 2**30}},
    }},
    "gradients": {"gradients": {"prompt": {"a row per rollout, float32": 0.0, "shared prompts, bf16": 0.0123},
                                "LoRA": {"a row per rollout, float32": 0.0}}, "error": "out\nof memory"},
    "tiny recipe": {"seconds": [1.0], "log": [{"rewards/exact_match_reward_func/mean": m} for m in (0.25, 0.75)]},
    "zoom recipe": {"seconds": [1.0], "log": [{"rewards/exact_match_reward_func/mean": 0.5}]},
}  # fmt: skip
ROWS = {case: {**bench.aggregate(case, row), **{k: row[k] for k in ("error", "skipped") if k in row}}
        for case, row in CASES.items()}  # fmt: skip
RESULTS = {
    "machine": {"torch": "2", "trl": "1", "vllm": "0"}, "gpus": "Abacus 9000", "parameters": 600_000_000,
    "cases": ROWS, "notes": ["A note."],
    "settings": {"rollouts": 64, "tokens": 256, "steps": 2},
}  # fmt: skip


def test_the_table_has_a_row_per_case_that_ran_and_a_line_per_other_one():
    older = {**RESULTS, "gpus": "Abacus 8000", "cases": {}}
    text, of_older = bench.section({"runs": [older, RESULTS]}).split("\n\n**On Abacus 8000**")
    assert "0.6B parameters" in of_older and of_older.endswith("A note.")
    lines = text.splitlines()
    assert "On Abacus 9000" in lines[0] and "0.6B parameters" in lines[0]
    assert lines[4:7] == [
        "| in process | 4.25 s | 3.00 s | - | 1.25 s | 1.0 | 3.0 | - |",
        "| TRL, in process | 5.00 s | - | - | - | 2.0 | 4.0 | - |",
        "| server, disk | 4.00 s | 1.00 s | 0.50 s | 2.50 s | 1.0 | 4.0 | 2.0e-02 |",
    ]
    assert "(torch 2, TRL 1, vLLM 0)" in lines[0]
    assert [line for line in lines[7:] if line and line[0] != "A"] == [
        "| conversations | TRL | shared prompts | shared, checkpointing | TRL / shared |",
        "|---|---|---|---|---|",
        "| long prompt | 6.00 s, 2 GiB | 2.00 s, 1 GiB | - | 3.0 |",
        "| log-normal lengths | 5.00 s, 1 GiB | - | - | - |",
        "| edited histories | - | - | 7.00 s, 3 GiB | - |",
        "Distance of the whole model's gradient from that of a row per rollout in float32, relative:",
        "| conversations | shared prompts, bf16 |",
        "|---|---|",
        "| long prompt | 1.2e-02 |",
        "| long prompt, LoRA | - |",
        "`colocate` failed: `RuntimeError: no memory`",
        "`server, nccl` was left out: it needs 2 GPUs.",
        "`gradients` failed: `of memory`",
        "`hf_recipes/tiny/calculator.yaml` in bf16: exact match 0.25 in the first step, 0.50 in the last ten of 2.",
        "`hf_recipes/tiny/zoom.yaml` in bf16: exact match 0.50 in the first step, 0.50 in the last ten of 1.",
    ]
    assert lines[-1] == "A note."


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
