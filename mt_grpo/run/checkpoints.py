"""Whether a folder is a whole checkpoint, and from which checkpoint a run resumes."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import TrainingArguments
from transformers.core_model_loading import revert_weight_conversion
from transformers.training_args import OptimizerNames

from mt_grpo.base.files import absolute, read_json
from mt_grpo.base.json_types import fits_type, image_or_str
from mt_grpo.run.next_prompts import IN_FLIGHT
from mt_grpo.run.saved_states import (
    CheckpointError,
    check_optimizer,
    load_on_all_ranks,
    small_file_damage,
    state_damage,
)

logger = logging.getLogger(__name__)


# Whether the disk has room for what a run saves.


def bytes_to_save(model: Any, optim: OptimizerNames, sharded: bool) -> tuple[int, int]:
    """(bytes of the trained model, bytes of one checkpoint), computed from the parameters.

    With LoRA only the adapter is saved. A sharded checkpoint (FSDP, DeepSpeed) holds the weights twice, and the
    optimizer's state in float32.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    saved = trained if is_peft_model(model) else model.parameters()
    weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in saved)
    numbers = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    size = 4 if sharded else 1 if "8bit" in optim.value else max((p.element_size() for p in trained), default=0)
    moments = 2 if "adam" in optim.value else 0  # others keep less state, which is not counted
    return weights, weights * (2 if sharded else 1) + numbers * (moments + sharded) * size


def check_room(folder: str, least: int, planned: int, what: str, key: str) -> None:
    """Raise `ValueError` if a directory has no room for `least` bytes plus 5 %; warn if it has none for `planned`.

    A directory that cannot be written raises `ValueError` too. For the message: `what` is saved there, and `key` is
    the setting that names the directory.
    """
    gib = 2.0**30
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            usage = shutil.disk_usage(folder)
    except OSError as error:
        raise ValueError(f"{key}={folder!r} cannot be written: {error}. Set {key} to a writable directory.") from None
    found = f"{key}={folder!r} has {usage.free / gib:.3f} GiB free"
    if usage.total and usage.free < 1.05 * least:  # some network file systems report a size of 0
        raise ValueError(f"{found}, and {what} needs {1.05 * least / gib:.3f} GiB. Free space, or set another {key}.")
    if usage.total and usage.free < 1.05 * planned:
        logger.warning(
            f"{found}, and all checkpoints of the run may need {1.05 * planned / gib:.3f} GiB. Free space, or set "
            "save_total_limit."
        )


# What determines the results of a run, and which settings of a resumed run differ from its checkpoint's.


# Prefixes of TRL's settings that do not change what is trained. A checkpoint's record leaves such settings out.
NOT_TRAINED = (
    "output_dir", "resume_from_checkpoint", "logging_", "log_", "save_", "hub_", "push_", "report_to", "run_name",
    "project", "trackio_", "eval_", "per_device_eval_", "num_generations_eval", "include_", "disable_tqdm",
    "num_completions_to_print", "ddp_", "skip_memory_metrics", "debug", "vllm_server_", "vllm_group_port",
    "vllm_gpu_memory_utilization", "load_best_model", "metric_for_best_model", "greater_is_better",
    "restore_callback", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent",
    "dataloader_prefetch",
)  # fmt: skip
# ORDER_KEYS decide which prompts a step trains on, and SIZE_KEYS only if a batch of rollouts gets another size.
# OPTIMIZER_KEYS are held by the checkpoint's optimizer state itself.
ORDER_KEYS = ("dataset_rows", "dataset_sha256", "seed", "shuffle_dataset", "ignore_data_skip", "dataloader_drop_last")
PASSES_KEYS = ("steps_per_generation", "num_iterations", "gradient_accumulation_steps")
SIZE_KEYS = ("generation_batch_size", "num_generations", *PASSES_KEYS)
LORA_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora")
OPTIMIZER_KEYS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def trained_settings(args: TrainingArguments) -> dict[str, Any]:
    """The settings that change what is trained, by their names."""
    left_out = {each.name for each in dataclasses.fields(args) if not each.metadata.get("trained", True)}
    return {k: v for k, v in args.to_dict().items() if k not in left_out and not k.startswith(NOT_TRAINED)}


