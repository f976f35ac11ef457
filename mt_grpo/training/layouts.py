"""How a run's rows are laid out: whether prompts are shared, why not, the proof of it, passes that do not fit."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from peft import PeftModel
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from mt_grpo.base.errors import RunError, error_line
from mt_grpo.generation.weights import off_by_rounding
from mt_grpo.images.pictures import Picture, held_by
from mt_grpo.training.batch import FURTHER_RECORDS, compares_tokens, most_of_ranks
from mt_grpo.training.pass_metrics import PassMetrics
from mt_grpo.training.passes import Pass, into_passes, pass_of_two, rows_of, rows_of_ids, rows_that_share, window_of
from mt_grpo.training.shared_prompts import NAME, SharedRow, forward_inputs, take_shared_rows

logger = logging.getLogger(__name__)

# Methods that a subclass may replace. A copy of the script that edits `compute_loss` sees the passes there.
LOSS_METHODS = ("compute_loss", "_prepare_inputs", "_get_per_token_logps_and_entropies")
LARGEST_DIFFERENCE = 1e-3  # of a logprob in float32; in half precision it may be 4 times that of rounding alone


def why_not_in_model(model: Any) -> str | None:
    """Why a model would compute other hidden states in a shared row, which holds many conversations; else None.

    These are reasons that the proof's two rows may not show: longer windows, dropout, images that they lack, and
    layers that mix tokens, whose weights may still be zero.
    """
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    config, reads = model.config.get_text_config(), model
    if config is not model.config:  # what reads the pixels sees each picture by itself
        reads = getattr(model.base_model, "language_model", None)
        if reads is None or not hasattr(model.base_model, "get_rope_index"):
            return "it reads images, and its position ids are not those of Qwen's models"
    layer_types = getattr(config, "layer_types", None)
    if kinds := set(layer_types or ["full_attention"]) - {"full_attention"}:
        return f"it has layers of type {min(kinds)}"
    if layer_types is None and getattr(config, "sliding_window", None):
        return f"it has a sliding window of {config.sliding_window} tokens"
    if found := dropout_of(model):
        return f"{found}, which would be drawn once for all rows that share a prompt"
    if config._attn_implementation not in ("sdpa", NAME):
        return f"its attention is {config._attn_implementation!r}. Rows that share a prompt need sdpa"
    if not getattr(model, "_supports_attention_backend", False) or config.is_encoder_decoder:
        return f"{type(model).__name__} does not support custom attention functions"
    for name, module in reads.named_modules():
        kind = type(module).__name__
        if hasattr(module, "sinks") or isinstance(module, torch.nn.modules.conv._ConvNd) or "mamba" in kind.lower():
            return f"it has a layer that mixes tokens otherwise than by attention ({name}: {kind})"
    return None


def dropout_of(model: torch.nn.Module) -> str | None:
    """The first dropout of a model in words: the module's name, or `lora_dropout`, and its rate."""
    for name, module in model.named_modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        share = (module.p if is_dropout else 0.0) or getattr(module, "attention_dropout", 0.0)
        if isinstance(share, float) and share > 0:
            return f"{'lora_dropout' if 'lora' in name else name} has a dropout of {share:g}"
    return None


def kind_of(trainer: Any, own_methods: type) -> tuple[str, str]:
    """The kind of a run's layout, and why it is not `shared`. `own_methods` is the class whose loss reads passes."""
    cls, args = type(trainer), trainer.args
    replaced = [name for name in LOSS_METHODS if getattr(cls, name) is not getattr(own_methods, name)]
    replaced += ["_compute_loss"] if cls._compute_loss is not GRPOTrainer._compute_loss else []
    model, reference = models_of(trainer)
    if not args.share_prompts:
        return "trl", "share_prompts: false"
    if replaced:
        return "trl", f"{cls.__name__} has a {replaced[-1]} of its own"
    if trainer.aux_loss_enabled:
        return "trl", "the router's loss compares tokens of a micro-batch (router_aux_loss_coef: 0.0 leaves it out)"
    if args.torch_compile:
        return "trl", "torch_compile is set, and passes have different shapes"
    for key in ("pad_to_multiple_of", "use_transformers_continuous_batching"):  # this one samples by sdpa alone
        if getattr(args, key):
            return "padded", f"{key} is set"
    reason = why_not_in_model(model) or (reference is not None and why_not_in_model(reference))
    return ("padded", reason) if reason else ("shared", "")


