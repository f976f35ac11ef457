"""Settings that are refused before a model is loaded, because they would train something else than they say."""

from __future__ import annotations

import logging
import os
from typing import Any

from transformers import GenerationConfig
from trl import GRPOConfig

from mt_grpo.recipe.keys import default_of

logger = logging.getLogger(__name__)

# What changes the distribution that is sampled beside the temperature, and the value that does not.
CUTS = {
    "top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None),
    "presence_penalty": (0.0, None), "frequency_penalty": (0.0, None), "min_tokens": (0, None),
    "logit_bias": ({}, None), "bad_words": ([], None), "allowed_token_ids": (None,),
}  # fmt: skip
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # losses with PPO's clipped ratio
CREDIT_KEYS = ("turn_advantage_coef", "turn_discount", "outcome_in_return", "state_baseline")


def backend_of(args: GRPOConfig) -> str:
    """The backend that samples the tokens: `server`, `colocate` or `transformers`."""
    return args.vllm_mode if args.use_vllm else "transformers"


def cuts_of(args: GRPOConfig) -> dict[str, Any]:
    """The settings that make the distribution that is sampled from another one than the policy's."""
    given = {key: getattr(args, key, None) for key in CUTS} | (args.generation_kwargs or {})
    return {key: given[key] for key, same in CUTS.items() if given[key] not in same}


def text_of_cuts(args: GRPOConfig) -> str:
    """Sampling settings such as top_p that bias the importance ratio, as text; empty without its correction."""
    corrects = args.use_vllm and args.vllm_importance_sampling_correction
    return ", ".join(f"{key}={value}" for key, value in cuts_of(args).items()) if corrects else ""


def warnings_of(args: GRPOConfig) -> list[str]:
    """Texts for the log of a run's start: which settings bias its gradient, or clip nothing."""
    if text := text_of_cuts(args):
        found = [f"{text}: it biases the importance ratio (sampling/token_ratio_mean, docs/recipes.md)."]
    else:
        texts = [f"{key}={value}" for key, value in cuts_of(args).items()]
        found = [f"{text}: rollouts are not sampled from the policy that is trained, uncorrected." for text in texts]
    epsilon = max(args.epsilon, args.epsilon_high or 0.0)
    if args.importance_sampling_level == "sequence" and args.loss_type in CLIPPED_LOSSES and epsilon > 0.01:
        found.append(f"epsilon={epsilon:g}: ratios of sequences hardly ever move so far. GSPO uses epsilon: 3e-4.")
    return found


def check_config(args: GRPOConfig, estimators: dict[str, Any]) -> None:
    """Raise `ValueError` for settings that would train something else than they say. Set `old_logps` if it is None."""
    estimator, chosen = estimators[args.credit_assignment], f"credit_assignment={args.credit_assignment!r}"
    for key in CREDIT_KEYS:
        if (value := getattr(args, key)) != default_of(key, (type(args),)) and key not in estimator.reads:
            readers = " or ".join(name for name, other in estimators.items() if key in other.reads)
            raise ValueError(f"{key}={value} has no effect with {chosen}. Remove it, or use {readers}.")
    if estimator.per_turn and (args.off_policy_mask_threshold is not None or args.loss_type == "vespo"):
        raise ValueError(
            "off_policy_mask_threshold and loss_type: vespo read one advantage per sequence, got one per turn with "
            f"{chosen}. Use outcome or merged."
        )
    check_training(args, backend_of(args))
    check_generation_kwargs(args, backend_of(args))
    check_staleness(args, backend_of(args))
    if args.old_logps == "sampled" and (reason := why_not_sampled(args)):
        raise ValueError(f"old_logps: sampled: {reason}.")
    if args.old_logps is None and args.max_staleness > 2:
        reason = why_not_sampled(args)
        if args.loss_type not in CLIPPED_LOSSES or args.importance_sampling_level == "sequence":
            reason = f"loss_type: {args.loss_type}, per {args.importance_sampling_level}, clips no token"
        args.old_logps = "policy" if reason else "sampled"
        if reason:
            logger.warning(f"max_staleness={args.max_staleness} is trained with old_logps: policy, since {reason}.")


def check_training(args: GRPOConfig, backend: str) -> None:
    """Raise `ValueError` for settings with which loss, backend or optimizer would do something else in silence."""
    cap = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo" and cap < 1:
        raise ValueError(f"epsilon_high: loss_type: cispo multiplies gradients by a cap of {cap}, below 1. Set 5.")
    if (args.loss_type, backend) == ("vespo", "server") and not args.vllm_importance_sampling_mode.startswith("token"):
        raise ValueError("loss_type: vespo weighs ratios of tokens. Set vllm_importance_sampling_mode: token_mask.")
    if args.use_transformers_continuous_batching and (args.bf16 or args.fp16):
        raise ValueError("use_transformers_continuous_batching casts the trained weights to bf16. Set bf16: false.")
    if backend == "colocate" and args.vllm_tensor_parallel_size > 1:
        raise ValueError("vllm_tensor_parallel_size of a colocated engine: ranks would wait for each other. Set 1.")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.endswith("layerwise") or optimizer in ("lomo", "adalomo"):
        raise ValueError(f"optim={optimizer!r} steps inside each backward pass, of which a step here has several.")
    if optimizer.startswith("schedule_free") and args.use_vllm and args.eval_strategy != "no":
        raise ValueError(f"optim={optimizer!r}: rollouts after an evaluation have its averages. Do not evaluate.")
    if args.max_completion_length is None:
        raise ValueError("max_completion_length is None. Expected the tokens of a conversation, such as 1024.")
    if args.accelerator_config.split_batches:
        raise ValueError("accelerator_config: with split_batches some prompts would never be trained. Remove it.")


