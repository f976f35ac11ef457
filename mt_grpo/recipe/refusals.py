"""Settings that are refused before a model is loaded: they cannot work, or they would have no effect."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.utils import is_liger_kernel_available
from trl import GRPOConfig

from mt_grpo.base.errors import sentence
from mt_grpo.base.fields import in_range, range_text
from mt_grpo.base.json_types import fits_type
from mt_grpo.generation.connection import hide_password
from mt_grpo.recipe.keys import OF_TRL, check_one_of, default_of, fact_of

logger = logging.getLogger(__name__)

# What changes the distribution that is sampled beside the temperature, and the value that does not.
CUTS = {
    "top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None),
    "presence_penalty": (0.0, None), "frequency_penalty": (0.0, None), "min_tokens": (0, None),
    "logit_bias": ({}, None), "bad_words": ([], None), "allowed_token_ids": (None,),
}  # fmt: skip


def check_staleness(args: GRPOConfig) -> None:
    """Raise `ValueError` if the settings do not allow `max_staleness`."""
    if args.late_groups == "admit" and not args.max_staleness:
        raise ValueError("late_groups: admit has no effect without max_staleness. Set max_staleness: 2, or remove it.")
    if args.refill_groups and args.max_staleness and args.late_groups != "admit":
        raise ValueError(
            f"refill_groups={args.refill_groups} with max_staleness={args.max_staleness} needs late_groups: "
            "admit: with wait, later batches are begun before it is known which of their prompts this one takes."
        )
    if not args.max_staleness:
        return
    if not args.vllm_importance_sampling_correction:
        raise ValueError(
            f"max_staleness={args.max_staleness} trains on rollouts of the weights before earlier steps, which needs "
            "their importance ratio. Set vllm_importance_sampling_correction: true, or remove max_staleness."
        )
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        raise ValueError(
            f"max_staleness={args.max_staleness}: with vllm_importance_sampling_mode: "
            f"{args.vllm_importance_sampling_mode} few rollouts count. Set token_truncate or token_mask."
        )
    if args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps:
        raise ValueError(
            f"max_staleness={args.max_staleness} with several batches of rollouts in one optimizer step "
            f"(steps_per_generation={args.steps_per_generation} x num_iterations={args.num_iterations}, "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}) has nothing to overlap with. Set "
            f"steps_per_generation to a multiple of gradient_accumulation_steps."
        )


def cuts_of(args: GRPOConfig) -> dict[str, Any]:
    """The settings that make the distribution that is sampled from another one than the policy's.

    >>> from types import SimpleNamespace
    >>> cuts_of(SimpleNamespace(top_p=0.8, top_k=0, generation_kwargs={"presence_penalty": 0.5, "min_p": 0.0}))
    {'top_p': 0.8, 'presence_penalty': 0.5}
    """
    given = {key: getattr(args, key, None) for key in CUTS} | (args.generation_kwargs or {})
    return {key: given[key] for key, same in CUTS.items() if given[key] not in same}


def warnings_of(args: GRPOConfig) -> list[str]:
    """Texts for the log of a run's start: which settings bias or weaken its gradient."""
    found, cuts = [], ", ".join(f"{key}={value}" for key, value in cuts_of(args).items())
    if text_of_cuts(args):
        found.append(f"{cuts}: it biases the importance ratio (sampling/token_ratio_mean, docs/recipes.md).")
    elif cuts:
        found.append(f"{cuts}: rollouts are not sampled from the policy that is trained, and nothing corrects it.")
    epsilon = max(args.epsilon, args.epsilon_high or 0.0)
    if args.importance_sampling_level == "sequence" and args.loss_type in CLIPPED_LOSSES and epsilon > 0.01:
        found.append(
            f"epsilon={epsilon:g} with importance_sampling_level: sequence: a sequence's ratio is a mean over its "
            "tokens, which hardly ever moves so far, so nothing is clipped. GSPO uses epsilon: 3e-4."
        )
    return found


def text_of_cuts(args: GRPOConfig) -> str:
    """Sampling settings such as top_p that bias the importance ratio, as text; empty without its correction."""
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return ""
    return ", ".join(f"{key}={value}" for key, value in cuts_of(args).items())


