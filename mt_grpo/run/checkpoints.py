"""Checkpoints: which one a run resumes from, what a resumed run changes, and what `Trainer` does not load or save."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers.trainer import TRAINER_STATE_NAME

from mt_grpo.base.errors import RunError, error_line, tell_once
from mt_grpo.base.files import absolute, read_json
from mt_grpo.base.rows import image_or_str


class CheckpointError(RunError, ValueError):
    """A checkpoint cannot be resumed. Nothing was trained since, so that there is nothing to save."""


def checkpoint_to_resume(wanted: str | bool | None, output_dir: str) -> str | None:
    """The folder that `resume_from_checkpoint` means: with `last` or `true` the newest checkpoint of `output_dir`.

    Raises `ValueError` if it is not a complete checkpoint, or has only a model. None if the setting is empty.
    """
    if not wanted:
        return None
    # Trainer writes trainer_state.json last, so a checkpoint without this file is incomplete. The newest checkpoint is
    # used, not the one of the highest step: an older run in the same folder may have made more steps.
    states = Path(output_dir).glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
    states = [path for path in states if path.parent.name.partition("-")[2].isdigit()]
    whole = [path for path in states if read_json(path) or tell_once(f"{path.parent} is incomplete: passed over.")]
    newest = max(whole, key=lambda path: path.stat().st_mtime, default=None)
    state = newest if str(wanted).lower() in ("last", "true") else Path(absolute(str(wanted)), TRAINER_STATE_NAME)
    if state is None or not state.is_file():
        other = f"Set it to {newest.parent}" if newest else f"There is none in output_dir={output_dir!r}"
        what = f"is no whole checkpoint: it has no {TRAINER_STATE_NAME}"
        raise ValueError(f"resume_from_checkpoint={wanted!r} {what}. {other}.")
    found = state.parent
    if not (found / "latest").is_file() and not ((found / "scheduler.pt").is_file() and any(found.glob("optimizer*"))):
        what = "has a model only, without the state of its optimizer. To start from it, set model_name_or_path"
        raise ValueError(f"resume_from_checkpoint={str(found)!r} {what}.")
    return str(found)


RUN_RECORD = "mt_grpo_run.json"  # next to trainer_state.json: the settings that the checkpoint was trained with

# Prefixes of TRL's settings that do not change what is trained. A checkpoint's record leaves such settings out.
NOT_TRAINED = (
    "output_dir", "resume_from_checkpoint", "logging_", "log_", "save_", "hub_", "push_", "report_to", "run_name",
    "project", "trackio_", "eval_", "per_device_eval_", "num_generations_eval", "include_", "disable_tqdm",
    "num_completions_to_print", "ddp_", "do_", "skip_memory_metrics", "debug", "vllm_server_", "vllm_group_port",
    "vllm_gpu_memory_utilization", "load_best_model", "metric_for_best_model", "greater_is_better", "restore_callback",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent", "dataloader_prefetch",
)  # fmt: skip
LORA_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora")
ORDER_KEYS = (
    "dataset_rows", "dataset_sha256", "seed", "shuffle_dataset", "ignore_data_skip", "dataloader_drop_last",
    "prompts_per_batch", "steps_per_batch",
)  # fmt: skip
OPTIMIZER_KEYS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
NOTES = dict.fromkeys(
    ORDER_KEYS, " (the order of the prompts changes: some are trained on twice, others not at all)"
) | dict.fromkeys(OPTIMIZER_KEYS, " (no effect: the optimizer's saved state keeps the old value)")


def run_record(trainer: Any) -> dict[str, Any]:
    """The settings and the data that determine a run's results, as JSON data."""
    args, lora = trainer.args, trainer._peft_config
    left_out = {each.name for each in dataclasses.fields(args) if not each.metadata.get("trained", True)}
    record = {k: v for k, v in args.to_dict().items() if k not in left_out and not k.startswith(NOT_TRAINED)} | {
        "model_name_or_path": trainer._model_name,
        "lora": lora and {k: getattr(lora, k, None) for k in LORA_KEYS},
        "world_size": args.world_size,
        "turn_advantage_coef": trainer.turn_advantage_coef,
        "reward_weights": [round(weight, 6) for weight in trainer.reward_weights.tolist()],
        "prompts_per_batch": args.generation_batch_size / args.num_generations,
        "steps_per_batch": args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps,
        "dataset_rows": len(trainer.train_dataset),
        "dataset_sha256": trainer._dataset_sha256,
    }
    return json.loads(json.dumps(record, default=lambda value: sorted(value) if isinstance(value, set) else "?"))


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line of text per setting that differs from the checkpoint's record."""
    changed = [key for key in now if key in before and before[key] != now[key]]
    return [f"{key}: {before[key]!r} -> {now[key]!r}{NOTES.get(key, '')}" for key in changed]