def batch_of_rollouts(record: dict[str, Any]) -> tuple[float, float] | None:
    """(prompts of a batch of rollouts, optimizer steps that it serves) of a record; None if it does not say so."""
    if not all(isinstance(record.get(key), int) and record[key] for key in SIZE_KEYS):
        return None
    rollouts, group, passes, iterations, accumulated = (record[key] for key in SIZE_KEYS)
    return rollouts / group, passes * iterations / accumulated


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line of text per setting whose value in a resumed run differs from its checkpoint's record.

    >>> changed_settings({"seed": 1, "beta": 0.0, "gone": 1}, {"seed": 2, "beta": 0.0, "new": 1})
    ['seed: 1 -> 2 (the order of the prompts changes: some are trained on twice, others not at all)']
    """
    moved = SIZE_KEYS if batch_of_rollouts(before) != batch_of_rollouts(now) else ()
    notes = dict.fromkeys(
        (*ORDER_KEYS, *moved), " (the order of the prompts changes: some are trained on twice, others not at all)"
    ) | dict.fromkeys(OPTIMIZER_KEYS, " (no effect: the optimizer's saved state keeps the old value)")
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


def run_record(trainer: Any) -> dict[str, Any]:
    """The record of what determines a run's results: settings, and hashes of the files and texts that they name."""
    settings, lora, env = trained_settings(trainer.args), trainer._peft_config, trainer.env
    columns = {
        "model_name_or_path": trainer._model_name,
        "lora": lora and {k: getattr(lora, k, None) for k in LORA_KEYS},
        "world_size": trainer.args.world_size, "save_on_each_node": trainer.args.save_on_each_node,
        "turn_advantage_coef": trainer.turn_advantage_coef,
        "reward_weights": [round(weight, 6) for weight in trainer.reward_weights.tolist()],
        "rewards_sha256": {n: source_sha256(f) for n, f in zip(trainer.reward_func_names, trainer.reward_funcs)},
        "environment_sha256": source_sha256(type(env)),
        "environments_sha256": {name: class_sha256(cls) for name, cls in classes_of(env).items()},
        "tools_sha256": {name: source_sha256(tool) for name, tool in env.tools.items()},
        "system_prompt_sha256": sha256(str(env.system_prompt)),
        "prompt_examples_sha256": sha256(json.dumps(env.prompt_examples, default=str)),
        "chat_template_sha256": sha256(str(trainer.processing_class.chat_template)),
        "dataset_rows": len(trainer.train_dataset), "dataset_sha256": trainer._dataset_sha256,
    }  # fmt: skip
    plain = json.dumps(settings | columns, default=lambda value: sorted(value) if isinstance(value, set) else "?")
    return json.loads(plain)


def classes_of(env: Any) -> dict[str, type]:
    """The classes of a run's environments by their names; none where its conversations have none."""
    return {} if env.environments is None else env.environments.by_name


def class_sha256(cls: type) -> str:
    """The `sha256` of the files that define a class and what it is made of, but for the project's own and Python's."""
    others = {*sys.stdlib_module_names, "mt_grpo"}
    own = [each for each in cls.__mro__ if each.__module__.partition(".")[0] not in others]
    return sha256(json.dumps(sorted(filter(None, map(source_sha256, own)))))


def dataset_sha256(dataset: Any) -> str:
    """The `sha256` of all rows. It depends neither on the kind of file nor on the order of the columns.

    A column is hashed as the JSON of a list, in which a row that lacks the column has nothing between the commas: a
    null that is written is another row than one that is not.
    """
    hashes = {name: hashlib.sha256(b"[") for name in dataset.column_names}
    for number, row in enumerate(dataset):
        for name, digest in hashes.items():
            value = json.dumps(row[name], default=image_or_str) if name in row else ""
            digest.update(f"{', ' if number else ''}{value}".encode())
    columns = {}
    for name in sorted(hashes):
        hashes[name].update(b"]")
        columns[name] = hashes[name].hexdigest()[:12]
    return sha256(json.dumps(columns))


# Files that Trainer, FSDP or DeepSpeed save besides the model. A checkpoint of `save_only_model` has none of them.
STATE_FILES = ("optimizer*", "scheduler.pt", "rng_state*.pth", "latest")
MODEL_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin*", "adapter_model.*",
               "pytorch_model_fsdp*", "*/adapter_model.*")  # fmt: skip
RUN_RECORD = "mt_grpo_run.json"  # beside trainer_state.json: the settings that the checkpoint was trained with