def check_old_logps(args: GRPOConfig) -> None:
    """Raise `ValueError` where the loss cannot clip around the sampled logprobs, or a setting has no effect then.

    The trainer's logprobs are of the whole vocabulary. Those of a distribution that was cut are larger: at unchanged
    weights the ratio is the share that was kept, and what has a negative advantage may be clipped from the first step.
    """
    if args.old_logps != "sampled":
        return
    if not args.vllm_importance_sampling_correction:
        raise ValueError("old_logps: sampled needs vllm_importance_sampling_correction: true. Set it, or remove both.")
    for key, value in cuts_of(args).items():
        raise ValueError(
            f"old_logps: sampled clips around the sampled logprobs, which {key}={value!r} makes other than those of "
            f"the policy. Remove {key}, or set old_logps: policy."
        )
    for key in ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"):
        if args.vllm_importance_sampling_mode.endswith("truncate") and getattr(args, key) != default_of(
            key, (type(args),)
        ):
            raise ValueError(
                f"{key}={getattr(args, key)} has no effect with old_logps: sampled and vllm_importance_sampling_mode: "
                f"{args.vllm_importance_sampling_mode}: no ratio is left to be cut. Remove it, or use a _mask mode; "
                "epsilon and delta bound the ratio of the loss."
            )


def check_passes(args: GRPOConfig) -> None:
    """Raise `ValueError` where `max_tokens_per_pass` has no effect, or a record would not fit."""
    limit = args.max_tokens_per_pass
    if limit is None:
        return
    if not args.share_prompts:
        raise ValueError(
            f"max_tokens_per_pass={limit} has no effect with share_prompts: false, whose passes have "
            "per_device_train_batch_size rows. Remove one of them."
        )
    if args.torch_compile:
        raise ValueError(
            f"max_tokens_per_pass={limit} has no effect with torch_compile: true, whose passes have "
            "per_device_train_batch_size rows of one length. Remove one of them."
        )
    for key, value in {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}.items():
        if getattr(args, key) != value:
            raise ValueError(
                f"max_tokens_per_pass={limit} has no effect with {key}={getattr(args, key)}, which compares the "
                "tokens of a micro-batch: it is one pass. Remove one of them. A smaller "
                "per_device_train_batch_size makes it smaller."
            )
    if limit <= args.max_completion_length:
        raise ValueError(
            f"max_tokens_per_pass={limit}: a single conversation can have max_completion_length="
            f"{args.max_completion_length} tokens after its prompt, and must fit into a pass. Expected more than this "
            "and the longest prompt."
        )


# TRL settings that have no effect, or another meaning, in a multi-turn rollout. They are refused, so that every line
# of a recipe has its effect. Key -> the reason, and what to do.
REFUSED_KEYS = {
    "reward_weights": "turn and outcome rewards are weighted apart: use turn_ and outcome_reward_weights",
    "max_tool_calling_iterations": "this trainer runs its own conversations: use max_env_steps",
    "multi_objective_aggregation": "credit_assignment says how rewards become advantages: remove this key",
    "vllm_structured_outputs_regex": "one pattern cannot fit tool turns and answer turns alike: remove this key",
    "remove_unused_columns": "rewards, tools and environments read a row's columns: remove this key",
    "log_multimodal": "images are kept next to the rollout log: remove this key",
    "dataset_streaming": "prompts are checked before training starts, which needs them at hand: use dataset_size",
    "neftune_noise_alpha": "its noise is drawn anew in the loss, which takes it for the policy's: remove this key",
    "dataloader_in_order": "batches in the order of their readiness would put several prompts into one group: remove "
    "this key",
    "ignore_bias_buffers": "TRL keeps it as a debug switch that GRPOTrainer does not read: remove this key",
    **dict.fromkeys(
        ("label_smoothing_factor", "label_names", "average_tokens_across_devices", "prediction_loss_only",
         "eval_do_concat_batches", "include_for_metrics", "batch_eval_metrics"),
        "rewards take the place of labels here, and nothing reads it: remove this key",
    ),
    **dict.fromkeys(
        ("train_sampling_strategy", "length_column_name", "data_seed"),
        "TRL's own sampler keeps the rollouts of a prompt together and reads only `seed`: remove this key",
    ),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "local_rank"),
        "nothing reads it, training always runs and eval_strategy says when to evaluate: remove this key",
    ),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        "quantised policies are not supported either: remove this key",
    ),
    "enable_jit_checkpoint": "SIGTERM saves the run by itself, between two optimizer steps: remove this key",
    "load_in_8bit": "the weights of a quantised policy cannot be pushed to a server: train a LoRA on bf16 weights",
    "load_in_4bit": "the weights of a quantised policy cannot be pushed to a server: train a LoRA on bf16 weights",
}  # fmt: skip
SET_BY_TRANSFORMERS = ("do_eval", "local_rank")  # transformers changes them: only a recipe's line is refused


