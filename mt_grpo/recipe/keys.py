"""The recipe keys of all dataclasses: their types and defaults, what is known of TRL's, checks of their values."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import json
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import SchedulerType
from trl import GRPOConfig, ModelConfig

from mt_grpo.base.fields import LARGEST, in_range, key, range_text
from mt_grpo.base.files import absolute
from mt_grpo.base.json_types import fits_type


@dataclass
class ServerAndLogKeys:
    """Keys of `MTGRPOConfig` that are not of the method: a server's, checks, logs, and defaults other than TRL's."""

    rollout_engine: str = key(
        "vllm", "What the server runs: vllm or sglang", one_of=("vllm", "sglang"), trained=False, backend="server"
    )
    vllm_server_base_url: list[str] | str | None = key(
        None, "Address of the server, or a list of several", trained=False, backend="server"
    )
    weight_sync: str = key(
        "auto", "How weights reach the server: nccl (GPUs), disk (shared directory), adapter (LoRA) or auto",
        one_of=("auto", "nccl", "disk", "adapter"), trained=False, backend="server",
    )  # fmt: skip
    weight_sync_dir: str | None = key(
        None, "Shared directory of the disk transport. None: /dev/shm, else the temp dir",
        path=True, trained=False, backend="server",
    )  # fmt: skip
    vllm_request_timeout: float = key(
        600.0, "Seconds that one generation request may take", within="(0, inf)", trained=False, backend="server"
    )
    tokenization_sanity_check_mode: str = key(
        "strict",
        "How strictly tokens are compared with a whole rendering",
        one_of=("strict", "ignore_strippable", "off", "disable"),
    )
    log_rollouts: int = key(
        16, "Rollouts per rank and batch in the log rollouts.*.jsonl", within="[0, inf)", trained=False
    )
    log_rollout_tokens: bool = key(False, "Log every token of these rollouts, too", trained=False)
    # Other defaults than TRL's, which do not fit conversations.
    max_completion_length: int | None = key(4096, "Tokens of a conversation after its prompt, tool results included")
    lr_scheduler_type: SchedulerType | str = key("constant_with_warmup", "Schedule of the learning rate")
    warmup_steps: float = key(10, "Steps in which the learning rate rises from 0; below 1 a share of all steps")


@dataclass
class ModelKeys(ModelConfig):
    """TRL's `ModelConfig`. Dropout is 0: with it no row shares its prompt, and importance ratios are noise."""

    lora_dropout: float = key(0.0, "Dropout of a LoRA")


