"""The recipe keys: their types, their defaults, and the ranges of their numbers."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from mt_grpo.base.json_types import fits_type


@dataclass
class ServerAndLogKeys:
    """The keys of `MTGRPOConfig` that do not change what is trained: a server's, checks, what is said and logged."""

    vllm_server_base_url: list[str] | str | None = field(
        default=None, metadata={"help": "Address of the vLLM server; a list of several"}
    )
    weight_sync: str = field(
        default="auto", metadata={"help": "To the vLLM server by nccl (GPUs), disk (shared directory) or auto"}
    )
    weight_sync_dir: str | None = field(
        default=None, metadata={"help": "Shared directory of the disk transport. None: /dev/shm, else the temp dir"}
    )
    weight_check_every: int = field(
        default=10, metadata={"help": "Compare logprobs at the first sync, after a restart and every n-th; 0: no n-th"}
    )
    vllm_request_timeout: float = field(
        default=600.0, metadata={"help": "Seconds that one generation request may take"}
    )
    tokenization_sanity_check_mode: str = field(default="strict", metadata={"help": "strict, ignore_strippable, off"})
    tokenization_check_raises: bool = field(default=False, metadata={"help": "A difference found ends the run"})
    print_metrics: str = field(default="line", metadata={"help": "Per log: line, or all of the metrics"})
    log_rollouts: int = field(default=16, metadata={"help": "Rollouts per rank and batch in rollouts.*.jsonl"})
    log_rollout_tokens: bool = field(default=False, metadata={"help": "Every token of them, too"})


Classes = tuple[type, ...]  # dataclasses; a key may be a field of any of them


@functools.cache
def known_keys(classes: Classes) -> dict[str, Any]:
    """Every recipe key with its annotated type."""
    return {k: v for cls in classes for k, v in typing.get_type_hints(cls).items() if k in cls.__dataclass_fields__}


def field_of(key: str, classes: Classes) -> dataclasses.Field:
    """The field of a recipe key, from the first dataclass that has it. Raises `KeyError` if none has it."""
    for cls in classes:
        if key in cls.__dataclass_fields__:
            return cls.__dataclass_fields__[key]
    raise KeyError(key)


def default_of(key: str, classes: Classes) -> Any:
    """The default of a recipe key. Raises `KeyError` for an unknown key."""
    f = field_of(key, classes)
    return f.default_factory() if f.default is dataclasses.MISSING else f.default


def choices_of(key: str, classes: Classes) -> list:
    """The choices of TRL and transformers, which check only the command line by them, not the recipe."""
    return field_of(key, classes).metadata.get("choices") or []


# The values that each number may have, as an interval: `[` includes the bound, `(` does not, and infinity is never
# included. NaN is in no interval. A default is always allowed, also outside the interval, as `max_steps: -1`.
RANGES = {
    key: interval
    for interval, keys in {
        "(-inf, inf)": (
            "turn_reward_weights", "outcome_reward_weights", "environment_reward_weight", "gym_unfinished_reward",
            "presence_penalty", "frequency_penalty",
        ),
        "[0, inf)": (
            "learning_rate", "weight_decay", "beta", "max_grad_norm", "warmup_steps", "turn_advantage_coef", "top_k",
            "min_tokens", "max_env_steps", "weight_check_every", "log_rollouts", "dataloader_num_workers",
            "num_completions_to_print", "eval_delay", "neftune_noise_alpha", "router_aux_loss_coef", "epsilon",
            "epsilon_high", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "entropy_coef",
            "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
            "vllm_importance_sampling_clip_min", "off_policy_mask_threshold", "max_staleness",
        ),
        "(0, inf)": (
            "temperature", "repetition_penalty", "tool_timeout", "agent_timeout", "environment_timeout",
            "mcp_start_timeout", "reward_timeout", "vllm_server_timeout", "vllm_request_timeout", "num_train_epochs",
            "logging_steps", "save_steps", "eval_steps", "adam_epsilon", "delta", "sapo_temperature_neg",
            "sapo_temperature_pos", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap",
        ),
        "[1, inf)": (
            "max_steps", "num_iterations", "per_device_train_batch_size", "per_device_eval_batch_size",
            "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation", "num_generations_eval",
            "max_completion_length", "max_turn_tokens", "max_concurrent_tools", "max_parallel_calls", "dataset_size",
            "eval_dataset_size", "max_model_calls", "max_turns", "max_tool_response_length",
            "mcp_max_concurrent_calls", "pad_to_multiple_of", "torch_empty_cache_steps",
            "eval_accumulation_steps", "save_total_limit",
            "dataloader_prefetch_factor", "ddp_bucket_cap_mb", "ddp_timeout", "ref_model_sync_steps", "lora_r",
            "lora_alpha", "vllm_max_model_length", "vllm_tensor_parallel_size",
        ),
        "[2, inf)": ("num_generations",),
        "[10, inf)": ("max_tool_response_tokens",),
        "[0, 1]": ("min_p", "turn_discount", "ref_model_mixup_alpha", "top_entropy_quantile"),
        "(0, 1]": ("top_p", "vllm_gpu_memory_utilization"),
        "[0, 1)": ("adam_beta1", "adam_beta2", "lora_dropout"),
        "[1, 65535]": ("vllm_server_port", "vllm_group_port"),
        "[0, 4294967295]": ("seed",),
    }.items()
    for key in keys
}  # fmt: skip