def check_supported(settings: Any) -> None:
    """Raise `ValueError` for a setting of `REFUSED_KEYS` with another value than its default."""
    for key, reason in REFUSED_KEYS.items():
        value = getattr(settings, key, None)
        if key in vars(settings).keys() - {*SET_BY_TRANSFORMERS} and value != default_of(key, (type(settings),)):
            raise ValueError(f"{key}={value!r} is not supported: {reason}.")


CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # losses with PPO's clipped ratio
# Keys that are read only beside another one: (what must hold, in words, whether it holds, the keys).
READ_BESIDE: tuple[tuple[str, Callable[[GRPOConfig], bool], tuple[str, ...]], ...] = (
    (f"a loss_type of {', '.join(CLIPPED_LOSSES)}", lambda args: args.loss_type in CLIPPED_LOSSES, ("delta",)),
    (f"a loss_type of {', '.join(CLIPPED_LOSSES)}, cispo", lambda args: args.loss_type in (*CLIPPED_LOSSES, "cispo"),
     ("epsilon", "epsilon_high")),
    ("a clipped ratio (cispo only reads epsilon_high if it is set)",
     lambda args: args.loss_type != "cispo" or args.epsilon_high is None, ("epsilon",)),
    ("loss_type: sapo", lambda args: args.loss_type == "sapo", ("sapo_temperature_neg", "sapo_temperature_pos")),
    ("loss_type: vespo", lambda args: args.loss_type == "vespo",
     ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
    ("sync_ref_model: true", lambda args: args.sync_ref_model, ("ref_model_sync_steps", "ref_model_mixup_alpha")),
    ("beta above 0", lambda args: args.beta != 0.0, ("use_bias_correction_kl",)),
    ("use_adaptive_entropy: true", lambda args: args.use_adaptive_entropy,
     ("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta")),
    ("vllm_importance_sampling_correction: true", lambda args: args.vllm_importance_sampling_correction,
     ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")),  # recipes have a mode
)  # fmt: skip


def backend_of(args: GRPOConfig) -> str:
    """The backend that samples the tokens: `server`, `colocate` or `transformers`."""
    return args.vllm_mode if args.use_vllm else "transformers"


def check_read_beside(args: GRPOConfig) -> None:
    """Raise `ValueError` for a key that has no effect since another one is not set."""
    for needed, holds, keys in READ_BESIDE:
        for key in () if holds(args) else keys:
            if (value := getattr(args, key)) != default_of(key, (type(args),)):
                raise ValueError(f"{key}={value!r} has no effect without {needed}. Set that, or remove {key}.")


def check_order_of_steps(args: GRPOConfig) -> None:
    """Raise `ValueError` where steps would be others than is said, or would train on other rollouts."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.endswith("layerwise") or optimizer in ("lomo", "adalomo"):
        raise ValueError(
            f"optim={optimizer!r} steps inside each backward pass, and an optimizer step here has several of them "
            "(max_tokens_per_pass, gradient_accumulation_steps). Use another optimizer."
        )
    if optimizer.startswith("schedule_free") and args.use_vllm and args.eval_strategy != "no":
        raise ValueError(
            f"optim={optimizer!r} with use_vllm and an eval_strategy: an evaluation pushes averaged weights, and the "
            "step behind it would sample from them and not from those that it trains. Set eval_strategy: no, and "
            "evaluate checkpoints by scripts/evaluate.py, or use another optimizer."
        )
    if args.accelerator_config.split_batches:
        raise ValueError(
            "accelerator_config with split_batches: each process would get a part of a batch of rollouts at a time, "
            "and some prompts would never be trained. Remove it."
        )


def check_batch_arithmetic(args: GRPOConfig) -> None:
    """Raise `ValueError` with the nearest valid values if `num_generations` does not divide the batch."""
    if args.num_generations is None:
        raise ValueError("num_generations is None. Expected the number of rollouts per prompt, such as 8.")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    per_step = args.per_device_train_batch_size * world_size
    steps = args.steps_per_generation or args.gradient_accumulation_steps
    batch = args.generation_batch_size or per_step * steps
    if batch % args.num_generations:
        divisors = [g for g in range(2, batch + 1) if batch % g == 0]
        nearest = sorted(divisors, key=lambda g: abs(g - args.num_generations))[:2]
        sizes = [s for s in range(1, 10_000) if s * world_size * steps % args.num_generations == 0]
        size = min(sizes, key=lambda s: abs(s - args.per_device_train_batch_size), default=None)
        raise ValueError(
            f"num_generations={args.num_generations} does not divide the {batch} rollouts of a batch "
            f"({args.per_device_train_batch_size} per device x {world_size} processes x {steps} steps). "
            f"Expected whole groups. Set num_generations to {' or '.join(map(str, nearest)) or 'a divisor'}"
            + (f", or per_device_train_batch_size to {size}." if size and not args.generation_batch_size else ".")
        )


def check_scheduler(args: GRPOConfig) -> None:
    """Raise `ValueError` for settings that no learning rate schedule can be made from. `Trainer` makes it late."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, 0, 1, scheduler_specific_kwargs=args.lr_scheduler_kwargs)
    except TypeError as error:
        raise ValueError(
            f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r} do not fit lr_scheduler_type="
            f"{str(args.lr_scheduler_type.value)!r}: {sentence(error)} Expected the arguments of that schedule in "
            "transformers."
        ) from error


UNREAD_CREDIT = {  # key -> what the estimator is that does not read it
    "turn_discount": "which counts no turn for another",
    "outcome_in_return": "which has no return",
    "state_baseline": "which compares no states",
    "turn_advantage_coef": "which has no turn's own term",
}


def check_config(args: GRPOConfig, estimators: dict[str, Any]) -> None:
    """Raise `ValueError` (got, expected, what to do) for settings that cannot work together."""
    kinds = (type(args),)
    check_one_of(args)
    check_supported(args)
    backend = backend_of(args)
    readers = (None, backend) if backend == "transformers" else (None, backend, "vllm")
    for key in (each.name for each in dataclasses.fields(args) if fact_of(each, "backend") not in readers):
        if getattr(args, key) != default_of(key, kinds):
            raise ValueError(
                f"{key}={hide_password(repr(getattr(args, key)))} has no effect with the {backend} backend "
                f"(use_vllm={args.use_vllm}, vllm_mode={args.vllm_mode}). Remove it, or choose the backend that reads "
                "it."
            )
    if backend == "colocate" and args.vllm_tensor_parallel_size > 1:
        raise ValueError(
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}: a colocated engine over several GPUs needs "
            "the same number of prompts on each, which conversations of unequal length do not have. Use a vLLM server."
        )
    if args.use_transformers_continuous_batching and (args.bf16 or args.fp16):
        raise ValueError(
            "use_transformers_continuous_batching with bf16 or fp16: TRL casts the policy's own weights for it, and "
            "nothing casts them back, so that the run would train weights of half precision from its first rollout "
            "on. Set bf16: false (and dtype: bfloat16 if that is what you want), or remove the key."
        )
    if (
        (args.loss_type, backend) == ("vespo", "server")
        and args.vllm_importance_sampling_correction
        and args.vllm_importance_sampling_mode not in ("token_truncate", "token_mask")
    ):  # TRL checks this for an engine of its own alone
        raise ValueError(
            f"loss_type='vespo' with vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r}: it weighs "
            "the ratios of tokens. Set token_truncate or token_mask."
        )
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError(
            "use_liger_kernel needs a package that is not installed. Run `pip install 'liger-kernel'`, or remove it."
        )
    check_order_of_steps(args)
    check_read_beside(args)
    check_generation_kwargs(args, backend)
    check_report_to(args.report_to)
    check_save_points(args)
    check_scheduler(args)
    if args.max_completion_length is None:
        raise ValueError("max_completion_length is None. Expected the token budget of a conversation, such as 1024.")
    check_staleness(args)
    is_default = args.old_logps is None and args.max_staleness > 2
    try:
        args.old_logps = "sampled" if is_default else args.old_logps
        if is_default and (args.loss_type not in CLIPPED_LOSSES or args.importance_sampling_level == "sequence"):
            raise ValueError(f"loss_type: {args.loss_type}, per {args.importance_sampling_level}, clips no token.")
        check_old_logps(args)
    except ValueError as error:
        if not is_default:
            raise
        args.old_logps = "policy"
        logger.warning(f"max_staleness={args.max_staleness} is trained with old_logps: policy, since: {error}")
    if args.loss_type == "cispo" and (args.epsilon if args.epsilon_high is None else args.epsilon_high) < 1:
        raise ValueError(
            "loss_type='cispo' caps the ratio itself at epsilon_high (without it at epsilon="
            f"{args.epsilon}), got {args.epsilon_high}: below 1 every gradient is multiplied by it. Set it to 5."
        )
    check_passes(args)
    estimator = estimators[args.credit_assignment]
    for key, why in UNREAD_CREDIT.items():
        if (value := getattr(args, key)) != default_of(key, kinds) and key not in estimator.reads:
            readers = " or ".join(name for name, other in estimators.items() if key in other.reads)
            raise ValueError(
                f"{key}={value} has no effect with credit_assignment={args.credit_assignment!r}, {why}. Remove it, or "
                f"use {readers}."
            )
    if estimator.per_turn:
        # Both settings decide per sequence, by one advantage. Advantages per token would make them decide per token.
        if args.off_policy_mask_threshold is not None:
            raise ValueError(
                f"off_policy_mask_threshold masks whole sequences by the sign of their advantage, which "
                f"credit_assignment={args.credit_assignment!r} gives per turn. Remove it, or use outcome or merged."
            )
        if args.loss_type == "vespo":
            raise ValueError(
                f"loss_type='vespo' weighs whole sequences by the sign of their advantage, which "
                f"credit_assignment={args.credit_assignment!r} gives per turn. Use another loss, or outcome or merged."
            )


