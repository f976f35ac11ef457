"""How a run's rows are laid out: what it says, what it proves first, and what it does where a pass does not fit."""

import math
import types

import pytest
import random_batches as batches
import torch
from datasets import Dataset
from peft import LoraConfig
from test_trainer import PROMPTS, make_trainer
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteMoeConfig
from trl import GRPOTrainer

from mt_grpo.base.errors import RunError
from mt_grpo.training import layouts, shared_prompts
from mt_grpo_trainer import MTGRPOEnvTrainer


def test_a_shared_row_that_is_not_a_number_is_refused(random_model, tmp_path, monkeypatch):
    logps_of_rows = layouts.logps_of_rows

    def without_numbers(*args, **kwargs):
        logps, *others = logps_of_rows(*args, **kwargs)
        return logps * math.nan, *others

    monkeypatch.setattr("mt_grpo_trainer.logps_of_rows", without_numbers)
    trainer = batches.make_trainer(random_model, tmp_path, "shared", {"loss_type": "dapo"})
    trainer.train()
    assert trainer.layout.kind == "padded" and "a different logprob in a shared row, by nan" in trainer.layout.reason


@pytest.mark.parametrize("share_prompts", [True, False])
def test_no_run_takes_cudnns_attention(random_model, tmp_path, share_prompts):
    """Its backward pass gives NaN for padding in rows of 64, 192, ..., 704, ... tokens."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        make_trainer(random_model, tmp_path, share_prompts=share_prompts)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class OwnLoss(MTGRPOEnvTrainer):
    def _compute_loss(self, model, inputs):
        assert inputs["prompt_ids"].shape[0] == 8  # TRL's rows
        return super()._compute_loss(model, inputs)


def test_a_loss_that_is_written_into_the_class_gets_trls_rows(random_model, tmp_path, monkeypatch):
    """As a copy of the script has it."""

    def own(self, model, inputs):
        return GRPOTrainer._compute_loss(self, model, inputs)

    monkeypatch.setattr(MTGRPOEnvTrainer, "_compute_loss", own, raising=False)
    assert make_trainer(random_model, tmp_path).layout.kind == "trl"


CASES = {
    "each prompt is computed once, without padding; a pass has at most the tokens of 8 longest conversations": {},
    "each prompt is computed once, without padding; a pass has at most 500 tokens": {"max_tokens_per_pass": 500},
    "each prompt is computed once, without padding; a pass is a micro-batch": {"entropy_coef": 0.1},
    "TRL's rows and passes, since share_prompts: false": {"share_prompts": False},
    "TRL's rows and passes, since OwnLoss has a _compute_loss of its own": {"cls": OwnLoss},
    "each with its prompt, sorted by length, since its attention is 'eager'": {
        "model_init_kwargs": {"attn_implementation": "eager"}
    },
    "each with its prompt, sorted by length, since lora_dropout has a dropout of 0.05": {
        "peft_config": LoraConfig(target_modules=["q_proj"], lora_dropout=0.05)
    },
    "each with its prompt, sorted by length, since pad_to_multiple_of is set": {"pad_to_multiple_of": 8},
    "each with its prompt, sorted by length, since use_transformers_continuous_batching is set": {
        "use_transformers_continuous_batching": True
    },
}


@pytest.mark.parametrize("text", CASES)
def test_the_first_line_of_a_run_says_how_rows_are_laid_out(random_model, tmp_path, capsys, text):
    trainer = make_trainer(random_model, tmp_path, **CASES[text])
    assert str(trainer.layout).startswith(text)
    if len(CASES[text]) and not {"cls", "peft_config"} & CASES[text].keys():
        return  # the line is the same text
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")]
    assert lines[0] == f"rows: {str(trainer.layout)}"
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("dropout, settings, warned", [
    (0.05, {}, 1), (0.05, {"share_prompts": False}, 1), (0.05, {"disable_dropout": True}, 0), (0.0, {}, 0),
])  # fmt: skip
def test_dropout_that_the_sampled_logprobs_have_not_is_said(random_model, tmp_path, caplog, dropout, settings, warned):
    config = LoraConfig(target_modules=["q_proj"], lora_dropout=dropout)
    make_trainer(random_model, tmp_path, peft_config=config, **settings)
    assert len([text for text in caplog.messages if "lora_dropout has a dropout of 0.05" in text]) == warned


@pytest.mark.parametrize("config, has_router, said", [
    (Gemma2Config(attn_implementation="sdpa"), False, "sdpa leaves out the softcap of gemma2. Set attn_"),
    (GraniteMoeConfig(), True, "no router loss for granitemoe. Set router_aux_loss_coef: 0.0"),
])  # fmt: skip
def test_a_model_of_which_trl_computes_another_loss_is_refused(config, has_router, said):
    with pytest.raises(ValueError, match=said):
        layouts.check_model(types.SimpleNamespace(config=config), has_router)
    config._attn_implementation = "eager"
    layouts.check_model(types.SimpleNamespace(config=config), False)


def test_padding_moves_no_position(random_model, tmp_path):
    """As in sampling. Learned positions, and scales that grow with a position, would give other logprobs."""
    model, seen = make_trainer(random_model, tmp_path).model, []
    note = lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist())  # noqa: E731
    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    model(input_ids=torch.tensor([[0, 0, 5, 6]]), attention_mask=torch.tensor([[0, 0, 1, 1]]))
    assert seen == [[[0, 0, 0, 1]]]


def test_a_model_is_read_in_passes_of_the_layout_that_is_said(random_model, tmp_path):
    """In shared rows the model is asked with a layout, once in ordinary rows for the proof, and never with padding."""
    trainer, seen = make_trainer(random_model, tmp_path), []

    def note(module, args, kwargs):
        seen.append((kwargs.get("shared_row") is not None, torch.is_grad_enabled()))

    trainer.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    trained = [shared for shared, with_gradient in seen if with_gradient]
    assert trained == [True, True]  # two steps of one pass each
    assert trainer.layout.proof < 1e-5


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_ignores_the_layout_or_fails_with_it_trains_its_rows(random_model, tmp_path, caplog, fails):
    """Its code drops the arguments that it does not know, which no configuration says."""
    model = AutoModelForCausalLM.from_pretrained(random_model)
    for layer in model.model.layers:
        own = layer.self_attn.forward

        def forward(self, *args, own=own, **kwargs):
            row = kwargs.get("shared_row") if fails else kwargs.pop("shared_row", None)
            if row is not None and fails:
                raise TypeError("Expected attn_mask dtype to be bool")
            return own(*args, **(kwargs if fails else kwargs | {"attention_mask": None}))

        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)
    trainer = make_trainer(model, tmp_path)
    assert trainer.layout.kind == "shared"
    trainer.train()
    assert trainer.layout.kind == "padded" and trainer.state.global_step == 2
    assert "each with its prompt" in str(trainer.layout)
    if fails:
        assert "failed with a shared row (TypeError: Expected attn_mask dtype to be bool)" in caplog.text
    else:
        assert trainer.layout.proof > 1e-3 and "computed a different logprob in a shared row, by" in caplog.text


def mixing_model(path, share, dtype=torch.float32):
    """Each layer's MLP reads a share of the token before in the row, as token shift does."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    for layer in model.model.layers:
        own = layer.mlp.forward

        def forward(self, x, own=own):
            return own(x + share * torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1))

        layer.mlp.forward = types.MethodType(forward, layer.mlp)
    return model


