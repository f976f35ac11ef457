"""Settings that are refused before a model is loaded: they would train something else than they say."""

from __future__ import annotations

import logging
import math
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

# TRL's settings that have no effect on multi-turn training, or another one. Key -> the reason, or what to use.
REFUSED_KEYS = {
    "reward_weights": "turn and outcome rewards are weighted apart: use turn_ and outcome_reward_weights",
    "max_tool_calling_iterations": "this trainer runs its own conversations: use max_env_steps",
    "multi_objective_aggregation": "credit_assignment says how rewards become advantages",
    "vllm_structured_outputs_regex": "one pattern cannot fit tool turns and answer turns alike",
    "neftune_noise_alpha": "its noise is drawn anew in the loss, which takes it for the policy's",
    "dataloader_in_order": "batches in the order of their readiness would put several prompts into one group",
    "data_seed": "TRL's sampler reads only seed",
    "load_in_8bit": "the weights of a quantised policy cannot be pushed to a server: train a LoRA on bf16 weights",
    "load_in_4bit": "the weights of a quantised policy cannot be pushed to a server: train a LoRA on bf16 weights",
}
UNREAD_CREDIT = {  # key -> what the estimator is that does not read it
    "turn_discount": "which counts no turn for another",
    "outcome_in_return": "which has no return",
    "state_baseline": "which compares no states",
    "turn_advantage_coef": "which has no turn's own term",
}


def backend_of(args: GRPOConfig) -> str:
    """The backend that samples the tokens: `server`, `colocate` or `transformers`."""
    return args.vllm_mode if args.use_vllm else "transformers"


def cuts_of(args: GRPOConfig) -> dict[str, Any]:
    """The settings that make the distribution that is sampled from another one than the policy's.

    >>> from types import SimpleNamespace
    >>> cuts_of(SimpleNamespace(top_p=0.8, top_k=0, generation_kwargs={"presence_penalty": 0.5, "min_p": 0.0}))
    {'top_p': 0.8, 'presence_penalty': 0.5}
    """
    given = {key: getattr(args, key, None) for key in CUTS} | (args.generation_kwargs or {})
    return {key: given[key] for key, same in CUTS.items() if given[key] not in same}


def text_of_cuts(args: GRPOConfig) -> str:
    """Sampling settings such as top_p that bias the importance ratio, as text; empty without its correction."""
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return ""
    return ", ".join(f"{key}={value}" for key, value in cuts_of(args).items())


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


def check_supported(settings: Any) -> None:
    """Raise `ValueError` for a setting of `REFUSED_KEYS` with another value than its default."""
    for key, reason in REFUSED_KEYS.items():
        value = getattr(settings, key, None)
        if hasattr(settings, key) and value != default_of(key, (type(settings),)):
            raise ValueError(f"{key}={value!r} is not supported: {reason}. Remove this key.")


def check_config(args: GRPOConfig, estimators: dict[str, Any]) -> None:
    """Raise `ValueError` for settings that would train something else than they say. Set `old_logps` if it is None."""
    check_supported(args)
    estimator = estimators[args.credit_assignment]
    for key, why in UNREAD_CREDIT.items():
        if (value := getattr(args, key)) != default_of(key, (type(args),)) and key not in estimator.reads:
            readers = " or ".join(name for name, other in estimators.items() if key in other.reads)
            raise ValueError(
                f"{key}={value} has no effect with credit_assignment={args.credit_assignment!r}, {why}. Remove it, or "
                f"use {readers}."
            )
    if estimator.per_turn and (args.off_policy_mask_threshold is not None or args.loss_type == "vespo"):
        raise ValueError(
            "off_policy_mask_threshold and loss_type: vespo weigh whole sequences by the sign of their advantage, "
            f"which credit_assignment={args.credit_assignment!r} gives per turn. Use outcome or merged."
        )
    check_loss(args, backend_of(args))
    check_steps(args)
    check_generation_kwargs(args, backend_of(args))
    check_staleness(args)
    if args.old_logps == "sampled" and (reason := why_not_sampled(args)):
        raise ValueError(f"old_logps: sampled: {reason}.")
    if args.old_logps is None and args.max_staleness > 2:
        reason = why_not_sampled(args)
        if args.loss_type not in CLIPPED_LOSSES or args.importance_sampling_level == "sequence":
            reason = f"loss_type: {args.loss_type}, per {args.importance_sampling_level}, clips no token"
        args.old_logps = "policy" if reason else "sampled"
        if reason:
            logger.warning(f"max_staleness={args.max_staleness} is trained with old_logps: policy, since {reason}.")


def check_loss(args: GRPOConfig, backend: str) -> None:
    """Raise `ValueError` for a loss of other ratios, weights or advantages than the settings say."""
    if args.loss_type == "cispo" and (args.epsilon if args.epsilon_high is None else args.epsilon_high) < 1:
        raise ValueError(
            "loss_type: cispo caps the ratio itself at epsilon_high (without it at epsilon), got "
            f"{args.epsilon_high}: below 1 every gradient is multiplied by it. Set it to 5."
        )
    if (args.loss_type, backend) == ("vespo", "server") and not args.vllm_importance_sampling_mode.startswith("token"):
        raise ValueError(
            "loss_type: vespo weighs the ratios of tokens. Set vllm_importance_sampling_mode: token_mask."
        )
    if args.use_transformers_continuous_batching and (args.bf16 or args.fp16):
        raise ValueError(
            "use_transformers_continuous_batching with bf16 or fp16: TRL casts the policy's own weights for it, and "
            "the run would train in half precision. Set bf16: false, or remove the key."
        )
    if backend == "colocate" and args.vllm_tensor_parallel_size > 1:
        raise ValueError("vllm_tensor_parallel_size of a colocated engine: ranks would wait for each other. Set 1.")