def checkpoint_to_resume(wanted: str | bool | None, output_dir: str) -> str | None:
    """The folder that `resume_from_checkpoint` means; None if the setting is empty.

    `last` or `true` means the newest checkpoint of `output_dir`. Raises `ValueError` if the folder is not a complete
    checkpoint, or has only a model.
    """
    if not wanted:
        return None
    # Trainer writes trainer_state.json last, so a checkpoint without this file is incomplete. The newest checkpoint is
    # used, not the one of the highest step: an older run in the same folder may have made more steps.
    whole = [path.parent for path in Path(output_dir).glob("checkpoint-*/trainer_state.json") if is_json(path)]
    whole = [folder for folder in whole if re.fullmatch(r"checkpoint-\d+", folder.name)]
    whole.sort(key=lambda folder: -int(folder.name.rpartition("-")[2]))
    newest = max(whole, key=lambda folder: (folder / "trainer_state.json").stat().st_mtime, default=None)
    if whole and newest != whole[0]:
        logger.warning(f"{newest} is the newest checkpoint and is used: it was written after {whole[0]}.")
    found = newest if str(wanted).lower() in ("last", "true") else Path(absolute(str(wanted)))
    if found is None or not (found / "trainer_state.json").is_file():
        raise ValueError(
            f"resume_from_checkpoint={wanted!r} is no whole checkpoint: it has no trainer_state.json. "
            + (f"Set it to {newest}." if newest else f"There is none in output_dir={output_dir!r}.")
        )
    if not any(path for name in STATE_FILES for path in found.glob(name)):
        raise ValueError(
            f"resume_from_checkpoint={str(found)!r} has a model only (save_only_model). To start from its weights, "
            f"set model_name_or_path: {found} instead."
        )
    if damage := checkpoint_damage(found):
        others = [folder for folder in whole if folder.resolve() != found.resolve() and not checkpoint_damage(folder)]
        before = max(others, key=lambda folder: (folder / "trainer_state.json").stat().st_mtime, default=None)
        none = f"There is no other one in output_dir={output_dir!r}: start a new run"
        raise ValueError(
            f"resume_from_checkpoint={str(wanted)!r}: {found / damage}. Expected a complete checkpoint. "
            f"{f'Set resume_from_checkpoint: {before}' if before else none}, or restore the file."
        )
    return str(found)


def is_json(path: Path) -> bool:
    """Whether a file was written to its end. Logs a warning if it was not."""
    with suppress(OSError, ValueError, RecursionError):
        json.loads(path.read_text(encoding="utf-8"))
        return True
    logger.warning(f"{path.parent} is incomplete and is passed over: {path.name} is not whole.")
    return False


def checkpoint_damage(folder: Path) -> str | None:
    """The first missing or damaged file of a checkpoint and its problem, as text. None if there is none.

    Only headers and sizes of files are read. The known layouts are those of `Trainer`, LoRA, FSDP (folders of
    `.distcp` files, or `.bin`) and DeepSpeed (`latest` names a folder with model, optimizer and scheduler).
    """
    record = read_json(folder / RUN_RECORD) or {}
    if not is_record(record):  # if it is missing or not an object, the trainer warns, and the run goes on
        return f"{RUN_RECORD} cannot be read"
    if wrong := state_damage(folder):
        return wrong
    deepspeed = (folder / "latest").is_file()
    expected = [] if deepspeed else ["scheduler.pt"]
    if deepspeed:
        states = (folder / "latest").read_text(errors="replace").strip()
        if not states or not any(folder.glob(f"{states}/*_states.pt")):
            return f"{states or 'latest'} has no states of the model and the optimizer"
    else:
        if not any(path for name in MODEL_FILES for path in folder.glob(name)):
            is_lora = (folder / "adapter_config.json").is_file()
            expected.append("adapter_model.safetensors" if is_lora else "model.safetensors")
        in_fsdp_form = any(path.is_dir() or path.suffix == ".bin" for path in folder.glob("optimizer*"))
        if in_fsdp_form and not any(folder.glob("pytorch_model_fsdp*")):
            return "pytorch_model_fsdp* is missing"
        expected += [] if in_fsdp_form else ["optimizer.pt"]
    for index in folder.glob("*.index.json"):
        shards = (read_json(index) or {}).get("weight_map")
        if not shards or not fits_type(shards, dict[str, str]):
            return f"{index.name} cannot be read"
        expected += sorted(set(shards.values()))
    numbers = [int(path.stem.rpartition("_")[2]) for path in folder.glob("rng_state_*.pth")]
    world_size = record.get("world_size") or max(numbers, default=0) + 1
    if not record.get("save_on_each_node"):  # otherwise other nodes hold the files of their ranks
        alone = world_size == 1 and not numbers
        expected += ["rng_state.pth"] if alone else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    expected += ["entropy_ctrl_state.json"] if record.get("use_adaptive_entropy") else []
    admits = record.get("late_groups") == "admit" and record.get("max_staleness")
    expected += [IN_FLIGHT] if admits else []
    for name in expected:
        if not (folder / name).is_file():
            return f"{name} is missing"
    if admits and not read_json(folder / IN_FLIGHT):
        return f"{IN_FLIGHT} cannot be read"
    for name in ("adapter_config.json", "config.json"):
        if (folder / name).is_file() and read_json(folder / name) is None:
            return f"{name} cannot be read"
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".distcp" and not (path.parent / ".metadata").is_file():
            return f"{path.parent.relative_to(folder)}/.metadata is missing"
        wrong = path.is_file() and (file_damage(path) or (path.parent == folder and small_file_damage(path)))
        if wrong:
            return f"{path.relative_to(folder)} {wrong}"
    return None


