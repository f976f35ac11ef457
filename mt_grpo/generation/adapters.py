"""LoRA pushed as an adapter: whether a server can load it next to its own weights, and its two files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from packaging.version import Version
from peft import LoraConfig, PeftModel

from mt_grpo.images.pictures import TOWER

ADAPTER_FILE = "adapter_model.safetensors"  # as peft and vLLM name it
ADAPTER = "default"  # peft's name of the only one
# What of a LoraConfig an engine reads, or what changes nothing there. Any other setting that is not peft's default may
# change what the layers compute: such an adapter is merged before a push.
ENGINE_READS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "layers_to_transform",
    "layers_pattern", "init_lora_weights", "runtime_config",
}  # fmt: skip
FLAGS = "--enable-lora --max-loras {slots} --max-lora-rank {rank}, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
# Before, a load could move adapters of requests in flight to each other's places (vLLM's issue 47724).
LEAST_VLLM = Version("0.31")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts for --max-lora-rank


def room_for(rank: int) -> int:
    """The smallest `--max-lora-rank` that has room for an adapter of this rank."""
    return min(room for room in RANKS if room >= rank)


def slots_of(max_staleness: int) -> int:
    """How many adapters conversations in flight may name: one for each older version, and the newest."""
    return max_staleness + 2


def why_config_merges(config: Any) -> str | None:
    """Why a LoRA of this configuration has to be merged before a push. None if a server can load it."""
    if type(config) is not LoraConfig:
        return f"it is a {type(config).__name__}"
    if config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        return f"init_lora_weights={config.init_lora_weights!r} changes the model's own weights"
    if config.r > RANKS[-1]:
        return f"its rank is {config.r}, and vLLM accepts at most {RANKS[-1]}"
    plain = LoraConfig()
    for field in dataclasses.fields(LoraConfig):
        value = getattr(config, field.name)
        if field.name not in ENGINE_READS and value != getattr(plain, field.name):
            return f"its configuration has {field.name}={sorted(value) if isinstance(value, set) else value!r}"
    return None


def why_model_merges(model: Any, sharded: bool) -> str | None:
    """Why the LoRA of a model, which may be sharded, has to be merged before a push. None if a server can load it."""
    if list(model.peft_config) != [ADAPTER]:
        return f"it has the adapters {', '.join(model.peft_config)}"
    if reason := why_config_merges(model.peft_config[ADAPTER]):
        return reason
    if sharded:
        return "the model is sharded, or managed by DeepSpeed"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_of_adapter(name):
            return f"{name} is trained in addition to it"
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and not isinstance(module.get_base_layer(), torch.nn.Linear):
            return f"it changes {name}, which is not a linear layer"
        if hasattr(module, "lora_A") and TOWER.search(f"{name}."):
            return f"it changes {name}, which is part of the vision tower"
    return None


def why_server_merges(server: Any, rank: int, slots: int) -> str | None:
    """Why a server cannot load adapters of this rank, `slots` of them at the same time. None if it can."""
    flags, where = FLAGS.format(rank=room_for(rank), slots=slots), server.base_url
    version = server.engine.version(server)
    if not re.match(r"\d", version) or Version(re.match(r"[\d.]*\d", version)[0]) < LEAST_VLLM:
        return f"{where} runs vLLM {version}, and loading adapters needs {LEAST_VLLM} or later"
    info = server.server_info()
    if (info.get("parallel_config") or {}).get("data_parallel_size", 1) > 1:
        return f"{where} runs several engines (data parallel)"
    if not (config := info.get("lora_config") or {}):
        return f"{where} was started without {flags}"
    if (most := int(config["max_lora_rank"])) < rank:
        return f"{where} has room for rank {most}, and lora_r is {rank}: start it with {flags}"
    if (most := int(config["max_loras"])) < slots:
        return f"{where} has room for {most} adapters at a time, and {slots} may be in flight: start it with {flags}"
    if (held := server.weight_version()) != "default":
        return f"{where} holds the weights {held!r} of another run: restart it"
    return None


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of a model with LoRA is one of an adapter's two matrices."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of each weight of an adapter, named as in its file."""
    for name, parameter in model.named_parameters():
        if is_of_adapter(name):
            yield name.replace(f".{ADAPTER}.", "."), parameter.data


def config_of(model: Any) -> LoraConfig | None:
    """The configuration of a policy's adapter; None for a policy without one."""
    return model.peft_config.get(ADAPTER) if isinstance(model, PeftModel) else None
