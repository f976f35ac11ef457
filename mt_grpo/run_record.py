"""What determines the results of a run, and which settings of a resumed run differ from its checkpoint's."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Prefixes of settings that do not change what is trained. A checkpoint's record leaves such settings out.
NOT_TRAINED = (
    "output_dir", "resume_from_checkpoint", "logging_", "log_", "save_", "hub_", "push_", "report_to", "run_name",
    "project", "trackio_", "eval_", "per_device_eval_", "num_generations_eval", "include_", "disable_tqdm",
    "num_completions_to_print", "print_metrics", "ddp_", "skip_memory_metrics", "debug", "vllm_server_",
    "vllm_group_port",
    "vllm_request_timeout", "vllm_gpu_memory_utilization", "weight_sync", "weight_check_every", "load_best_model",
    "metric_for_best_model", "greater_is_better", "restore_callback", "max_concurrent_tools", "reward_timeout",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent", "dataloader_prefetch",
)  # fmt: skip
# ORDER_KEYS decide which prompts a step trains on. OPTIMIZER_KEYS are held by the checkpoint's optimizer state itself.
ORDER_KEYS = (
    "world_size", "dataset_rows", "dataset_sha256", "per_device_train_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "generation_batch_size", "num_iterations", "num_generations", "seed", "shuffle_dataset",
    "ignore_data_skip", "dataloader_drop_last",
)  # fmt: skip
LORA_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora")
OPTIMIZER_KEYS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line of text per setting whose value in a resumed run differs from its checkpoint's record.

    >>> changed_settings({"seed": 1, "beta": 0.0, "gone": 1}, {"seed": 2, "beta": 0.0, "new": 1})
    ['seed: 1 -> 2 (the order of the prompts is another one: some are trained on twice, others not at all)']
    """
    notes = dict.fromkeys(
        ORDER_KEYS, " (the order of the prompts is another one: some are trained on twice, others not at all)"
    ) | dict.fromkeys(OPTIMIZER_KEYS, " (without effect: the optimizer's saved state keeps the first)")
    return [
        f"{key}: {before[key]!r} -> {now[key]!r}{notes.get(key, '')}"
        for key in now
        if key in before and before[key] != now[key]
    ]


def sha256(text: str | bytes) -> str:
    """The first 12 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:12]


def source_sha256(function: Callable) -> str | None:
    """The `sha256` of the file that defines a function or class; None if there is no such file."""
    try:
        return sha256(Path(inspect.getsourcefile(inspect.unwrap(function))).read_bytes())
    except (TypeError, OSError):  # a built-in one, a callable object, a notebook
        return None


def dataset_sha256(dataset: Any) -> str:
    """The `sha256` of all rows. It depends neither on the kind of file nor on the order of the columns.

    A column is hashed as the JSON of a list, in which a row that lacks the column has nothing between the commas: a
    null that is written is another row than one that is not.
    """
    hashes = {name: hashlib.sha256(b"[") for name in dataset.column_names}
    for number, row in enumerate(dataset):
        for name, digest in hashes.items():
            value = json.dumps(row[name], default=str) if name in row else ""
            digest.update(f"{', ' if number else ''}{value}".encode())
    columns = {}
    for name in sorted(hashes):
        hashes[name].update(b"]")
        columns[name] = hashes[name].hexdigest()[:12]
    return sha256(json.dumps(columns))