def is_record(record: dict[str, Any]) -> bool:
    """Whether the values that a resumed run reads from a `RUN_RECORD` have the right types.

    >>> is_record({"world_size": 2}), is_record({"world_size": "two"}), is_record({})
    (True, False, True)
    """
    return all(isinstance(record.get(name) or 0, int) for name in ("world_size", "max_staleness"))


def check_tensors(folder: Path, model: Any) -> None:
    """Raise `CheckpointError` if a checkpoint lacks a tensor of the model, or has it in another shape.

    transformers only warns of it, and the run would go on with the weights that the model had before. Tied weights
    need to be there once. FSDP's and DeepSpeed's own formats are not read: torch and DeepSpeed check them.
    """
    files = [*folder.glob("model*.safetensors"), *folder.glob("adapter_model.safetensors")]
    if not files or (folder / "latest").is_file() or any(folder.glob("pytorch_model_fsdp*")):
        return
    shapes: dict[str, list[int]] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Resume from another checkpoint.") from None
    if hasattr(model, "peft_config"):
        names: dict[str, list[str]] = {}
        expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    else:
        names, state = {}, model.state_dict()  # names by the place in memory: those of tied weights
        for name, tensor in state.items():
            names.setdefault(f"{tensor.data_ptr()} {tuple(tensor.shape)}", []).append(name)
        names = {
            place: [new for name in group for new in as_saved(model, {name: state[name]})]
            for place, group in names.items()
            if len(group) > 1
        }
        expected = as_saved(model, state)
    tied = {name: group for group in names.values() for name in group}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    for name, tensor in expected.items():
        found = [other for other in tied.get(name, [name]) if other in shapes]
        problem = None if found or name in ignored else "is missing"
        if found and list(tensor.shape) not in [shapes[other] for other in found]:
            problem = f"has the shape {shapes[found[0]]}, expected {list(tensor.shape)}"
        if problem:
            raise CheckpointError(
                f"resume_from_checkpoint={str(folder)!r}: the tensor {name} {problem}. Expected all weights of the "
                "trained model. Resume from another checkpoint, or with the model_name_or_path and the lora_* "
                "settings of this one."
            )


