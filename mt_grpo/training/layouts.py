"""Which models and runs can train a row per prompt, and why others cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from trl.models.utils import disable_gradient_checkpointing

from mt_grpo.base.ranks import RunError
from mt_grpo.training.pass_metrics import PassMetrics
from mt_grpo.training.passes import PASSES, Pass, compares_tokens, into_passes, pass_of_two, window_of
from mt_grpo.training.shared_prompts import KERNEL, NAME, take_shared_rows

logger = logging.getLogger(__name__)

LOSS_METHODS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")  # that a fork may replace


def why_not_in_model(model: Any, asked: str | None = None) -> str | None:
    """Why a model's tokens would have other hidden states in a shared row; None: they have the same.

    A shared row has many conversations in it. So all that passes from token to token must go through an attention
    function which knows them, and what is drawn or counted per row must not matter.

    Args:
        model: A causal language model, maybe with adapters.
        asked: The run's `attn_implementation`.
    """
    if isinstance(model, PeftModel):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            return "its adapter writes into the prompt"
        model = model.get_base_model()
    config = model.config
    if asked not in (None, "sdpa"):
        return f"attn_implementation: {asked} is asked for. Rows that share a prompt need sdpa"
    if config is not config.get_text_config():
        return "it reads images"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        return f"it has layers of the kind {min(kinds)}"
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        return f"it has a sliding window of {config.sliding_window} tokens"
    for name, module in model.named_modules():
        kind = type(module).__name__
        if hasattr(module, "sinks"):
            return f"its attention has sinks ({name})"
        if isinstance(module, torch.nn.modules.conv._ConvNd) or "mamba" in kind.lower():
            return f"it has a layer that mixes neighbouring tokens ({name}: {kind})"
        dropped = module.p if isinstance(module, torch.nn.modules.dropout._DropoutNd) else 0.0
        dropped = dropped or getattr(module, "attention_dropout", 0.0)
        if isinstance(dropped, float) and dropped > 0:
            key = "lora_dropout" if "lora" in name else name
            return f"{key} has a dropout of {dropped:g}, which would be drawn once for all that share a prompt"
    if config._attn_implementation not in ("sdpa", NAME):
        return f"its attention is {config._attn_implementation!r}. Rows that share a prompt need sdpa"
    if not getattr(model, "_supports_attention_backend", False) or config.is_encoder_decoder:
        return f"{type(model).__name__} takes no attention function from outside"
    return None


def why_trls(trainer: Any, own_methods: type) -> str | None:
    """Why a run keeps TRL's micro-batches; None: its rows can be put together anew.

    Args:
        trainer: Its model is loaded.
        own_methods: The class whose loss reads passes.
    """
    if not trainer.args.share_prompts:
        return "share_prompts: false"
    for name in LOSS_METHODS:
        if getattr(type(trainer), name) is not getattr(own_methods, name):
            return f"{type(trainer).__name__} has a {name} of its own"
    if trainer.aux_loss_enabled:
        return "router_aux_loss_coef is set, and the router's loss compares the tokens of a micro-batch"
    if trainer.args.torch_compile:
        return "torch_compile is set, and each pass has another shape"
    return None


def why_padded(trainer: Any) -> str | None:
    """Why a run's rows cannot share prompts; None: they can."""
    if trainer.pad_to_multiple_of:
        return "pad_to_multiple_of is set"
    asked = (trainer.args.model_init_kwargs or {}).get("attn_implementation")
    found = [why_not_in_model(trainer.model, asked)]
    found += [why_not_in_model(trainer.ref_model)] if trainer.ref_model is not None else []
    return next(filter(None, found), None)