# What is known of the keys of TRL and transformers, and of vLLM's in `generation_kwargs`: their fields do not say it.
OF_TRL = {
    what: {name: fact for fact, names in rows.items() for name in names}
    for what, rows in {
        "within": {
            "(-inf, inf)": ("presence_penalty", "frequency_penalty"),
            "[0, inf)": (
                "learning_rate", "weight_decay", "beta", "max_grad_norm", "warmup_steps", "top_k", "min_tokens",
                "dataloader_num_workers", "num_completions_to_print", "eval_delay",
                "router_aux_loss_coef", "epsilon", "epsilon_high", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
                "vespo_lambda_neg", "entropy_coef", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
                "entropy_target", "vllm_importance_sampling_clip_min", "off_policy_mask_threshold",
            ),
            "(0, inf)": (
                "temperature", "repetition_penalty", "vllm_server_timeout", "num_train_epochs", "logging_steps",
                "save_steps", "eval_steps", "adam_epsilon", "delta", "sapo_temperature_neg", "sapo_temperature_pos",
                "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap",
            ),
            "[1, inf)": (
                "max_steps", "num_iterations", "per_device_train_batch_size", "per_device_eval_batch_size",
                "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation", "num_generations_eval",
                "max_completion_length", "pad_to_multiple_of", "torch_empty_cache_steps", "eval_accumulation_steps",
                "save_total_limit", "dataloader_prefetch_factor", "ddp_bucket_cap_mb", "ddp_timeout",
                "ref_model_sync_steps", "lora_r", "lora_alpha", "vllm_max_model_length", "vllm_tensor_parallel_size",
            ),
            "[2, inf)": ("num_generations",),
            "[0, 1]": ("min_p", "ref_model_mixup_alpha", "top_entropy_quantile"),
            "(0, 1]": ("top_p", "vllm_gpu_memory_utilization"),
            "[0, 1)": ("adam_beta1", "adam_beta2", "lora_dropout"),
            "[1, 65535]": ("vllm_server_port", "vllm_group_port"),
            "[0, 4294967295]": ("seed",),
        },
        "one_of": {
            ("group", "batch", "mean", "none"): ("scale_rewards",),
            ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"): ("loss_type",),
            ("token", "sequence"): ("importance_sampling_level",),
            ("server", "colocate"): ("vllm_mode",),
            ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"): ("vllm_importance_sampling_mode",),
        },
        "path": {True: ("output_dir",)},
        "backend": {
            "server": ("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
            "colocate": (
                "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length",
                "vllm_enable_sleep_mode", "vllm_model_impl",
            ),
            "vllm": (
                "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
                "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
            ),
            "transformers": (
                "cache_implementation", "use_transformers_continuous_batching",
                "transformers_continuous_batching_config",
            ),
        },
    }.items()
}  # fmt: skip


def fact_of(each: dataclasses.Field, what: str) -> Any:
    """A fact about a key, such as `within` or `one_of`, from its field or the table of TRL's keys; None if unknown."""
    return each.metadata.get(what) or OF_TRL[what].get(each.name)


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


def check_ranges(config: Any) -> None:
    """Raise `ValueError` for a number of a dataclass of settings that is not in its interval."""
    for each in dataclasses.fields(config):
        name, interval, value = each.name, fact_of(each, "within"), getattr(config, each.name)
        if interval is None or value is None or value == default_of(name, (type(config),)):
            continue
        if not fits_type(value, known_keys((type(config),))[name], from_yaml=True):
            raise ValueError(f"{name}={value!r} is {type(value).__name__}, expected {range_text(interval)}.")
        if name == "pad_to_multiple_of" and isinstance(value, str) and not value.isdigit():
            if value.lower() in ("none", "null"):
                continue
            raise ValueError(f"pad_to_multiple_of={value!r}, expected auto, none or {range_text(interval)}.")
        for number in value if isinstance(value, list) else [value]:
            if not in_range(number, interval):
                large = " float32 holds at most 3.4e+38." if LARGEST <= abs(float(number)) < float("inf") else ""
                raise ValueError(f"{name}={value!r}, expected {range_text(interval)}.{large}")


def check_choices(config: Any) -> None:
    """Raise `ValueError` for text that is no member of a setting's Enum. transformers' own message lacks the key."""
    types = known_keys((type(config),))
    for each in dataclasses.fields(config):
        kinds = [kind for kind in (types[each.name], *typing.get_args(types[each.name])) if is_enum(kind)]
        value, known = getattr(config, each.name), [member.value for kind in kinds for member in kind]
        if kinds and isinstance(value, str) and not isinstance(value, enum.Enum) and value not in known:
            near = difflib.get_close_matches(value, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{each.name}={value!r} is not known. Expected one of: {', '.join(known)}.{hint}")


def check_one_of(config: Any) -> None:
    """Raise `ValueError` for a setting that is none of those that are known."""
    for each in dataclasses.fields(config):
        allowed = fact_of(each, "one_of")
        if allowed and (value := getattr(config, each.name)) not in (*allowed, default_of(each.name, (type(config),))):
            raise ValueError(f"{each.name}={value!r} is not known. Expected one of: {', '.join(allowed)}.")


def is_enum(kind: Any) -> bool:
    """Whether a type is an Enum."""
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def make_absolute(config: Any) -> None:
    """Make the paths of a dataclass of settings absolute, as seen from the folder where the run starts.

    Raises `ValueError` for a character that no path has.
    """
    for each in dataclasses.fields(config):
        kind = fact_of(each, "path")
        if not kind or not (value := getattr(config, each.name)):
            continue
        if "\0" in str(value):
            raise ValueError(f"{each.name}={value!r} has the character NUL, which no path has. Remove it.")
        if kind is True:
            value = [absolute(path) for path in value] if isinstance(value, list) else absolute(value)
        elif kind in value:
            path, _, name = value.rpartition(":")
            value = f"{absolute(path)}:{name}"
        setattr(config, each.name, value)


def check_mappings(args: GRPOConfig) -> None:
    """Raise `ValueError` if a setting for a mapping holds text that is neither JSON nor the path of a JSON file."""
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if not isinstance(value, str):
            continue
        by_path = name in ("accelerator_config", "fsdp_config", "deepspeed") and not value.startswith("{")
        if by_path and not os.path.isfile(value):
            raise ValueError(f"{name}={value!r} is not a file. Expected a JSON file or a mapping.")
        try:
            mapping = json.loads(Path(value).read_bytes() if by_path else value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r} is not JSON ({error}). Expected a mapping.") from None
        if not isinstance(mapping, dict):
            raise ValueError(f"{name}={value!r} is {type(mapping).__name__}, expected a mapping.")