LARGEST = 3.4028234663852886e38  # of float32


def in_range(value: Any, interval: str) -> bool:
    """Whether a number, or the text of a number, is in an interval of `RANGES`.

    What float32 cannot hold is in none: 1e39 would be infinite where it is used.

    >>> in_range(1, "(0, 1]"), in_range(0, "(0, 1]"), in_range("1e-6", "[0, inf)"), in_range("nan", "(-inf, inf)")
    (True, False, True, False)
    >>> in_range(3e38, "[0, inf)"), in_range(1e39, "[0, inf)")
    (True, False)
    """
    low, high = (min(max(float(bound), -LARGEST), LARGEST) for bound in interval[1:-1].split(", "))
    number = float(value)
    at_a_bound = (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    return low < number < high or at_a_bound


def range_text(interval: str) -> str:
    """An interval of `RANGES` in words.

    >>> range_text("[0, inf)"), range_text("(0, 1]"), range_text("(-inf, inf)")
    ('a finite number of at least 0', 'a finite number above 0, at most 1', 'a finite number')
    """
    low, high = interval[1:-1].split(", ")
    words = [] if low == "-inf" else [f"{'of at least' if interval[0] == '[' else 'above'} {low}"]
    words += [] if high == "inf" else [f"{'at most' if interval[-1] == ']' else 'below'} {high}"]
    return " ".join(["a finite number", ", ".join(words)]).strip()


def check_ranges(config: Any) -> None:
    """Raise `ValueError` for a number of a dataclass of settings that is not in its interval of `RANGES`."""
    for key in RANGES.keys() & vars(config).keys():
        value = getattr(config, key)
        if value is None or value == default_of(key, (type(config),)):
            continue
        if not fits_type(value, known_keys((type(config),))[key], from_yaml=True):
            raise ValueError(f"{key}={value!r} is {type(value).__name__}, expected {range_text(RANGES[key])}.")
        if key == "pad_to_multiple_of" and isinstance(value, str) and not value.isdigit():
            if value.lower() in ("none", "null"):
                continue
            raise ValueError(f"pad_to_multiple_of={value!r}, expected auto, none or {range_text(RANGES[key])}.")
        for number in value if isinstance(value, list) else [value]:
            if not in_range(number, RANGES[key]):
                large = " float32 holds at most 3.4e+38." if LARGEST <= abs(float(number)) < float("inf") else ""
                raise ValueError(f"{key}={value!r}, expected {range_text(RANGES[key])}.{large}")


def check_mappings(args: GRPOConfig) -> None:
    """Raise `ValueError` if a setting for a mapping holds text that is neither JSON nor the path of a JSON file."""
    for key in args._VALID_DICT_FIELDS:
        value = getattr(args, key)
        if not isinstance(value, str):
            continue
        by_path = key in ("accelerator_config", "fsdp_config", "deepspeed") and not value.startswith("{")
        if by_path and not os.path.isfile(value):
            raise ValueError(f"{key}={value!r} is not a file. Expected a JSON file or a mapping.")
        try:
            mapping = json.loads(Path(value).read_bytes() if by_path else value)
        except ValueError as error:
            raise ValueError(f"{key}={value!r} is not JSON ({error}). Expected a mapping.") from None
        if not isinstance(mapping, dict):
            raise ValueError(f"{key}={value!r} is {type(mapping).__name__}, expected a mapping.")
