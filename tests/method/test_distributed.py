"""Two gloo processes against one, and against values written by hand: the same advantages, metrics and logs."""

import math
import subprocess
from pathlib import Path

import golden_batch as golden
import pytest
import torch
import warm_python

from mt_grpo_trainer import CREDIT_ASSIGNMENTS

WORKER = Path(__file__).parents[1] / "distributed_worker.py"
CPU = Path(__file__).parents[2] / "hf_recipes/accelerate/cpu.yaml"


def run(processes, model, out, *what):
    launch = [] if processes == 1 else ["-m", "accelerate.commands.launch", "--config_file", str(CPU)]
    command = [warm_python.executable(), *launch, str(WORKER), str(model), str(out), *what]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    return [torch.load(out / f"{processes}-{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def results(random_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    return run(1, random_model, out), run(2, random_model, out)


@pytest.mark.parametrize("group_size", [16, 4])  # 16: one group that straddles the two ranks
@pytest.mark.parametrize("credit", CREDIT_ASSIGNMENTS)
def test_two_ranks_equal_one(results, group_size, credit):
    (one,), two = ([part[f"{group_size}-{credit}"] for part in parts] for parts in results)
    together = [row for part in two for row in part["advantages"]]
    assert len(together) == len(one["advantages"]) == 16
    assert max(row.abs().max() for row in together) > 0.1  # there is something to compare
    for expected, actual in zip(one["advantages"], together):
        assert actual.shape == expected.shape
        assert torch.allclose(actual, expected, atol=1e-6)
    for part in two:
        assert part["metrics"].keys() == one["metrics"].keys()
        for name, value in one["metrics"].items():
            assert part["metrics"][name] == pytest.approx(value, abs=1e-5, nan_ok=True), name
        assert math.isfinite(part["evaluation"]["eval_reward"])  # 13 prompts, 1 or 4 generations each
    assert two[0]["evaluation"]["eval_reward"] == two[1]["evaluation"]["eval_reward"]


@pytest.fixture(scope="module")
def golden_results(random_model, tmp_path_factory):
    return run(2, random_model, tmp_path_factory.mktemp("golden"), "golden")


@pytest.mark.parametrize("name", golden.CASES)
def test_two_ranks_give_what_was_written_by_hand(golden_results, name):
    """One rank has conversations of up to three turns, the other of two; where a server restarts, each loses some."""
    for rank, part in enumerate(golden_results):
        golden.assert_as_written(part[name], name, 2, rank)
