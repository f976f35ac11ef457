"""A step in passes of our own layout has the gradient of TRL's step."""

import contextlib
import copy
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import random_batches as batches
import records_batch
import torch
from accelerate import Accelerator
from peft import LoraConfig
from processes import on_two_threads
from records_batch import distance
from test_distributed import run as run_worker

from mt_grpo.base.errors import RunError
from mt_grpo.training import passes
from mt_grpo.training.passes import (
    PASSES,
    Pass,
    TrainedRow,
    balance,
    fill,
    fill_together,
    into_passes,
    loss_in_passes,
    pass_of_two,
    rows_of,
    rows_of_ids,
    rows_that_share,
    to_pass,
    trained_row,
    weighed,
    without_sync,
)

CLOSE = 1e-5  # of a gradient's largest entry, in float32

OF_SEQUENCES = dict(credit_assignment="outcome")  # what reads the sign of a sequence's advantage
ONE_MICRO_BATCH = dict(gradient_accumulation_steps=1, per_device_train_batch_size=8)
SETTINGS = [
    *[dict(loss_type=name) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo")],
    dict(loss_type="cispo", epsilon_high=5.0),
    dict(loss_type="bnpo", per_device_train_batch_size=16),  # a micro-batch of several passes
    dict(loss_type="vespo", **OF_SEQUENCES),
    dict(loss_type="dapo", beta=0.1, vllm="token"),
    dict(loss_type="grpo", beta=0.1, vllm="token", num_iterations=2, max_steps=4),
    dict(loss_type="dapo", importance_sampling_level="sequence", vllm="sequence"),
    dict(loss_type="luspo", importance_sampling_level="sequence", vllm="sequence", beta=0.05),
    dict(loss_type="vespo", vllm="sequence", **OF_SEQUENCES),
    dict(loss_type="vespo", vllm="token", **OF_SEQUENCES),
    dict(loss_type="grpo", vllm="token", off_policy_mask_threshold=0.02, **OF_SEQUENCES),
    dict(loss_type="dapo", vllm="token", delta=1.5),
    dict(loss_type="bnpo", vllm="token", beta=0.1),
    dict(loss_type="grpo", top_entropy_quantile=0.5),
    dict(loss_type="dapo", entropy_coef=0.01),
    dict(loss_type="dapo", gradient_accumulation_steps=1, steps_per_generation=2, vllm="token"),  # two steps per batch
    dict(loss_type="grpo", gradient_accumulation_steps=4, steps_per_generation=2),  # two batches per step
    dict(loss_type="grpo", gradient_accumulation_steps=3, steps_per_generation=2, vllm="token"),
    dict(loss_type="dapo", gradient_checkpointing=True),
    dict(loss_type="grpo", vllm="token", beta=0.1, **ONE_MICRO_BATCH),
    dict(loss_type="dapo", importance_sampling_level="sequence", vllm="sequence", **ONE_MICRO_BATCH),
    dict(loss_type="dapo", further=True, beta=0.1),
    dict(loss_type="grpo", further=True, vllm="token"),
    dict(loss_type="sapo", further=True, gradient_accumulation_steps=1, seed=1),
    dict(loss_type="bnpo", further=True),
    *[
        dict(loss_type=name, quiet=True, seed=11, vllm="token")
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo")
    ],
    dict(loss_type="cispo", quiet=True, seed=11, epsilon_high=5.0, **ONE_MICRO_BATCH),
    dict(loss_type="vespo", quiet=True, seed=11, vllm="sequence", **OF_SEQUENCES),
    dict(loss_type="dapo", quiet=True, seed=11, further=True, num_iterations=2, max_steps=4),
]


def metrics(log):
    """Those of the loss: TRL makes them in each pass, and of passes with different numbers of tokens."""
    names = ("clip", "cispo", "vespo", "entropy", "kl", "observation")
    return {key: value for key, value in log.items() if key.startswith(names)}


@pytest.mark.contract("TRL gradients")
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: ",".join(f"{k}={v}" for k, v in each.items()))
def test_a_step_has_trls_gradient(random_model, tmp_path, settings):
    """In passes of shared rows, large and small ones, and in passes of padded rows."""
    expected = batches.train(random_model, tmp_path / "trl", "trl", settings)
    whole = batches.train(random_model, tmp_path / "whole", "shared", settings)
    # With these a micro-batch is one pass.
    small = {} if {"top_entropy_quantile", "entropy_coef"} & settings.keys() else {"max_tokens_per_pass": 80}
    found_in = [whole, batches.train(random_model, tmp_path / "padded", "padded", settings, **small)]
    if small:
        found_in.append(batches.train(random_model, tmp_path / "cut", "shared", settings, **small))
    for found in found_in:
        assert distance(expected["gradients"], found["gradients"]) < CLOSE
        for theirs, ours in zip(expected["log"], found["log"], strict=True):
            assert set(theirs) == set(ours)
            if "loss" in theirs:
                assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6, rel=1e-5)
                assert metrics(ours) == pytest.approx(metrics(whole["log"][theirs["step"] - 1]), abs=1e-5, nan_ok=True)
                if settings.get("gradient_accumulation_steps") == 1 and "further" not in settings:
                    assert metrics(ours) == pytest.approx(metrics(theirs), abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("quiet", [False, True])
def test_groups_without_signal_have_no_backward_pass(random_model, tmp_path, quiet):
    settings = dict(loss_type="dapo", quiet=quiet, seed=11, max_tokens_per_pass=80)
    trainer = batches.make_trainer(random_model, tmp_path, "shared", settings)
    graded, own = [], trainer._get_per_token_logps_and_entropies

    def counted(*inputs, **kwargs):
        graded.append(torch.is_grad_enabled())
        return own(*inputs, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted
    trainer.train()
    assert (graded.count(False) > 2) == quiet and sum(graded) >= 4  # two prove the layout


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_has_trls_gradient_of_adapters(random_model, tmp_path, checkpointing):
    """The second step's adapters are no longer zero. TRL's `lora_dropout` of 0.05 would make any two passes differ."""
    peft = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, r=4)
    settings = dict(loss_type="dapo", peft=peft, gradient_checkpointing=checkpointing, beta=0.1, max_steps=3)
    expected, found = (
        batches.train(random_model, tmp_path / layout, layout, settings)["gradients"] for layout in ("trl", "shared")
    )
    assert distance(expected, found) < CLOSE and expected[0].numel() < 20_000


def test_a_step_has_trls_gradient_in_bf16(random_model, tmp_path):
    """As near as rounding allows: the difference has at most 2% of the gradient's norm, and weights are in bf16."""
    settings = dict(loss_type="dapo", model_init_kwargs={"dtype": "bfloat16"}, max_steps=1)
    expected, found = (
        batches.train(random_model, tmp_path / layout, layout, settings)["gradients"] for layout in ("trl", "shared")
    )
    assert expected.dtype == torch.bfloat16
    assert (expected.float() - found.float()).norm() < 0.02 * expected.float().norm()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_losss_own_pass_says_what_a_pass_before_it_said(random_model, tmp_path, mode, beta):
    """Gradient and metrics of importance sampling are TRL's, and the policy is read once less."""
    settings = dict(ratios=records_batch.Unknown, mode=mode, cut=1.4, beta=beta, loss_type="dapo")
    settings |= dict(least=0.7) if mode.startswith("token") else {}
    settings |= records_batch.LAYOUTS["accumulated"]
    ours = records_batch.train(random_model, tmp_path / "ours", **settings)
    theirs = records_batch.train(random_model, tmp_path / "theirs", share_prompts=False, **settings)
    reference = int(beta > 0)
    assert (ours["passes"], theirs["passes"]) == (reference, reference + 1)
    assert distance(theirs["gradients"], ours["gradients"]) < CLOSE
    names = [name for name in theirs["log"] if name.startswith("sampling/")]
    assert len(names) == 10 and theirs["log"]["sampling/sampling_logp_difference/max"] > 0.1
    for name in names:
        assert ours["log"][name] == pytest.approx(theirs["log"][name], abs=1e-4), name


@pytest.mark.parametrize("settings", [
    dict(log_rollout_tokens=True, **records_batch.LAYOUTS["accumulated"]), dict(num_iterations=2, max_steps=2),
    records_batch.LAYOUTS["two steps"], dict(share_prompts=False),
], ids=" ".join)  # fmt: skip
def test_the_pass_before_the_step_stays_with(random_model, tmp_path, settings):
    assert records_batch.train(random_model, tmp_path, ratios=records_batch.Near, **settings)["passes"] == 1


def row(prompt, completion, trained):
    """Masks as TRL pads them, to three prompt tokens and four of the completion."""
    return {
        "prompt_ids": torch.tensor([0] * (3 - prompt) + [7] * prompt),
        "completion_ids": torch.tensor([8] * completion + [0] * (4 - completion)),
        "prompt_mask": torch.tensor([0] * (3 - prompt) + [1] * prompt),
        "completion_mask": torch.tensor([1] * completion + [0] * (4 - completion)),
        "tool_mask": torch.tensor(trained + [1] * (4 - len(trained))),
    }


def passes_of(loss_type, training=True, layout="padded"):
    """Two rollouts, of two records and one, in a pass for each row, or in an evaluation in one pass."""
    rows = [row(1, 2, [1, 0]), row(2, 3, [1, 1, 1])]
    micro_batch = {key: torch.stack([each[key] for each in rows]) for key in rows[0]}
    micro_batch |= {"num_items_in_batch": torch.tensor(77), "further_records": [[row(1, 3, [0, 1, 1])], []]}
    number = (3 if loss_type == "sapo" else 2) * (3 if training else 1)  # of three micro-batches like this one
    micro_batch["num_rows_in_batch"] = torch.tensor(number)
    args = SimpleNamespace(
        per_device_train_batch_size=1, per_device_eval_batch_size=3, steps_per_generation=3, max_tokens_per_pass=None,
        top_entropy_quantile=1.0, entropy_coef=0.0, use_adaptive_entropy=False, log_rollout_tokens=False,
    )  # fmt: skip
    accelerator = SimpleNamespace(device="cpu", num_processes=1, process_index=0, gather=lambda values: values)
    (found,) = into_passes(
        SimpleNamespace(
            args=args, accelerator=accelerator, model=SimpleNamespace(training=training), loss_type=loss_type,
            pad_to_multiple_of=None, layout=SimpleNamespace(kind=layout), use_vllm=False, beta=0.1,
        ), [micro_batch],
    )  # fmt: skip
    return found[PASSES]


def test_what_a_pass_reads():
    """Longest first, and a shared prompt once. A single column of completions would be taken for values of sequences,
    so two are the fewest. What no trained token needs is not read: nothing behind the first token of the first
    record."""
    passes = passes_of("sapo")
    assert [each["prompt_mask"].tolist() for each in passes] == [[[1, 1]], [[1]], [[1]]]
    assert [each["completion_mask"].tolist() for each in passes] == [[[1, 1, 1]], [[1, 1, 1]], [[1, 1]]]
    assert [each["tool_mask"].tolist() for each in passes] == [[[1, 1, 1]], [[0, 1, 1]], [[1, 0]]]
    assert [each.num_tokens for each in passes] == [2 + 3, 1 + 3, 1 + 2]
    assert [each.scale for each in passes] == [1 / 3] * 3  # a mean over three records
    assert {(each.loss_type, each["num_items_in_batch"].item()) for each in passes} == {("sapo", 77)}
    assert [len(each["prompt_mask"]) for each in passes_of("sapo", training=False)] == [3]
    found = to_pass([replace(trained_row(row(1, 1, [1])), pictures=("picture",))], 1, False)
    assert (found["completion_mask"].tolist(), found.pictures) == ([[1, 0]], ("picture",))
    (one,) = passes_of("dapo", training=False, layout="shared")
    assert one.shared.sizes == [1, 2, 1, 2]  # of each rollout the prompt's 7, and 8 8
    assert one.num_tokens == 6


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("loss_type, scales", [
    ("dapo", [1, 1, 1]), ("grpo", [1, 1, 1]), ("dr_grpo", [1 / 2] * 3), ("luspo", [1 / 2] * 3),  # over two rollouts
    ("bnpo", [3 / 6, 2 / 6, 1 / 6]),  # of the tokens
])  # fmt: skip
def test_a_loss_is_divided_as_without_passes(loss_type, scales, training):
    """An evaluation has one micro-batch, however many steps a batch of training has, and here one pass."""
    passes, weighs = passes_of(loss_type, training), loss_type == "grpo"
    assert {each.loss_type for each in passes} == {"dapo" if weighs else loss_type}
    # TRL divides dapo's by the micro-batches of a batch of rollouts.
    divisor = 2 * 3 * (3 if training else 1) if weighs else 77  # of the 3 tokens of the longest rollout
    assert {each["num_items_in_batch"].item() for each in passes} == {divisor}
    # Rollout 0 has 1 + 2 trained tokens, rollout 1 has 3.
    assert [each["tool_mask"].max().item() for each in passes] == [1] * len(passes)
    assert {each.is_weighted for each in passes} == {weighs}
    of_rows = 3 / 2 if loss_type in ("dr_grpo", "luspo") else 1.0  # TRL divides by three rows
    assert [each.scale for each in passes] == pytest.approx(scales if training else [of_rows])
    assert [each.weight for each in passes] == ([3, 2, 1] if training else [6])


def test_an_evaluations_loss_is_that_of_its_passes_and_leaves_the_settings():
    """The loss of a router is divided among the passes of a micro-batch. The next one begins with all of it."""
    passes, read = [Pass(value=torch.tensor(number)) for number in (1.0, 2.0, 4.0)], []
    for each in passes:
        each.loss_type, each.scale = "dapo", 1.0
    trainer = SimpleNamespace(loss_type="grpo", router_aux_loss_coef=0.75, model=SimpleNamespace(training=False))
    trainer.layout = SimpleNamespace(forget_masks=lambda: None)

    def compute_loss(model, each):
        read.append((model, trainer.loss_type, trainer.router_aux_loss_coef))
        return each["value"]

    trainer.compute_loss = compute_loss
    assert loss_in_passes(trainer, "policy", {PASSES: passes}, None) == 1 + 2 + 4
    assert read == [("policy", "dapo", 0.25)] * 3
    assert (trainer.loss_type, trainer.router_aux_loss_coef) == ("grpo", 0.75)
    passes[0].is_quiet = True  # without advantages, and yet with a loss
    with pytest.raises(RunError, match="is not 0 without advantages: set reads_more_than_advantages"):
        loss_in_passes(trainer, "policy", {PASSES: passes}, None)


def rows_with(*lengths, prompt=None, trained=99):
    """A row per number of completion tokens, at most `trained` of which are. Its prompt is one token, or `prompt`."""
    return [TrainedRow(prompt or [100 + n], [5] * n, [k < trained for k in range(n)], number=n) for n in lengths]


def numbers(bins):
    return [[row.number for row in each] for each in bins]


def test_rows_of_a_micro_batch_and_what_they_weigh():
    """Further records stand with the first of their rollout; a value per row stays."""
    rows = [row(1, 2, [1, 0]) | {"ratio": torch.tensor([0.5])}, row(2, 3, [1, 1, 1]) | {"ratio": torch.tensor([2.0])}]
    micro_batch = {key: torch.stack([each[key] for each in rows]) for key in rows[0]} | {"num_items": torch.tensor(9)}
    (first, further), (other,) = rows_of(micro_batch | {"further_records": [[row(3, 1, [1])], []]})
    assert {key: value.tolist() for key, value in first.values.items()} == {
        "prompt_ids": [7], "completion_ids": [8, 8], "prompt_mask": [1], "completion_mask": [1, 1],
        "tool_mask": [1, 0], "ratio": [0.5],
    }  # fmt: skip
    assert (first.prompt_ids, first.completion_ids, first.trained) == ([7], [8, 8], [True, False])
    assert (first.num_trained, first.own) == (1, 1)
    assert (further.prompt_ids, further.completion_ids, further.trained) == ([7, 7, 7], [8], [True])
    assert first.group == further.group == first.prompt != other.group == other.prompt
    assert [[each.own for each in rollout] for rollout in rows_of(micro_batch)] == [[1], [3]]
    del micro_batch["tool_mask"]
    assert [each.trained for (each,) in rows_of(micro_batch)] == [[True, True], [True, True, True]]
    rows = [weighed([trained_row(row(1, 2, mask))], 30)[0] for mask in ([1, 0], [0, 0], [1, 1])]
    assert [each.values["tool_mask"].tolist() for each in rows] == [[30, 0], [0, 0], [15, 15]]


def test_rows_of_ids_and_one_that_changes_ranks():
    ids, mask = torch.tensor([[0, 7, 5, 6, 0], [8, 9, 5, 5, 6]]), torch.tensor([[0, 1, 1, 1, 0], [1] * 5])
    trainer = SimpleNamespace(batch=SimpleNamespace(loss_masks=[[1, 0], [0, 0.5, 1]]))
    one, two = rows_of_ids(trainer, ids, mask, 3)
    assert (one.prompt_ids, one.completion_ids, one.trained, one.number) == ([7], [5, 6], [True, False], 0)
    assert (two.prompt_ids, two.completion_ids, two.trained, two.number) == ([8, 9], [5, 5, 6], [False, True, True], 1)
    assert {key: value.tolist() for key, value in one.values.items()} == {
        "prompt_ids": [7], "prompt_mask": [1], "completion_ids": [5, 6], "completion_mask": [1, 1], "tool_mask": [1, 0]
    }  # fmt: skip
    assert {value.dtype for value in one.values.values()} == {torch.long}
    trainer.batch = None
    assert [each.trained for each in rows_of_ids(trainer, ids, mask, 3)] == [[True] * 2, [True] * 3]
    row = TrainedRow([7], [5, 6], [True, True], {"advantages": torch.arange(8.0)[2:4]}, group=3)
    moved = row.to("cpu")
    assert moved.values["advantages"].tolist() == [2.0, 3.0] and (moved.completion_ids, moved.group) == ([5, 6], 3)
    assert moved.values["advantages"].untyped_storage().nbytes() == 2 * 4


def test_passes_are_filled_longest_first():
    rows = rows_with(6, 2, 5, 1)
    assert numbers(fill(rows, 2 * 7, False)) == [[6, 5], [2, 1]]
    assert numbers(fill(rows, 2 * 7 - 1, False)) == [[6], [5, 2], [1]]  # padded rows: behind those of their length
    assert numbers(fill(rows, 9, True)) == [[6, 2, 1], [5]]
    assert numbers(fill(rows, 3, False)) == [[6], [5], [2], [1]]
    assert numbers(fill(rows, 3, True)) == [[6], [5], [2, 1]]
    # Groups stay whole where they fit. Prompts of 5 and 3 tokens: 4 + 6 + 2, and 2 + 4 + 3 tokens.
    groups = rows_with(6, 2, prompt=[1] * 5) + rows_with(4, 3, prompt=[2] * 3)
    assert numbers(fill(groups, 21, True)) == [[6, 2, 4, 3]]
    assert numbers(fill(groups, 14, True)) == [[6, 2], [4, 3]]
    assert numbers(fill(groups, 10, True)) == [[6], [4, 3], [2]]
    assert numbers(fill(groups, 4, True)) == [[6], [2], [4], [3]]  # one is never cut


def test_the_pass_of_two_is_of_the_longest_that_share_a_prompt():
    """The shortest where TRL's passes have a single row. What trains nothing proves nothing."""
    rows = [row(1, 1, [1]), row(1, 3, [1] * 3), row(1, 4, [0] * 4), row(1, 2, [1] * 2), row(2, 1, [1])]
    args, alone = SimpleNamespace(per_device_train_batch_size=2), SimpleNamespace(per_device_train_batch_size=1)

    def completions(rows, args):
        return pass_of_two([trained_row(each) for each in rows], args, 1)["completion_ids"].tolist()

    assert completions(rows, args) == [[8, 8, 8], [8, 8, 0]] and completions(rows, alone) == [[8, 0], [8, 8]]
    longer = rows + [row(3, 4, [1] * 4), row(3, 3, [1] * 3)]
    assert completions(longer, args) == [[8] * 4, [8, 8, 8, 0]] and completions(longer, alone) == [[8, 0], [8, 8]]
    assert completions(rows[2:3], args) == [[8] * 4]
    assert pass_of_two([trained_row(each) for each in rows], args, 1).shared.sizes == [1, 2]


@pytest.mark.parametrize(
    "size, most, gather, lengths",
    [
        (None, None, lambda own: own, [14]),
        (1, None, lambda own: own, [7, 7]),  # 6 and 1, 5 and 2 tokens, of at most 7
        (1, 8, lambda own: own, [8, 6]),
        # Another rank has a row of 8 tokens, and one pass more: here it is one that reads a token.
        (1, None, lambda own: torch.stack([own, own + 1]), [8, 6, 1]),
    ],
)
def test_a_batch_is_read_in_passes_of_shared_rows(size, most, gather, lengths):
    rows = [replace(each, number=k) for k, each in enumerate(rows_with(6, 2, 5, 1))]
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu", gather=gather))
    trainer.args = SimpleNamespace(max_tokens_per_pass=most)
    found = rows_that_share(trainer, rows, 6, torch.device("cpu"), size)
    assert [len(each) for each in found] == lengths and {each.shape for each in found} == {(4, 6)}
    wanted = sum(each.spread(torch.ones(1, len(each.scored))) for each in found)
    assert wanted.tolist() == [[1.0] * n + [0.0] * (6 - n) for n in (6, 2, 5, 1)]


@pytest.mark.parametrize("is_deepspeed, each_batch", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("last_of_its_accumulation", [False, True])
def test_ranks_exchange_gradients_once(monkeypatch, is_deepspeed, each_batch, last_of_its_accumulation):
    """A pass that is not the last only adds up."""
    seen = []
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_state._set_sync_gradients(last_of_its_accumulation)
    if each_batch:
        monkeypatch.setitem(accelerator.gradient_state.plugin_kwargs, "sync_each_batch", True)
    accelerator.no_sync = lambda model: contextlib.nullcontext(seen.append(model))
    try:
        with without_sync(accelerator, "model", is_deepspeed):
            assert not accelerator.sync_gradients
        assert accelerator.sync_gradients == last_of_its_accumulation
    finally:
        accelerator.gradient_state._set_sync_gradients(True)
    assert seen == ([] if is_deepspeed or each_batch else ["model"])


def test_ddp_keeps_each_gradient_once(tmp_path):
    """From a step's first pass on gradients are DDP's buckets, and add up as without it."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain), gradient_as_bucket_view=True)
        state = SimpleNamespace(sync_gradients=False, plugin_kwargs={})
        state._set_sync_gradients = lambda value: vars(state).update(sync_gradients=value)
        accelerator = SimpleNamespace(gradient_state=state, no_sync=lambda model: model.no_sync())
        for _ in range(3):
            model.zero_grad(), plain.zero_grad()
            for k in range(4):  # two of a micro-batch that is not the last, one of the last, and the last one
                state.sync_gradients = k > 1
                x = torch.full((2, 8), 0.5 * k)
                with model.no_sync() if k < 2 else contextlib.nullcontext():
                    with without_sync(accelerator, model, False) if k < 3 else contextlib.nullcontext():
                        model(x).square().sum().backward()
                plain(x).square().sum().backward()
                assert all(p.grad.untyped_storage().nbytes() > p.grad.nbytes for p in model.parameters()), k
                assert model.require_backward_grad_sync
            for ours, expected in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(ours.grad, expected.grad)
    finally:
        torch.distributed.destroy_process_group()


def on_two_ranks(monkeypatch, function):
    """What `function(rank, accelerator)` gives on each of two ranks, which are threads."""
    this_thread = threading.local()

    def run(rank, gather):
        this_thread.gather = gather
        of_all = {"num_processes": 2, "device": "cpu", "gather": lambda value: torch.cat(gather(value))}
        return function(rank, SimpleNamespace(process_index=rank, **of_all))

    monkeypatch.setattr(passes, "gather_object", lambda value: sum(this_thread.gather(value), []))
    return on_two_threads(run)


@pytest.mark.parametrize(
    "first, second, expected, of_second",
    [
        # In 14 tokens: two rows of 1 + 6 and 1 + 6; the second rank could take three, then has one, then none.
        ([6, 4, 6, 3], [4, 3, 3], [[6, 6], [4], [3]], [[4, 3], [3], []]),
        # A row that is too long is alone, and so is the other rank's.
        ([20, 5, 6], [3, 3, 3], [[20], [6, 5]], [[3], [3, 3]]),
    ],
)
def test_padded_passes_have_as_many_rows_on_all_ranks(monkeypatch, first, second, expected, of_second):
    rows = [rows_with(*first, trained=1), rows_with(*second, trained=1)]
    found = on_two_ranks(monkeypatch, lambda rank, accelerator: fill_together(rows[rank], 14, accelerator))
    assert [numbers(each) for each in found] == [expected, of_second]


@pytest.mark.parametrize(
    "first, second, expected, of_second",
    [
        (rows_with(10, 6, 4), rows_with(2), [10, 2], [6, 4]),  # 20 tokens and 2: the longest go first
        (rows_with(10, 11), rows_with(9, 10), [10, 11], [9, 10]),  # 21 and 19: 1.05 times the mean stays
        (rows_with(20), rows_with(2), [20], [2]),  # nothing else is better
        # A group on two ranks comes together: 4 + 5 + 3 tokens, where it was 9 + 7.
        (rows_with(5, prompt=[7] * 5) + rows_with(12), rows_with(3, prompt=[7] * 5), [5, 3], [12]),
    ],
    ids=["uneven", "even", "no better", "a group"],
)
def test_rows_change_ranks_where_one_would_wait(monkeypatch, first, second, expected, of_second):
    rows = [first, second]
    found = on_two_ranks(monkeypatch, lambda rank, accelerator: balance(rows[rank], 100, True, accelerator))
    assert numbers(found) == [expected, of_second]
    if expected == [row.number for row in first]:
        assert found[0] is first and found[1] is second


@pytest.fixture(scope="module")
def by_rank(random_model, tmp_path_factory):
    return run_worker(2, random_model, tmp_path_factory.mktemp("ranks"), "passes")


@pytest.mark.parametrize("layout", ["shared-None", "shared-80", "padded-120"])
@pytest.mark.parametrize("name", batches.ON_RANKS)
def test_two_ranks_have_trls_gradient(by_rank, name, layout):
    """As many passes on both, of as many rows; where one has more tokens, rows go to the other."""
    tokens, rows = [], []
    for rank in by_rank:
        expected, theirs, _, _ = rank[f"{name}-trl-None"]
        gradients, log, *sizes = rank[f"{name}-{layout}"]
        assert distance(expected, gradients) < CLOSE
        assert log["loss"] == pytest.approx(theirs["loss"], abs=1e-6, rel=1e-5)
        tokens.append(sizes[0])
        rows.append(sizes[1])
    assert rows[0] == rows[1] and len(tokens[0]) == len(tokens[1])
    sums = [sum(each) for each in tokens]
    if batches.ON_RANKS[name].get("uneven") and name != "a group on two ranks":
        assert max(sums) < 1.35 * min(sums)


@pytest.mark.parametrize("name", ["dapo", "further records"])
def test_two_ranks_have_the_gradient_of_one(random_model, tmp_path, by_rank, name):
    """The same rows in one process."""
    one = batches.train(random_model, tmp_path, "shared", batches.ON_RANKS[name], per_device_train_batch_size=8)
    for rank in by_rank:
        assert distance(one["gradients"], rank[f"{name}-shared-None"][0]) < CLOSE
