"""Settings of training on rollouts of other weights, refused where they cannot work or would have no effect."""

from __future__ import annotations

from typing import Any

from trl import GRPOConfig

from mt_grpo.settings import default_of

# What changes the distribution that is sampled beside the temperature, and the value that does not.
CUTS = {
    "top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None),
    "presence_penalty": (0.0, None), "frequency_penalty": (0.0, None), "min_tokens": (0, None),
    "logit_bias": ({}, None), "bad_words": ([], None), "allowed_token_ids": (None,),
}  # fmt: skip


def check_staleness(args: GRPOConfig) -> None:
    """Set `max_staleness` where `overlap_rollouts` asks for it. Raise `ValueError` if the settings do not allow it."""
    if args.overlap_rollouts and args.max_staleness > 1:
        raise ValueError(f"overlap_rollouts is max_staleness: 1, got max_staleness={args.max_staleness}: remove one.")
    args.max_staleness = max(args.max_staleness, int(args.overlap_rollouts))
    if args.late_groups == "admit" and not args.max_staleness:
        raise ValueError("late_groups: admit has no effect without max_staleness. Set max_staleness: 2, or remove it.")
    if not args.max_staleness:
        return
    key = "overlap_rollouts" if args.overlap_rollouts else f"max_staleness={args.max_staleness}"
    if not args.vllm_importance_sampling_correction:
        raise ValueError(
            f"{key} trains on rollouts of the weights before earlier steps, which needs their importance ratio. Set "
            f"vllm_importance_sampling_correction: true, or remove {key.partition('=')[0]}."
        )
    if args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps:
        raise ValueError(
            f"{key} with several batches of rollouts in one optimizer step "
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


def text_of_cuts(args: GRPOConfig) -> str:
    """Those settings where they bias a ratio, as text; empty without importance-sampling correction."""
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