def check_steps(args: GRPOConfig) -> None:
    """Raise `ValueError` if the optimizer would step at other places than is said, or on other rollouts.

    A resumed run samples new rollouts. So it continues exactly only from between two batches of rollouts.
    """
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.endswith("layerwise") or optimizer in ("lomo", "adalomo"):
        raise ValueError(f"optim={optimizer!r} steps inside each backward pass, of which a step here has several.")
    if args.accelerator_config.split_batches:
        raise ValueError("accelerator_config: with split_batches some prompts would never be trained. Remove it.")
    per_batch = args.steps_per_generation * args.num_iterations  # forward passes that one batch of rollouts serves
    every = per_batch // math.gcd(per_batch, args.gradient_accumulation_steps)
    for key, strategy in (("save_steps", args.save_strategy), ("eval_steps", args.eval_strategy)):
        steps = getattr(args, key) or every
        steps = steps if steps >= 1 else math.ceil(args.max_steps * steps)
        if strategy == "steps" and steps % every:  # a run that is interrupted in an evaluation is saved, too
            below = int(steps // every * every)
            raise ValueError(
                f"{key}={getattr(args, key)} may save in the middle of a batch of rollouts, from where no run can be "
                f"resumed exactly: a batch lasts {every} optimizer steps. Set {key} (by default, eval_steps is "
                f"logging_steps) to {f'{below} or ' if below else ''}{below + every}."
            )


def check_staleness(args: GRPOConfig) -> None:
    """Raise `ValueError` if the settings do not allow `max_staleness`."""
    if not args.max_staleness:
        return
    where = f"max_staleness={args.max_staleness}"
    if backend_of(args) != "server":
        raise ValueError(f"{where} has no effect without a server. Set use_vllm: true and vllm_mode: server.")
    if args.refill_groups and args.late_groups != "admit":
        raise ValueError(f"{where} with refill_groups takes prompts of later batches. Set late_groups: admit.")
    if not args.vllm_importance_sampling_correction:
        raise ValueError(f"{where} needs importance ratios. Set vllm_importance_sampling_correction: true.")
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        raise ValueError(
            f"{where} with vllm_importance_sampling_mode: {args.vllm_importance_sampling_mode}: few rollouts count. "
            "Set token_truncate or token_mask."
        )
    if args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps:
        raise ValueError(f"{where} needs steps_per_generation to be a multiple of gradient_accumulation_steps.")


def why_not_sampled(args: GRPOConfig) -> str | None:
    """Why the loss cannot clip around the sampled logprobs (`old_logps: sampled`); None if it can.

    The trainer's logprobs are of the whole vocabulary. Those of a distribution that was cut are larger: at unchanged
    weights the ratio is the share that was kept, and what has a negative advantage may be clipped from the first step.
    """
    if not args.vllm_importance_sampling_correction:
        return "it needs vllm_importance_sampling_correction: true"
    if cuts := ", ".join(f"{key}={value!r}" for key, value in cuts_of(args).items()):
        return f"{cuts} makes the sampled logprobs other than those of the policy"
    for key in ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"):
        value, default = getattr(args, key), default_of(key, (type(args),))
        if args.vllm_importance_sampling_mode.endswith("truncate") and value != default:
            return f"{key}={value} has no effect then: use a _mask mode, or bound the loss by epsilon and delta"
    return None


def check_batch_arithmetic(args: GRPOConfig) -> None:
    """Raise `ValueError` with the nearest valid values if `num_generations` does not divide the batch."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    steps = args.steps_per_generation or args.gradient_accumulation_steps
    batch = args.generation_batch_size or args.per_device_train_batch_size * world_size * steps
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
    if asks_for_fsdp(args) and args.device.type == "cpu":
        raise ValueError(
            "FSDP is asked for, but accelerate shards nothing on a CPU. Use GPUs, or accelerate/cpu.yaml."
        )


def asks_for_fsdp(args: GRPOConfig) -> bool:
    """Whether the settings or the launcher shard the model by FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or bool(args.fsdp)


def check_generation_kwargs(args: GRPOConfig, backend: str) -> None:
    """Raise `ValueError` for keys that the backend ignores, or of which the loss does not know."""
    known = {*CUTS, "temperature"}
    if backend == "transformers":
        known = {key for key in known if hasattr(GenerationConfig(), key)}
    for key, value in (args.generation_kwargs or {}).items():
        if key not in known:
            raise ValueError(
                f"generation_kwargs: {key!r} is set by the conversation, is not known to the {backend} backend, or "
                "would sample from another distribution than the policy's. Remove it."
            )
        if key == "temperature" and value != args.temperature:
            raise ValueError(
                f"generation_kwargs: temperature={value!r} samples, and the loss computes at {args.temperature!r}. "
                f"Set temperature: {value!r}, and remove it from generation_kwargs."
            )