def check_staleness(args: GRPOConfig, backend: str) -> None:
    """Raise `ValueError` if the settings do not allow `max_staleness`."""
    where, mode = f"max_staleness={args.max_staleness}", args.vllm_importance_sampling_mode
    if not args.max_staleness:
        return
    if backend != "server":
        raise ValueError(f"{where} has no effect without a server. Set use_vllm: true and vllm_mode: server.")
    if args.refill_groups and args.late_groups != "admit":
        raise ValueError(f"{where} with refill_groups takes prompts of later batches. Set late_groups: admit.")
    if not args.vllm_importance_sampling_correction:
        raise ValueError(f"{where} needs importance ratios. Set vllm_importance_sampling_correction: true.")
    if mode.startswith("sequence"):
        raise ValueError(f"{where}: few rollouts count with ratios per {mode}. Set token_truncate or token_mask.")
    if args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps:
        raise ValueError(f"{where} needs steps_per_generation to be a multiple of gradient_accumulation_steps.")


def why_not_sampled(args: GRPOConfig) -> str | None:
    """Why the loss cannot clip around the sampled logprobs (`old_logps: sampled`); None if it can.

    The trainer's logprobs are of the whole vocabulary. Those of a distribution that was cut are larger: at unchanged
    weights the ratio is the share that was kept, and what has a negative advantage may be clipped from the first step.
    """
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return "it needs use_vllm: true and vllm_importance_sampling_correction: true"
    if text := text_of_cuts(args):
        return f"{text} makes the sampled logprobs other than those of the policy"
    for key in ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"):
        value, truncates = getattr(args, key), args.vllm_importance_sampling_mode.endswith("truncate")
        if truncates and value != default_of(key, (type(args),)):
            return f"{key}={value} has no effect then: use a _mask mode, or bound the loss by epsilon and delta"
    return None


def check_batch_arithmetic(args: GRPOConfig) -> None:
    """Raise `ValueError` with the nearest valid values if `num_generations` does not divide the batch."""
    world_size, group = int(os.environ.get("WORLD_SIZE", 1)), args.num_generations or 1
    if group < 2:
        raise ValueError(f"num_generations={args.num_generations}, expected at least 2: rollouts of a prompt.")
    steps = args.steps_per_generation or args.gradient_accumulation_steps
    batch = args.generation_batch_size or args.per_device_train_batch_size * world_size * steps
    if batch % group:
        divisors = [each for each in range(2, batch + 1) if batch % each == 0]
        nearest = sorted(divisors, key=lambda each: abs(each - group))[:2]
        size = next(size for size in range(1, group + 1) if size * world_size * steps % group == 0)
        raise ValueError(
            f"num_generations={group} does not divide the {batch} rollouts of a batch (per_device_train_batch_size="
            f"{args.per_device_train_batch_size} x {world_size} processes x {steps} steps). Set num_generations to "
            f"{' or '.join(map(str, nearest)) or 'a divisor'}, or per_device_train_batch_size to a multiple of {size}."
        )


def check_sharding(args: GRPOConfig) -> None:
    """Raise `ValueError` where accelerate 1.15 would train otherwise than it was launched, without a word."""
    launched, asked = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched != args.world_size:  # each would take itself for the only one
        raise ValueError(f"{launched} processes were launched, and accelerate counts {args.world_size}. Set use_cpu.")
    if asked in ("bf16", "fp16") and not (args.bf16 or args.fp16):
        raise ValueError(f"bf16: false, and accelerate was launched with {asked}, which it takes. Set bf16: true.")
    if asks_for_fsdp(args) and args.device.type == "cpu":
        raise ValueError("FSDP is asked for, but accelerate shards nothing on a CPU. Use accelerate/cpu.yaml.")


def asks_for_fsdp(args: GRPOConfig) -> bool:
    """Whether the settings or the launcher shard the model by FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or bool(args.fsdp)


def check_generation_kwargs(args: GRPOConfig, backend: str) -> None:
    """Raise `ValueError` for keys that the backend ignores, or of which the loss does not know."""
    for key, value in (args.generation_kwargs or {}).items():
        if key not in {*CUTS, "temperature"} or (backend == "transformers" and not hasattr(GenerationConfig(), key)):
            raise ValueError(
                f"generation_kwargs: {key!r} is set by the conversation, is not known to the {backend} backend, or "
                "would sample from another distribution than the policy's. Remove it."
            )
        if key == "temperature" and value != args.temperature:
            raise ValueError(f"generation_kwargs: temperature={value!r} samples, and the loss has {args.temperature}.")
