"""The recipe keys of all dataclasses: their types and defaults, what is known of TRL's, checks of their values."""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any

from transformers import SchedulerType
from trl import ModelConfig

from mt_grpo.base.fields import in_range, key, range_text
from mt_grpo.base.files import absolute


@dataclass
class ServerAndLogKeys:
    """Keys of `MTGRPOConfig` that are not of the method: a server's, checks, logs, and defaults other than TRL's."""

    rollout_engine: str = key("vllm", "What the server runs: vllm or sglang", one_of=("vllm", "sglang"), trained=False)
    vllm_server_base_url: list[str] | str | None = key(
        None, "Address of the server, or a list of several", trained=False
    )
    weight_sync: str = key(
        "auto", "How weights reach the server: nccl (GPUs), disk (shared directory), adapter (LoRA) or auto",
        one_of=("auto", "nccl", "disk", "adapter"), trained=False,
    )  # fmt: skip
    weight_sync_dir: str | None = key(
        None, "Shared directory of the disk transport. None: /dev/shm, else the temp dir", path=True, trained=False
    )
    vllm_request_timeout: float = key(
        600.0, "Seconds that one generation request may take", within="(0, inf)", trained=False
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
    max_completion_length: int = key(
        4096, "Tokens of a conversation after its prompt, tool results included", within="[1, inf)"
    )
    lr_scheduler_type: SchedulerType | str = key("constant_with_warmup", "Schedule of the learning rate")
    warmup_steps: float = key(10, "Steps in which the learning rate rises from 0; below 1 a share of all steps")


@dataclass
class ModelKeys(ModelConfig):
    """TRL's `ModelConfig`. Dropout is 0: with it no row shares its prompt, and importance ratios are noise."""

    lora_dropout: float = key(0.0, "Dropout of a LoRA", within="[0, 1)")


# What is known of the keys of TRL and transformers, whose fields do not say it.
OF_TRL = {
    what: {name: fact for fact, names in rows.items() for name in names}
    for what, rows in {
        "within": {
            "(0, inf)": (
                "temperature", "adam_epsilon", "delta", "sapo_temperature_neg", "sapo_temperature_pos",
                "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap",
                "num_train_epochs", "save_steps", "eval_steps", "logging_steps",
            ),
            "[1, inf)": ("max_steps", "num_iterations", "per_device_train_batch_size", "steps_per_generation",
                         "gradient_accumulation_steps", "generation_batch_size", "lora_alpha", "save_total_limit"),
            "[2, inf)": ("num_generations",),
            "[0, 1]": ("min_p", "ref_model_mixup_alpha", "top_entropy_quantile"),
            "(0, 1]": ("top_p",),
        },
        "one_of": {
            ("group", "batch", "mean", "none", True, False): ("scale_rewards",),
            ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"): ("loss_type",),
            ("token", "sequence"): ("importance_sampling_level",),
            ("server", "colocate"): ("vllm_mode",),
            ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"): ("vllm_importance_sampling_mode",),
        },
        "path": {True: ("output_dir",)},
        "refused": {  # keys that have no effect on multi-turn training, or another one
            "use turn_reward_weights and outcome_reward_weights": ("reward_weights",),
            "use max_env_steps": ("max_tool_calling_iterations",),
            "rewards, tools and environments read a row's columns": ("remove_unused_columns",),
            "credit_assignment says how rewards become advantages": ("multi_objective_aggregation",),
            "one pattern cannot fit tool turns and answer turns alike": ("vllm_structured_outputs_regex",),
            "its noise is drawn anew in the loss, which takes it for the policy's": ("neftune_noise_alpha",),
            "batches in the order of their readiness would mix prompts in a group": ("dataloader_in_order",),
            "TRL's sampler reads only seed": ("data_seed",),
            "train a LoRA on bf16 weights": ("load_in_8bit", "load_in_4bit"),
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
    return {k: f for cls in reversed(classes) for k, f in cls.__dataclass_fields__.items()}[key]


def default_of(key: str, classes: Classes) -> Any:
    """The default of a recipe key. Raises `KeyError` for an unknown key."""
    f = field_of(key, classes)
    return f.default_factory() if f.default is dataclasses.MISSING else f.default


def check_values(config: Any) -> None:
    """Raise `ValueError` for a setting that is refused, is not one of its choices, or is a number out of its range.

    The range of a number is `[0, inf)` unless its field or the table says another one. Defaults are always allowed.
    """
    for each in dataclasses.fields(config):
        value, allowed = getattr(config, each.name), fact_of(each, "one_of")
        if value == default_of(each.name, (type(config),)):
            continue
        if reason := fact_of(each, "refused"):
            raise ValueError(f"{each.name}={value!r} is not supported: {reason}.")
        if allowed and value not in allowed:
            raise ValueError(f"{each.name}={value!r} is not known. Expected one of: {', '.join(map(str, allowed))}.")
        interval = fact_of(each, "within") or "[0, inf)"
        for number in value if isinstance(value, list) else [value]:
            if type(number) in (int, float) and not in_range(number, interval):
                raise ValueError(f"{each.name}={value!r}, expected {range_text(interval)}.")


def make_absolute(config: Any) -> None:
    """Make the paths of a dataclass of settings absolute, as seen from the folder where the run starts."""
    for each in dataclasses.fields(config):
        kind, value = fact_of(each, "path"), getattr(config, each.name)
        if kind is True and value:
            value = [absolute(path) for path in value] if isinstance(value, list) else absolute(value)
        elif kind and value and kind in value:
            path, _, name = value.rpartition(":")
            value = f"{absolute(path)}:{name}"
        setattr(config, each.name, value)