def check_ddp_timeout(args: GRPOConfig, num_processes: int) -> None:
    """Raise `ValueError` if a rank may wait for rewards or the server as long as `ddp_timeout` or longer.

    The other ranks would then stop with an error, although that rank still waits within its own time limit.
    """
    # The longest wait: a first request gets no answer, the server is retried, and the last request gets no answer.
    answer = 2 * args.vllm_request_timeout + args.vllm_server_timeout
    waits = {"reward_timeout": args.reward_timeout}
    waits |= {"2 * vllm_request_timeout + vllm_server_timeout": answer} if backend_of(args) == "server" else {}
    for what, seconds in waits.items():
        if num_processes > 1 and seconds >= args.ddp_timeout:
            raise ValueError(
                f"{what} = {seconds:g} s: the other ranks stop waiting for a rank after "
                f"ddp_timeout={args.ddp_timeout} s. Set ddp_timeout above it."
            )


def check_sharding(args: GRPOConfig) -> None:
    """Raise `ValueError` where accelerate 1.15 would train otherwise than it was launched, without a word."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != args.world_size:  # each would take itself for the only one
        raise ValueError(
            f"{launched} processes were launched, and accelerate finds no way between them: it counts "
            f"{args.world_size}. Set use_cpu: true on a machine without GPUs."
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in ("bf16", "fp16") and not (args.bf16 or args.fp16):
        raise ValueError(
            f"bf16: false, and accelerate was launched with mixed precision {precision}, which it would take. Launch "
            "with --mixed_precision no, or set bf16: true."
        )
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or args.fsdp
    if asked and args.device.type == "cpu":
        raise ValueError(
            "FSDP is asked for, but accelerate shards nothing on a CPU: every process would hold all weights. Launch "
            "with hf_recipes/accelerate/cpu.yaml, or remove fsdp, or set use_cpu: false on a machine with GPUs."
        )


def check_save_points(args: GRPOConfig) -> None:
    """Raise `ValueError` if a checkpoint would be saved between two optimizer steps on the same rollouts.

    A resumed run samples new rollouts. So it continues exactly only from between two batches of rollouts. `eval_steps`
    is checked too: a run that is interrupted in an evaluation saves a checkpoint, and so does `save_strategy: best`.
    """
    per_batch = args.steps_per_generation * args.num_iterations  # forward passes that one batch of rollouts serves
    every = per_batch // math.gcd(per_batch, args.gradient_accumulation_steps)
    for key, strategy in (("save_steps", args.save_strategy), ("eval_steps", args.eval_strategy)):
        given = getattr(args, key)
        if strategy != "steps" or not given or every == 1:
            continue
        if per_batch % args.gradient_accumulation_steps:  # an epoch may end with a shorter step
            raise ValueError(
                f"{key}={given} with gradient_accumulation_steps={args.gradient_accumulation_steps} and batches of "
                f"rollouts of {per_batch} forward passes (steps_per_generation x num_iterations): a step behind the "
                f"first epoch may end in the middle of a batch. Set gradient_accumulation_steps to a divisor or a "
                f"multiple of {per_batch}, or {'save' if key == 'save_steps' else 'evaluate'} by epochs."
            )
        if given < 1 and args.max_steps <= 0:
            raise ValueError(
                f"{key}={given}, a share of all steps, needs max_steps. Set {key} to a multiple of {every}."
            )
        steps = given if given >= 1 else math.ceil(args.max_steps * given)
        if steps % every:
            below = int(steps // every * every)
            what = "save" if key == "save_steps" else "evaluate, and save where it is interrupted,"
            raise ValueError(
                f"{key}={given} would {what} in the middle of a batch of rollouts, from where a run cannot "
                f"be resumed exactly: a batch lasts {every} optimizer steps "
                f"(steps_per_generation={args.steps_per_generation} x num_iterations={args.num_iterations} / "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}). "
                f"Set {key} to {f'{below} or ' if below else ''}{below + every}"
                + (" (without it, logging_steps counts)." if key == "eval_steps" else ".")
            )


def check_generation_kwargs(args: GRPOConfig, backend: str) -> None:
    """Raise `ValueError` for keys that the backend does not know, or that the conversation sets itself."""
    ours = {"n", "max_tokens", "max_new_tokens", "num_return_sequences", "stop", "prompt", "model", "logprobs",
            "stream", "seed", "stop_token_ids", "eos_token_id", "return_token_ids",
            "include_stop_str_in_output"}  # fmt: skip
    known = {"presence_penalty", "frequency_penalty", "min_tokens", "bad_words", "logit_bias", "allowed_token_ids",
             "temperature", "top_p", "top_k", "min_p", "repetition_penalty"}  # fmt: skip
    for key in args.chat_template_kwargs or {}:
        if not isinstance(key, str) or key in ("conversation", "tokenize", "add_generation_prompt", "return_dict"):
            raise ValueError(f"chat_template_kwargs: {key!r} is set by the conversation, or no text. Remove it.")
    for key, value in (args.generation_kwargs or {}).items():
        if key in ours:
            raise ValueError(f"generation_kwargs: {key!r} is set per turn by the conversation. Remove it.")
        if key not in known or (backend == "transformers" and not hasattr(GenerationConfig(), key)):
            raise ValueError(
                f"generation_kwargs: {key!r} is not known to the {backend} backend, or would sample from another "
                "distribution than the policy's. Remove it."
            )
        interval = OF_TRL["within"].get(key)
        if interval and not (fits_type(value, float) and in_range(value, interval)):
            raise ValueError(f"generation_kwargs: {key}={value!r}, expected {range_text(interval)}.")
        if key == "temperature" and value != args.temperature:
            raise ValueError(
                f"generation_kwargs: temperature={value!r} samples, and the loss computes at "
                f"temperature={args.temperature!r}: its ratios would be of another distribution. Set temperature: "
                f"{value!r}, and remove it from generation_kwargs."
            )


def check_report_to(names: list[str]) -> None:
    """Raise `ValueError` for a logger that transformers does not know, or whose package is not installed."""
    available = get_available_reporting_integrations()
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(f"report_to: {name!r} is not known. Expected none, or some of: {known}.")
        if name not in (*available, "azure_ml", "flyte"):  # transformers may not list these two
            raise ValueError(
                f"report_to: the package of {name!r} is not installed. Run `pip install {name}`, or remove it."
            )
