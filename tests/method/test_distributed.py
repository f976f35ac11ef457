"""Two gloo processes against values written by hand, and against one: the same advantages, metrics and logs."""

import subprocess
import sys
from pathlib import Path

import golden_batch as golden
import pytest
import torch
import warm_python
from project import ROOT, json_lines, steps_of
from safetensors.torch import load_file

WORKER = ROOT / "tests/distributed_worker.py"
CPU = ROOT / "hf_recipes/accelerate/cpu.yaml"


def run(processes, model, out, *what):
    launch = [] if processes == 1 else ["-m", "accelerate.commands.launch", "--config_file", str(CPU)]
    command = [warm_python.executable(), *launch, str(WORKER), str(model), str(out), *what]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    return [torch.load(out / f"{processes}-{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.mark.contract("accelerate launch")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_warm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_accelerate_launches_the_script_by_a_recipe_and_keys(tmp_path, is_warm):
    """A key on the command line goes before the recipe's: 4 generations, and not its 8."""
    accelerate = f"{Path(sys.executable).with_name('accelerate')} launch"  # as users type it
    command = (
        f"{f'{warm_python.executable()} -m accelerate.commands.launch' if is_warm else accelerate} "
        f"--config_file {CPU} mt_grpo_trainer.py "
        f"--config hf_recipes/tiny/calculator.yaml --output_dir {tmp_path} --max_steps 1 --num_generations 4 "
        "--per_device_train_batch_size 4 --dataset_size 16 --max_completion_length 64"
    )
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    groups = []
    for rank in (0, 1):
        groups.append([row["messages"][1]["content"] for row in json_lines(tmp_path / f"rollouts.rank{rank}.jsonl")])
    assert [len(group) for group in groups] == [4, 4] and [len(set(group)) for group in groups] == [1, 1]
    (row,) = steps_of(tmp_path)
    assert row["step"] == 1 and row["grad_norm"] > 0
    saved = load_file(tmp_path / "model.safetensors")
    before = load_file(ROOT / "hf_recipes/tiny/calculator-model/model.safetensors")
    assert saved.keys() == before.keys() and not any(torch.equal(saved[name], before[name]) for name in saved)


@pytest.fixture(scope="module")
def golden_results(random_model, tmp_path_factory):
    return run(2, random_model, tmp_path_factory.mktemp("golden"), "golden")


@pytest.mark.contract("DDP")
@pytest.mark.parametrize("name", golden.CASES)
def test_two_ranks_give_what_was_written_by_hand(golden_results, name):
    """One rank has conversations of up to three turns, the other of two; where a server restarts, each loses some."""
    for rank, part in enumerate(golden_results):
        golden.assert_as_written(part[name], name, 2, rank)


def test_two_ranks_refill_what_one_does(random_model, tmp_path):
    """Of three groups the second is on both ranks, so that a rank may have no place, one or two to fill."""
    (one,), two = run(1, random_model, tmp_path, "refill"), run(2, random_model, tmp_path, "refill")
    trained = [numbers.tolist()[::2] for numbers, _ in one["steps"]]
    assert trained == [[0, 5, 4], [6, 7, 9], [10, 11, 0], [4, 5, 6]]  # by hand: 1, 2, 3 and 8 have no signal
    assert [row["refill/groups_dropped"] for row in one["logs"]] == pytest.approx([0.5, 0.25, 0, 0.5])
    for step, (numbers, advantages) in enumerate(one["steps"]):
        parts = [part["steps"][step] for part in two]
        assert torch.cat([part[0] for part in parts]).tolist() == numbers.tolist()
        assert all(torch.allclose(part[1], advantages, atol=1e-6) for part in parts)
        assert advantages.abs().min() > 0.1
    # TRL's table keeps one step where it prints none; its columns come from the ranks that scored.
    assert two[0]["said"] == one["said"] and len(one["said"]) >= 6 and None not in one["said"]
    for part in two:
        assert [row.keys() for row in part["logs"]] == [row.keys() for row in one["logs"]]
        for expected, row in zip(one["logs"], part["logs"]):
            assert row == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert [len(part["seen"]) for part in (one, *two)] == [8, 7, 8]  # a rank with no place to fill asks no function
    for part in (one, *two):  # a run that went on from its second step has the same weights, bit for bit
        assert len(part["weights"]) > 10_000 and torch.equal(part["resumed"], part["weights"])
    assert one["trained"] == {2: trained[2], 3: trained[3]}


def test_two_ranks_have_the_gradients_of_one_with_images(random_model, tmp_path):
    """Rows change ranks, and what they read goes with them."""
    (one,), two = run(1, random_model, tmp_path, "images"), run(2, random_model, tmp_path, "images")
    assert [part["kind"] for part in (one, *two)] == ["shared"] * 3 and sum(part["moved"] for part in two) > 3
    largest = max(gradient.abs().max() for gradient in one["gradients"].values())
    for name, gradient in one["gradients"].items():
        assert (two[0]["gradients"][name] - gradient).abs().max() < 1e-5 * largest, name
    assert two[0]["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert two[0]["secret"] == two[1]["secret"] != one["secret"]  # each rank reads the other's texts with images