def as_saved(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Name -> tensor without values, with the names and shapes with which transformers saves tensors of a model.

    They follow the model's publisher: the experts of a layer, one tensor in memory, may be many in the file.
    """
    return dict(revert_weight_conversion(model, {name: tensor.to("meta") for name, tensor in tensors.items()}))


def load_as_saved(folder: Path, model: Any) -> None:
    """Load the weights of a checkpoint into a model that transformers saves under other names than the model's own.

    Resuming in transformers goes by the model's own names. It warns, and trains on with the layers of the base model.
    """
    state = {} if hasattr(model, "peft_config") else model.state_dict()
    if set(as_saved(model, state)) != set(state):
        # In float32, so that each weight gets what was saved of it: a head may be kept in more bits than the rest.
        model.load_state_dict(type(model).from_pretrained(folder, dtype=torch.float32).state_dict())


def load_first_adapter(folder: Path, model: Any) -> None:
    """Load the trained adapter if a checkpoint has another one, too.

    PEFT saves it in the folder itself, and the reference (`beta` above 0) in one inside. transformers reads those
    inside alone, and would train on from the adapter that the run began with.
    """
    path = folder / "adapter_model.safetensors"
    if len(getattr(model, "peft_config", ())) > 1 and path.is_file():
        set_peft_model_state_dict(model, load_file(path), adapter_name="default")


def file_damage(path: Path) -> str | None:
    """The problem of a file of weights or states, by its header and size. None if there is none."""
    fsdp = path.name == ".metadata" or path.suffix == ".distcp"
    if path.name == "training_args.bin" or not (fsdp or path.suffix in (".safetensors", ".bin", ".pt", ".pth")):
        return None
    size = path.stat().st_size
    if size == 0:
        return "is empty"
    if path.suffix == ".safetensors":
        try:
            with open(path, "rb") as file:
                header = file.read(min(int.from_bytes(file.read(8), "little"), size))
            ends = [entry["data_offsets"][1] for n, entry in json.loads(header).items() if n != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return "has no readable header"
        whole = 8 + len(header) + max(ends, default=0)
        return None if size == whole else f"has {size} bytes, expected {whole}"
    if fsdp:
        return None
    with open(path, "rb") as file:
        is_pickle = file.read(1) == b"\x80"  # torch's format before its zip format
    try:
        if not is_pickle:
            zipfile.ZipFile(path).close()
    except zipfile.BadZipFile:
        return f"is truncated or damaged ({size} bytes)"
    return None


def weights_not_finite(model: Any) -> list[str]:
    """The names of parameters with a NaN or an infinite number. For a sharded model, in this rank's shards.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> layer.bias.data[0] = float("nan")
    >>> weights_not_finite(layer)
    ['bias']
    """
    names = []
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "ds_tensor", parameter).detach()
        shard = shard.to_local() if hasattr(shard, "to_local") else shard
        # Numbers of 8 bits are frozen: they are of a quantised base.
        whole = shard.is_floating_point() and shard.element_size() > 1
        if whole and not bool(shard.isfinite().all()):
            names.append(name)
    return names


@contextmanager
def whole_reference(args: Any) -> Iterator[None]:
    """Within it every rank reads the checkpoint of a run that has a reference model (`beta` above 0).

    With `fsdp_cpu_ram_efficient_loading` transformers reads it on rank 0 alone. accelerate hands the policy's weights
    out from there. TRL 1.16 shards the reference without handing anything out: the other ranks' shards would be of
    memory that nobody wrote, and the KL term would pull to noise (at the first step it was 7.7 in place of 0).
    """
    key = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.get(key)
    if before is not None and getattr(args, "beta", 0.0) != 0.0:
        os.environ[key] = "false"
    try:
        yield
    finally:
        if before is not None:
            os.environ[key] = before


def load_model(trainer: Any, load: Callable, checkpoint: str, model: Any) -> None:
    """`Trainer`'s `load`, for models, too, whose weights are saved under other names. Raises `CheckpointError`."""

    def load_whole() -> None:
        load(checkpoint, model)
        if not trainer._is_sharded:
            load_as_saved(Path(checkpoint), trainer.model)
            load_first_adapter(Path(checkpoint), trainer.model)

    load_on_all_ranks(checkpoint, "the model", load_whole)


def load_best(trainer: Any, load: Callable) -> None:
    """`Trainer`'s `load` of the best checkpoint, for models, too, whose weights are saved under other names."""
    load()
    if trainer.state.best_model_checkpoint and not trainer._is_sharded:
        load_as_saved(Path(trainer.state.best_model_checkpoint), trainer.model)


def load_optimizer(trainer: Any, load: Callable, checkpoint: str | None) -> None:
    """`Trainer`'s `load`, for states that fit the parameters. Raises `CheckpointError`."""

    def load_fitting() -> None:
        load(checkpoint)
        if not trainer._is_sharded:
            check_optimizer(trainer.optimizer)

    if checkpoint is not None:
        what = "the state of the optimizer (optimizer.pt) or of what goes with it"
        load_on_all_ranks(checkpoint, what, load_fitting)


def load_random_numbers(load: Callable, checkpoint: str | None) -> None:
    """`Trainer`'s `load`. Raises `CheckpointError`."""
    if checkpoint is not None:
        load_on_all_ranks(checkpoint, "the state of the random numbers (rng_state*.pth)", lambda: load(checkpoint))
