"""bf16: training in it, steps lost in rounding, and what the check of a push sees against a bf16 vLLM server."""

import itertools
import re

import pytest
import torch
from bench.common import ROOT
from safetensors.torch import load_file
from server_run import FLAGS
from test_first_batch import preflight, recipe_file
from transformers import TrainerCallback
from warm_vllm import WarmVLLMServer

import mt_grpo_trainer as mt
from mt_grpo.base.errors import ServerError
from mt_grpo.reports.preflight import facts_of_settings, share_stuck, troubles

TINY = ROOT / "hf_recipes/tiny/calculator-model"
SERVED = ROOT / "hf_recipes/tiny/calculator-vllm.yaml"
BOTH_WAYS = pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["autocast", "bf16 weights"])


def build(path):
    return mt.build_trainer(*mt.parse_arguments(["--config", path]))


@BOTH_WAYS
def test_two_steps_in_bf16(dtype, tmp_path):
    """Computed in bfloat16 both ways; kept, trained and saved in what `dtype` says."""
    trainer = build(recipe_file(tmp_path, bf16=True, dtype=dtype, max_steps=2, learning_rate=1e-3))
    wanted, seen = getattr(torch, dtype), []
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer.train()
    assert set(seen[-2:]) == {torch.bfloat16}  # of the loss, and of the logprobs before it
    after = dict(trainer.model.named_parameters())
    assert {p.dtype for p in after.values()} == {wanted}
    # Norms are near 1, where bfloat16 has steps of 0.004 below and 0.008 above: some of them stay as they were.
    moved = {name for name, p in after.items() if (p != before[name]).any()}
    assert {name for name in after if "norm" not in name} <= moved and (moved == {*after}) == (dtype == "float32")
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert len(rows) == 2 and all(0 < row["grad_norm"] < float("inf") for row in rows)
    trainer.save_model(str(tmp_path / "saved"))
    assert {t.dtype for t in load_file(tmp_path / "saved/model.safetensors").values()} == {wanted}


def test_bfloat16_loses_small_steps():
    """By hand: between 2^-6 and 2^-5 the numbers are 2^-13 apart, so that less than 2^-14 goes back."""
    weights = torch.nn.Parameter(torch.tensor([0.02, 0.02, 1e-4, 0.0], dtype=torch.bfloat16))
    assert 0.02 > 2**-6 and 2**-14 == pytest.approx(6.1e-5, rel=1e-2)
    assert share_stuck([weights], 1e-6) == 0.5  # beside 1e-4 they are 2^-21 = 4.8e-7 apart
    assert share_stuck([weights], 6.0e-5) == 0.5
    assert share_stuck([weights], 6.2e-5) == 0.0
    assert share_stuck([torch.nn.Parameter(weights.detach().float())], 1e-6) == 0.0
    edge = torch.nn.Parameter(torch.tensor([2.0**-6], dtype=torch.bfloat16))  # below it they are 2^-14 apart
    assert [share_stuck([edge], step) for step in (3.0e-5, 4.0e-5)] == [1.0, 0.0]
    frozen = torch.nn.Parameter(weights.detach(), requires_grad=False)
    assert share_stuck([frozen, torch.nn.Parameter(torch.zeros(4))], 1e-6) == 0.0  # LoRA's B begins at 0
    assert share_stuck([], 1e-6) == 0.0


def test_the_preflight_names_it(tmp_path, capsys):
    """At 1e-6 in bfloat16; not in float32, nor with a learning rate that arrives."""
    code, text, found = preflight(recipe_file(tmp_path, dtype="bfloat16", bf16=True, learning_rate=1e-6), capsys)
    assert (code, found) == (0, ["rounding"])
    assert re.search(r"A step of learning_rate=1e-06 is lost to rounding for 99% of the weights\.", text)
    for changes, expected in (
        ({"dtype": "float32", "learning_rate": 1e-6}, []),
        ({"dtype": "bfloat16", "learning_rate": 1e-5}, ["rounding"]),
        ({"dtype": "bfloat16", "learning_rate": 1e-3}, []),
        ({"dtype": "bfloat16", "learning_rate": 1e-6, "optim": "sgd"}, []),
        ({"dtype": "bfloat16", "learning_rate": 0.0}, ["learning rate"]),
    ):
        facts = facts_of_settings(build(recipe_file(tmp_path, bf16=True, **changes)))
        assert [each.name for each in troubles(facts)] == expected, changes


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with WarmVLLMServer(TINY, *FLAGS, "--dtype", "bfloat16", log=log) as server:
        yield server.port


def served(tmp_path, port, **changes):
    keys = {"bf16": True, "vllm_server_port": port, "disable_tqdm": True, **changes}
    trainer = build(recipe_file(tmp_path, SERVED, **keys))
    trainer.weight_sync.CHECK_EVERY = 1
    return trainer


class Snapshots(TrainerCallback):
    """The weights under their names on the server, at the start and after each optimizer step."""

    def __init__(self, trainer):
        self.trainer, self.weights = trainer, []
        self.on_optimizer_step()

    def on_optimizer_step(self, *given, **more):
        self.weights.append({n: w.detach().clone() for n, w in self.trainer.vllm_generation.named_weights()})


@pytest.mark.slow
@BOTH_WAYS
def test_the_check_passes_right_weights_and_no_wrong_ones(dtype, port, tmp_path):
    """Right ones at each of 20 steps; then a norm that is off, old weights, a layer and a head left behind."""
    trainer = served(
        tmp_path, port, dtype=dtype, max_steps=20, per_device_train_batch_size=32, learning_rate=1e-3
    )  # fmt: skip
    snapshots, sync = Snapshots(trainer), trainer.weight_sync
    trainer.add_callback(snapshots)
    trainer.train()
    gaps = [row["sync/logprob_difference"] for row in trainer.state.log_history if "sync/logprob_difference" in row]
    assert len(gaps) == 20 and 1e-4 < min(gaps) and max(gaps) < 0.5 * sync._logprob_tolerance()
    numbers = itertools.count()

    def check(wrong=None, norm_scale=1.0):
        scaled = {"model.norm.weight": trainer.model.model.norm.weight.detach() * norm_scale, **(wrong or {})}
        pushed = ((n, scaled.get(n, w)) for n, w in trainer.vllm_generation.named_weights())
        trainer.client.update_weights(pushed, f"wrong-{next(numbers)}", None, torch.device("cpu"))
        return sync._check_logprobs()

    assert check() == pytest.approx(gaps[-1], abs=0.02)
    assert 0.02 < check(norm_scale=1.01) < sync._logprob_tolerance()  # too little for it, as docs/speed.md says
    first, old = snapshots.weights[0], snapshots.weights[-11]
    layer = {name: tensor for name, tensor in first.items() if ".layers.0." in name}
    wrong = {"norm": {"norm_scale": 1.05}, "10 steps old": {"wrong": old}, "layer": {"wrong": layer},
             "head": {"wrong": {"lm_head.weight": first["lm_head.weight"]}}}  # fmt: skip
    for name, weights in wrong.items():
        with pytest.raises(ServerError, match="the trainer and the server .* disagree") as refused:
            raise AssertionError(f"{name}: {check(**weights)} passes")
        print(name, refused.value)
    check()