@pytest.mark.parametrize("rows_per_device, share, settings, dtype", [
    *[(rows, 0.5, {}, torch.float32) for rows in (8, 4, 2, 1)], (2, 0.5, {"bf16": True}, torch.float32),
    (1, 4.0, {}, torch.bfloat16), (8, 0.0, {}, torch.float32), (1, 0.0, {"bf16": True}, torch.float32),
    *[(rows, 0.0, {}, torch.bfloat16) for rows in (4, 1)],
])  # fmt: skip
def test_a_model_that_mixes_neighbouring_tokens_is_found_in_any_micro_batch(
    random_model, tmp_path, rows_per_device, share, settings, dtype
):
    """Rows of one prompt lie in several micro-batches. The first of them alone may have one row: itself."""
    settings = dict(settings, max_steps=1, gradient_accumulation_steps=8 // rows_per_device)
    model = mixing_model(random_model, share, dtype)
    trainer = make_trainer(model, tmp_path, per_device_train_batch_size=rows_per_device, **settings)
    trainer.train()
    assert trainer.layout.kind == ("padded" if share else "shared")


def test_shared_rows_wait_for_a_batch_that_can_prove_them(random_model, tmp_path, caplog, monkeypatch):
    """The first batch has one row of each prompt on this rank, the second one two."""
    trainer, kinds, own = make_trainer(random_model, tmp_path, max_steps=3, beta=0.1), [], layouts.pass_of_two
    monkeypatch.setattr(
        layouts, "pass_of_two", lambda rows, *args: own(rows[:1] if trainer.state.global_step == 0 else rows, *args)
    )
    compute = trainer._get_per_token_logps_and_entropies

    def noted(*args, **kwargs):
        if torch.is_grad_enabled():
            kinds.append((trainer.layout.kind, trainer.layout.proof is not None))
        return compute(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = noted
    trainer.train()
    assert kinds == [("padded", False), ("shared", True), ("shared", True)]
    assert caplog.text.count("Each row is computed with its prompt until a batch has two rows of one prompt.") == 1


@pytest.mark.parametrize("changes", [{"beta": 0.1}, {"num_iterations": 2, "max_steps": 2}], ids=str)
def test_no_pass_reads_shared_rows_before_they_are_proven(random_model, tmp_path, changes):
    """The logprobs before the step, and those of the reference model, come first."""
    trainer = make_trainer(AutoModelForCausalLM.from_pretrained(random_model), tmp_path, **changes)
    kinds, own = [], trainer._get_per_token_logps_and_entropies

    def noted(*args, **kwargs):
        kinds.append((trainer.layout.kind, trainer.layout.proof is not None))
        return own(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = noted
    trainer.train()
    assert kinds[0] == ("shared", False)  # the call that proves it first: the two next ones are of the proof
    assert [kind for kind, _ in kinds[1:3]] == ["padded", "shared"]
    assert all(kind == "shared" and proven for kind, proven in kinds[3:]) and len(kinds) > 4


def test_a_run_with_tf32_proves_its_rows(random_model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")  # as transformers does: the old key then raises
    make_trainer(random_model, tmp_path, max_steps=1).train()


def test_a_kernel_that_does_not_work_is_not_asked(caplog):
    """Of PyTorch, on a CPU: it is tried on a small row, forward and backward, before a model's row is."""
    query, key = torch.zeros(1, 4, 5, 8, dtype=torch.bfloat16), torch.zeros(1, 2, 5, 8, dtype=torch.bfloat16)
    assert shared_prompts.working_kernel(4, 2, 8, torch.bfloat16, torch.device("cpu")) is None
    assert "varlen_attn does not work here. SDPA is used" in caplog.text
    assert shared_prompts.kernel_of(query, key) is None


def test_masks_are_forgotten(random_model, tmp_path):
    """They are as large as the attention of a row, and a batch has many rows."""
    trainer = make_trainer(random_model, tmp_path, beta=0.1, max_tokens_per_pass=200)
    made, own = [], shared_prompts.SharedRow.__init__

    def noted(self, *args, **kwargs):
        own(self, *args, **kwargs)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prompts.SharedRow, "__init__", noted)
        trainer.train()
    held = [row for row in made if row._masks]
    assert len(made) > 6 and len(held) <= 1  # of the last pass


def test_a_pass_that_does_not_fit_names_what_makes_it_smaller(random_model, tmp_path):
    trainer = make_trainer(random_model, tmp_path, max_tokens_per_pass=400)
    own = trainer.model.base_model.forward

    def forward(*args, **kwargs):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")
        return own(*args, **kwargs)

    trainer.model.base_model.forward = forward
    with pytest.raises(RunError, match="does not fit .* max_tokens_per_pass"):
        trainer.train()
    assert 0 < trainer.layout.begun.num_tokens <= 400


def test_an_evaluation_is_read_in_passes_too(random_model, tmp_path):
    """Its loss is that of TRL's rows."""
    rows, losses = Dataset.from_dict({"prompt": PROMPTS[:2]}), []
    for share in (True, False):
        settings = dict(per_device_eval_batch_size=8, share_prompts=share, loss_type="grpo", seed=3)
        trainer = make_trainer(random_model, tmp_path, eval_dataset=rows, **settings)
        torch.manual_seed(5)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and abs(losses[0]) > 1e-8