class Layout:
    """How a run's rows are laid out, and the pass whose loss is computed.

    Args:
        trainer: Its model is loaded.
        own_methods: The class whose loss reads passes.

    Attributes:
        kind: `shared`: a row per prompt. `padded`: rows of their own, sorted by length, in passes by tokens. `trl`:
            TRL's micro-batches.
        reason: Why it is not `shared`.
        proof: The largest difference of a logprob from that of TRL's rows; None before the first step.
        current: The pass whose loss is computed.
        metrics: Of the passes of a step.
    """

    def __init__(self, trainer: Any, own_methods: type):
        self.trainer = trainer
        self.kind, self.reason = "shared", ""
        if reason := why_trls(trainer, own_methods):
            self.kind, self.reason = "trl", reason
        elif reason := why_padded(trainer):
            self.kind, self.reason = "padded", reason
        else:
            take_shared_rows(trainer.model, trainer.ref_model)
        self.proof: float | None = None
        self.current: Pass | None = None
        self.metrics = PassMetrics()

    def in_passes(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """TRL's micro-batches of one batch of rollouts, as many of ours. Collective."""
        if self.kind == "trl":
            return micro_batches
        prove_layout(self.trainer, micro_batches[0])
        window = window_of(self.trainer.args, self.trainer.loss_type) if self.trainer.model.training else 1
        steps = [micro_batches[k : k + window] for k in range(0, len(micro_batches), window)]
        return [each for step in steps for each in into_passes(self.trainer, step)]

    @contextmanager
    def of(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Within it the loss of a pass is computed; TRL's own micro-batches need nothing."""
        if not isinstance(inputs, Pass):
            yield
            return
        self.current = inputs
        try:
            with self.metrics.of(self.trainer._metrics, self.trainer._mode, inputs):
                yield
        finally:
            self.current = None

    def __str__(self) -> str:
        """For people."""
        args = self.trainer.args
        if self.kind == "trl":
            return f"TRL's rows and passes, since {self.reason}"
        text = "a row per prompt, without padding"
        if self.kind == "padded":
            text = f"rows of their own, sorted by length, since {self.reason}"
        if compares_tokens(args):
            return f"{text}; a pass is a micro-batch"
        if args.max_tokens_per_pass:
            return f"{text}; a pass has at most {args.max_tokens_per_pass} tokens"
        return f"{text}; a pass has at most the tokens of {args.per_device_train_batch_size} longest conversations"


LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of a logprob, in a sequence of its own
LARGEST_MEAN_DIFFERENCE = 0.05  # of half precision, where single tokens differ by more


def on_gpu(accelerator: Any) -> bool:
    return accelerator.device.type == "cuda"


def prove_layout(trainer: Any, micro_batch: dict[str, Any]) -> None:
    """Compare shared rows with TRL's before the first step; where they differ, rows are padded. Collective.

    Two rows of one prompt are read in both ways. A model's own code can do what its configuration does not say.
    """
    if trainer.layout.kind != "shared" or trainer.layout.proof is not None:
        return
    accelerator, compared = trainer.accelerator, pass_of_two(trainer, micro_batch)
    ids, masks = (torch.cat([compared[f"prompt_{k}"], compared[f"completion_{k}"]], 1) for k in ("ids", "mask"))

    def logps_in(layout: str) -> torch.Tensor:
        trainer.layout.kind, width = layout, compared["completion_ids"].shape[1]
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
        ):
            return trainer._get_per_token_logps_and_entropies(trainer.model, ids, masks, width)[0].float()

    trainer.layout.current = compared
    try:
        logps = [logps_in("padded")]
        try:
            logps.append(logps_in("shared"))
        except RuntimeError as error:  # of a kernel that does not know this GPU, or this size of heads
            if not on_gpu(accelerator) or not KERNEL.usable:
                raise
            logger.warning(f"PyTorch's attention for sequences of different lengths failed: {error}. SDPA is used.")
            KERNEL.usable = False
            logps.append(logps_in("shared"))
    finally:
        trainer.layout.current = None
    trained = compared["completion_mask"] * compared.get("tool_mask", 1) > 0
    difference = (logps[0] - logps[1]).abs()[trained]
    found = torch.stack([difference.max(), difference.mean()]) if len(difference) else trained.new_zeros(2).float()
    largest, mean = accelerator.gather(found[None]).amax(0).tolist()
    trainer.layout.proof = largest
    exact = LARGEST_DIFFERENCE.get(next(trainer.model.parameters()).dtype)
    if trainer.accelerator.mixed_precision != "no":
        exact = None
    if not (largest <= exact if exact else mean <= LARGEST_MEAN_DIFFERENCE):
        trainer.layout.kind, model = "padded", type(trainer.model).__name__
        trainer.layout.reason = f"{model} gave a token another logprob in a shared row, by {largest:.2g}"
        logger.warning(f"{trainer.layout.reason}. Rows are padded from now on, as in TRL.")


@contextmanager
def memory_errors(trainer: Any) -> Iterator[None]:
    """Say which setting makes a pass smaller, where one does not fit.

    Raises `RunError`, behind which a run saves itself. One rank of several cannot: the others wait for its gradient.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        largest = max(
            (one.num_tokens for each in trainer._buffered_inputs or [] for one in each.get(PASSES, [])), default=0
        )
        if not largest:  # in a rollout, or TRL's layout
            raise
        kind = RunError if trainer.accelerator.num_processes == 1 else torch.OutOfMemoryError
        raise kind(
            f"A forward and backward pass of {largest} tokens does not fit into the memory of the device. Set "
            f"max_tokens_per_pass below {largest} (now {trainer.args.max_tokens_per_pass}); it changes no gradient. "
            f"{str(error).partition('. ')[0]}."
        ) from error