def check_model(model: Any, aux_loss_enabled: bool) -> None:
    """Raise `ValueError` for a model whose loss TRL cannot compute, or computes otherwise than a server samples."""
    config = model.config.get_text_config()
    if aux_loss_enabled and not hasattr(config, "num_experts"):
        raise ValueError(f"TRL has no router loss for {config.model_type}. Set router_aux_loss_coef: 0.0.")
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        raise ValueError(f"sdpa leaves out the softcap of {config.model_type}. Set attn_implementation: eager.")


def leave_out_padding(model: Any) -> None:
    """Give a model positions that leave out padding on the left, as in sampling: learned ones differ, and scales."""

    def with_positions(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if kwargs.get("position_ids") is None and ids is not None and mask is not None and mask.shape == ids.shape:
            kwargs["position_ids"] = (mask.long().cumsum(1) - 1).clamp_(min=0)
        return args, kwargs

    model = model.get_base_model() if isinstance(model, PeftModel) else model
    takes_them = "position_ids" in inspect.signature(type(model).forward).parameters
    if takes_them and model.config.get_text_config() is model.config:  # M-RoPE makes its own
        model.register_forward_pre_hook(with_positions, with_kwargs=True)


def models_of(trainer: Any) -> list[Any]:
    """The policy and the reference model (or None), without DeepSpeed's wrappers."""
    unwrap = trainer.accelerator.unwrap_model
    return [model if model is None else unwrap(model) for model in (trainer.model, trainer.ref_model)]


def logps_of_rows(
    model: Any, rows: list[SharedRow], compute_entropy: bool, accelerator: Any
) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """Logprobs and entropies (B, C) of the batch that these rows are of, and no router loss: as TRL's method."""
    logps, entropies = 0, 0
    for row in rows:
        with accelerator.autocast():
            output = model(**forward_inputs(row))
        logps = logps + row.spread(output.log_probs)
        entropies = entropies + row.spread(output.entropy) if compute_entropy else None
        if not torch.is_grad_enabled():
            row.forget_masks()
    return logps, entropies, None


class Layout:
    """How a run's rows are laid out, and the pass whose loss is computed.

    Attributes:
        kind: `shared`: each prompt once. `padded`: each row with its prompt, sorted by length, in passes by tokens.
            `trl`: TRL's micro-batches. `reason` says why it is not `shared`.
        proof: The largest difference of a logprob from that of TRL's rows; None before it is proven.
        waits: Whether rows are `padded` only until a batch has two rows of one prompt, which prove `shared`.
        pictures: The images of the trained batch, which its tensors do not hold.
    """

    def __init__(self, trainer: Any, own_methods: type):
        self.trainer = trainer
        # PyTorch prefers cuDNN's attention on Hopper cards since 2.11. With a mask and a number of tokens that is 64
        # above a multiple of 128, its gradient may be NaN if a query reads nothing, such as padding on the left.
        torch.backends.cuda.enable_cudnn_sdp(False)
        for model in filter(None, models_of(trainer)):
            check_model(model, trainer.aux_loss_enabled)
            leave_out_padding(model)
        self.kind, self.reason = kind_of(trainer, own_methods)
        if self.kind == "shared":
            take_shared_rows(*models_of(trainer))
        if (found := dropout_of(models_of(trainer)[0])) and trainer.accelerator.is_main_process:
            logger.warning(
                f"{found}. The loss draws it anew, so that its logprobs are not those of sampling. Set "
                "disable_dropout: true, lora_dropout: 0.0, or attention_dropout: 0.0 in config.json."
            )
        self.proof: float | None = None
        self.waits = False
        self.current: Pass | None = None
        self.begun: Pass | None = None
        self.metrics = PassMetrics()
        self.pictures: list[Picture] = []

    def in_passes(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """TRL's micro-batches of one batch of rollouts, as many of ours. Collective."""
        training = self.trainer.model.training
        if training:  # an evaluation between two steps has a batch of its own
            of_further = [row for each in micro_batches for rows in each.get(FURTHER_RECORDS, ()) for row in rows]
            held = [*micro_batches, *of_further]
            self.pictures = held_by(each[name] for each in held for name in ("prompt_ids", "completion_ids"))
        if self.kind == "trl":
            return micro_batches
        if self.proof is None:
            self.prove([row for each in micro_batches for rows in rows_of(each) for row in rows])
        window = window_of(self.trainer.args, self.trainer.loss_type) if training else 1
        steps = [micro_batches[k : k + window] for k in range(0, len(micro_batches), window)]
        return [each for step in steps for each in into_passes(self.trainer, step)]

    def shared_rows(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int, size: int | None, others: dict
    ) -> list[SharedRow]:
        """The rows of TRL's forward pass as rows that share prompts; none if they are padded. Collective.

        `input_ids` and `attention_mask` are (M, P + C), with C = `width`. `size` is TRL's rows per pass, None for one.
        """
        if self.kind != "shared":
            return []
        unread = {key for key, value in others.items() if value is not None} - {"compute_aux_loss"}  # may be False
        if unread:  # of a later TRL, which may give more than images
            raise TypeError(f"Rows that share prompts do not read TRL's {unread}. Set share_prompts: false.")
        if self.current is not None and self.current.shared is not None:
            return [self.current.shared]
        rows = rows_of_ids(self.trainer, input_ids, attention_mask, width)  # not of a pass of ours
        self.prove(rows)
        return rows_that_share(self.trainer, rows, width, input_ids.device, size) if self.kind == "shared" else []

    def note_logps(self, found: tuple) -> None:
        """Set the old logprobs and the importance ratio of the current pass, and count its tokens for the metrics."""
        logps, entropies, _ = found
        if self.current is not None and self.current.is_first:
            self.metrics.set_ratio(self.current, logps.detach(), self.trainer)
        if self.current is not None and self.trainer.model.training and entropies is not None:
            trained = self.current["completion_mask"] * self.current["tool_mask"] > 0
            self.metrics.depth.add(self.current, trained, entropy=entropies.detach())
        if self.current is not None and self.current.is_weighted:
            self.metrics.count_tokens(self.current, logps.detach(), entropies.detach(), self.trainer)

    def forget_masks(self) -> None:
        """Free the masks after the backward pass: they are as large as the row's attention."""
        if self.begun is not None and self.begun.shared is not None:
            self.begun.shared.forget_masks()

    @contextmanager
    def of(self, inputs: Pass) -> Iterator[None]:
        """Within it the loss of a pass is computed, with the pass's share of the micro-batch's policy loss and KL."""
        # INVARIANT: TRL's policy loss is linear in the advantages, for a positive factor, and its KL in `beta`.
        trainer, beta, advantages = self.trainer, self.trainer.beta, inputs["advantages"]
        scale = max(inputs.scale, 1e-30)  # at 0 one rank alone would log no KL
        self.current, self.begun = inputs, inputs if inputs.num_tokens else None
        inputs["advantages"], trainer.beta = advantages * scale, beta * scale
        try:
            with self.metrics.of(trainer, inputs):
                yield
        finally:
            inputs["advantages"], trainer.beta, self.current = advantages, beta, None

    def __str__(self) -> str:
        """Describe the layout in words, for logs."""
        args = self.trainer.args
        if self.kind == "trl":
            return f"TRL's rows and passes, since {self.reason}"
        text = "each prompt is computed once, without padding"
        if self.kind == "padded":
            text = f"each with its prompt, sorted by length, since {self.reason}"
        if compares_tokens(args):
            return f"{text}; a pass is a micro-batch"
        if args.max_tokens_per_pass:
            return f"{text}; a pass has at most {args.max_tokens_per_pass} tokens"
        return f"{text}; a pass has at most the tokens of {args.per_device_train_batch_size} longest conversations"

    # -- the proof of it --

    def prove(self, rows: list) -> None:
        """`compare` two rows of one prompt, before the first pass that reads shared rows. Collective.

        If no rank has two rows of one prompt, nothing is proven, and each row has its prompt until the next batch.
        """
        if self.proof is not None or not (self.kind == "shared" or self.waits):
            return
        compared = pass_of_two(rows, self.trainer.args, self.trainer.pad_to_multiple_of or 1)
        waits = most_of_ranks(len(compared["prompt_ids"]), self.trainer.accelerator) < 2
        if waits and not self.waits:
            self.reason = "no prompt has two rows yet that prove shared rows"
            logger.warning("Each row is computed with its prompt until a batch has two rows of one prompt.")
        self.kind, self.waits = "padded" if waits else "shared", waits
        if not waits and (problem := self.compare(compared)):
            self.kind, self.reason = "padded", f"{type(self.trainer.model).__name__} {problem}"
            logger.warning(f"{self.reason}. From now on each row is computed with its own prompt.")

    def compare(self, compared: Pass) -> str:
        """Compare shared rows with TRL's, and say how they differ; empty if they do not. Collective.

        Float32 weights are compared without autocast, in whose rounding a small difference would not show, then with.
        """
        trainer, accelerator, model = self.trainer, self.trainer.accelerator, self.trainer.model
        ids, masks = (torch.cat([compared[f"prompt_{k}"], compared[f"completion_{k}"]], 1) for k in ("ids", "mask"))
        trained = compared["completion_mask"] * compared["tool_mask"] > 0

        def logprobs(kind: str) -> torch.Tensor:
            self.kind = kind  # which the call reads from the layout
            with torch.no_grad(), disable_gradient_checkpointing(model, trainer.args.gradient_checkpointing_kwargs):
                return trainer._get_per_token_logps_and_entropies(model, ids, masks, trained.shape[1])[0].float()

        def largest(difference: torch.Tensor) -> float:
            found = difference.abs()[trained].amax()[None] if trained.any() else difference.new_zeros(1)
            return accelerator.gather(found).max().item()

        def problem(exact: bool) -> str:
            ordinary, allowed, failed = logprobs("padded"), LARGEST_DIFFERENCE, ""
            if not exact:
                with off_by_rounding(accelerator.unwrap_model(model), 2**-8):
                    allowed = 4 * max(largest(logprobs("padded") - ordinary) for _ in range(3))
            try:
                difference = logprobs("shared") - ordinary
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of a model's code that takes the layout for something else
                failed = f"failed with a shared row ({error_line(error)})"
                difference = torch.full_like(ordinary, torch.inf)
            self.proof = max(largest(difference), self.proof)  # in this order NaN stays
            differs = failed or f"computed a different logprob in a shared row, by {self.proof:.2g}"
            return "" if self.proof <= allowed else differs

        half = accelerator.mixed_precision != "no"  # sharded weights are then gathered in half precision, too
        exact = next(model.parameters()).dtype in (torch.float32, torch.float64) and not (half and trainer._is_sharded)
        exact = exact and torch.backends.cuda.matmul.fp32_precision != "tf32"
        self.proof, self.current = 0.0, compared  # a proof is there: the calls below ask for none
        try:
            with without_autocast(trainer) if exact else nullcontext():
                found = problem(exact)
            return found or (problem(False) if exact and half else "")
        except BaseException:
            self.proof = None
            raise
        finally:
            self.kind, self.current = "shared", None
            compared.shared.forget_masks()


@contextmanager
def without_autocast(trainer: Any) -> Iterator[None]:
    """Context manager in which the policy computes in the precision of its weights, whatever accelerate made of it."""
    model, accelerator = trainer.model, trainer.accelerator
    handler, wrapped = accelerator.autocast_handler, vars(model).get("forward")
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    if "_original_forward" in vars(model):  # by `Accelerator.prepare`
        model.forward = model._original_forward
    try:
        yield
    finally:
        accelerator.autocast_handler = handler
        if "_original_forward" in vars(model):
            model.forward = wrapped


@contextmanager
def memory_errors(trainer: Any) -> Iterator[None]:
    """Context manager that says which setting makes a pass smaller, if one runs out of memory.

    Raises `RunError`, after which a run saves itself. One rank of several cannot: the others wait for its gradient.
    """
    layout = trainer.layout
    layout.forget_masks()
    layout.begun = None
    try:
        yield
    except torch.OutOfMemoryError as error:
        if (begun := layout.begun) is None:  # in a rollout, or TRL's layout
            raise
        kind = RunError if trainer.accelerator.num_processes == 1 else torch.OutOfMemoryError
        raise kind(
            f"A forward and backward pass of {begun.num_tokens} tokens does not fit into the device's memory. Set "
            f"max_tokens_per_pass below {begun.num_tokens}, which changes no gradient. If a single conversation does "
            "not fit, set gradient_checkpointing: true or lower max_completion_length; with entropy_coef or "
            f"top_entropy_quantile lower per_device_train_batch_size. {str(error).partition('. ')[0]}."
        ) from error