def dataset_sha256(dataset: Any) -> str:
    """The first digits of the SHA-256 of all rows, whatever the order of their columns."""
    digest = hashlib.sha256()
    for row in dataset:
        digest.update(json.dumps(row, sort_keys=True, default=image_or_str).encode() + b"\n")
    return digest.hexdigest()[:12]


@contextmanager
def loading(checkpoint: str | None) -> Iterator[None]:
    """A context in which any error becomes a `CheckpointError` that names the checkpoint."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # torch, pickle, PEFT and the states' own classes raise anything
        what = f"cannot be loaded: {error_line(error):.500}. Expected the model, lora_* and optim of this run"
        raise CheckpointError(f"resume_from_checkpoint={checkpoint!r} {what}.") from error


def load_missing(checkpoint: str, model: Any, missing: list[str]) -> None:
    """Load weights that `Trainer` did not find by name, such as experts. `CheckpointError` if any is missing."""
    state = model.state_dict()
    loaded = {tensor.data_ptr() for name, tensor in state.items() if name not in missing}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    missing = [name for name in missing if state[name].data_ptr() not in loaded and name not in ignored]  # but tied
    if missing and not hasattr(model, "peft_config"):
        # In float32, so that each weight gets what was saved of it: a head may be kept in more bits than the rest.
        whole, found = type(model).from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
        missing = sorted(found["missing_keys"])
        model.load_state_dict(whole.state_dict())
    if missing:
        text = f"lacks {len(missing)} weights of the model, such as {missing[0]}. Use its model and lora_* settings."
        raise CheckpointError(f"resume_from_checkpoint={checkpoint!r} {text}")


def load_first_adapter(checkpoint: str, model: Any) -> None:
    """Load the trained adapter if a checkpoint also has the reference's, in a folder that transformers alone reads.

    Raises `ValueError` if the checkpoint's adapter lacks weights of the model's: PEFT would keep new ones.
    """
    path = Path(checkpoint, "adapter_model.safetensors")
    if not hasattr(model, "peft_config") or not path.is_file():
        return
    saved, expected = load_file(path), get_peft_model_state_dict(model, adapter_name="default")
    if missing := sorted(expected.keys() - saved.keys()):
        raise ValueError(f"it lacks {len(missing)} weights of the LoRA, such as {missing[0]}. Use its lora_* settings")
    if len(model.peft_config) > 1:
        set_peft_model_state_dict(model, saved, adapter_name="default")


def weights_not_finite(model: Any) -> list[str]:
    """The names of parameters with a NaN or an infinite number. For a sharded model, in this rank's shards."""

    def shard_of(weight: Any) -> torch.Tensor:  # of ZeRO-3 without the padding at the end, which nobody wrote
        if not hasattr(weight, "ds_tensor"):
            return weight.to_local() if hasattr(weight, "to_local") else weight
        before = weight.ds_process_group.rank() * weight.ds_tensor.numel()
        return weight.ds_tensor[: max(0, weight.ds_numel - before)]

    shards = {name: shard_of(each).detach() for name, each in model.named_parameters()}
    # Numbers of 8 bits are frozen: they are of a quantised base.
    whole = {name: shard for name, shard in shards.items() if shard.is_floating_point() and shard.element_size() > 1}
    return [name for name, shard in whole.items() if not shard.isfinite().all()]


def get_rng_state() -> tuple:
    """The state of every generator that sampling may draw from on this rank."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def set_rng_state(state: tuple) -> None:
    """Restore the generators to a state from `get_rng_state`."""
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3])
