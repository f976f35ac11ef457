"""The policy's weights under their checkpoint names: all of them, or a LoRA as an adapter."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trl.generation.vllm_generation import VLLMGeneration

from mt_grpo.images.pictures import TOWER

NamedWeights = Iterator[tuple[str, torch.Tensor]]
NOISE = 0.7  # of the first push, relative to each element (docs/scaling.md says what it shows)
ADAPTER_FILE = "adapter_model.safetensors"  # as peft and vLLM name it
ADAPTER = "default"  # peft's name of the only one
# What of a LoraConfig an engine reads, or what changes nothing there. Any other setting that is not peft's default may
# change what the layers compute: such an adapter is merged before a push.
ENGINE_READS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "layers_to_transform",
    "layers_pattern", "init_lora_weights", "runtime_config",
}  # fmt: skip
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts for --max-lora-rank


class PolicyWeights(VLLMGeneration):
    """The parameters of a whole model, or of one that FSDP2 or ZeRO-3 shards. Two things differ from TRL's own.

    1. Each adapted layer is merged in a copy. TRL merges and unmerges the model, which in bf16 changes frozen weights.
    2. Tied parameters are yielded under all their names: vLLM on CPU does not update `lm_head` from the embedding.
    """

    in_files: Callable | None = None  # (model, name, tensor) -> the form in a checkpoint's files, if they need it

    def _init_vllm(self) -> None:
        """Collect the names of the weights. No vLLM client is made: `VLLMServerClient` sends the weights."""
        model = self.model
        if self._dist.fsdp_version == 1:
            raise ValueError("FSDP 1 cannot gather single parameters. Set fsdp_version: 2 in accelerate's config.")
        self.sharded = self._dist.is_fsdp or getattr(self.accelerator.state, "deepspeed_plugin", None) is not None
        self._has_adapters = is_peft_model(model)  # asked once: it looks for the package each time
        by_parameter: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not self._is_adapter(name):
                by_parameter.setdefault(id(parameter), []).append(self._server_name(name))
        if any(".trainable_tokens_delta." in name for name, _ in model.named_parameters()):
            advice = "Remove them, or train the whole embedding by modules_to_save"
            raise ValueError(f"LoraConfig's trainable_token_indices are not pushed to a server. {advice}.")
        self._tied = {name: set(names) - {name} for names in by_parameter.values() for name in names}

    @property
    def expected(self) -> dict[str, int]:
        """Name -> bytes of the weights that one push sends. Computed anew: FSDP2 and DeepSpeed may change dtypes."""
        sizes = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not self._is_adapter(name):
                shape = getattr(parameter, "ds_shape", parameter.shape)
                stand_in = torch.empty(shape, dtype=parameter.dtype, device="meta")
                sizes |= {n: t.nbytes for n, t in self._as_sent(self._server_name(name), stand_in).items()}
        return sizes

    @property
    def of_adapter(self) -> dict[str, int]:
        """Name -> bytes of the weights of the LoRA adapter."""
        return {name: tensor.nbytes for name, tensor in adapter_weights(self.model)}

    def _is_adapter(self, name: str) -> bool:
        return self._has_adapters and (self.model.prefix in name or "original_module" in name)

    def _server_name(self, name: str) -> str:
        name = name.replace("_orig_mod.", "").removeprefix("base_model.model.").replace(".base_layer", "")
        return self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."])

    def _as_sent(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.in_files is None:
            return {name: tensor}
        return self.in_files(self.model.get_base_model() if self._has_adapters else self.model, name, tensor.detach())

    @contextmanager
    def noise(self, adapter: bool) -> Iterator[None]:
        """Context manager that puts noise on every tensor that a push sends, and restores the weights bit for bit.

        Each element gets `NOISE` * z times its own size, with z drawn from a generator that the tensor's name seeds.
        The originals are kept on the CPU. Each rank changes its own shards.
        """
        originals: dict[str, torch.Tensor] = {}
        try:
            for name, tensor, least in self._local_parts(adapter):
                originals[name] = tensor.to("cpu", copy=True)
                generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
                noise = torch.empty_like(tensor).normal_(0, NOISE, generator=generator)
                tensor.add_(noise.mul_(tensor.abs().clamp_(min=least)))
            yield
        finally:
            for name, tensor, _ in self._local_parts(adapter):
                if name in originals:
                    tensor.copy_(originals[name])

    def _local_parts(self, adapter: bool) -> Iterator[tuple[str, torch.Tensor, float]]:
        """Yield (name, this rank's part, least size of noise) of each pushed tensor, which may be changed in place.

        INVARIANT: no whole copy of a sharded weight outlives it, which the next forward pass would read.
        """
        self._reshard()
        for name, parameter in self.model.named_parameters():
            if "original_module" in name or adapter and not is_of_adapter(name):
                continue
            shape, tensor = parameter.shape, parameter.detach()
            if hasattr(parameter, "ds_tensor"):
                with self._dist.gather_params([parameter]):
                    shape = parameter.shape
                tensor = parameter.ds_tensor.detach()
            elif isinstance(parameter, DTensor):
                tensor = tensor.to_local()
            # A matrix of zeros, such as a new adapter's lora_B, gets noise of the size of usual weights.
            yield name, tensor, 0.1 if len(shape) < 2 else 0.0 if tensor.any() else shape[-1] ** -0.5

    def _reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # a forward pass leaves the root's weights whole
                module.reshard()

    def named_weights(self) -> NamedWeights:
        """Yield (name, full tensor) with merged adapters. A tensor is valid only until the next one is requested.

        A `Parameter` is the model's own. Gathering shards is collective, so every rank iterates to the end.
        """
        self._reshard()
        layers = {n: module for n, module in self.model.named_modules() if isinstance(module, BaseTunerLayer)}
        sent, device = set(), self.accelerator.device
        for path, parameter in self.model.named_parameters():
            if self._is_adapter(path):
                continue
            name = self._server_name(path)
            layer, _, inner = path.rpartition(".base_layer.")
            while layer.endswith(".base_layer"):  # a layer in a layer, as PEFT has two parameters of one module
                layer = layer.removesuffix(".base_layer")
            needed = list(layers[layer].parameters()) if layer in layers else [parameter]
            with self._dist.gather_params(needed):  # of ZeRO-3, which changes no shard when it leaves
                # Collective where FSDP2 shards it. It may be offloaded to the CPU.
                whole = {
                    id(p): p.detach().to(device).full_tensor() if isinstance(p, DTensor) else p.data for p in needed
                }
                tensor = whole[id(parameter)]
                if layer in layers:
                    tensor = self._merged_copy(layers[layer], whole).get_base_layer().get_parameter(inner).data
                elif not self.sharded:
                    tensor = parameter
                for alias in (name, *sorted(self._tied.get(name, ()))):
                    if alias not in sent:
                        sent.add(alias)
                        yield from self._as_sent(alias, tensor).items()

    @staticmethod
    def _merged_copy(layer: Any, whole: dict[int, torch.Tensor]) -> Any:
        """A merged copy of an adapted layer. `whole` maps the id of each of its parameters to the full tensor."""
        copies = {key: torch.nn.Parameter(tensor.clone(), requires_grad=False) for key, tensor in whole.items()}
        merged = inner = copy.deepcopy(layer, copies)  # which takes `copies` in place of the parameters
        while hasattr(inner, "base_layer"):
            inner.merge()
            inner = inner.base_layer
        return merged


@contextmanager
def off_by_rounding(model: Any, size: float) -> Iterator[None]:
    """Context manager in which embeddings carry relative noise of `size`, new in each pass: all else rounds anew.

    Right computations in another order were 0.7 to 1.8 times as far apart (bf16, `size` 2^-8; 2^-20 for float32).
    """

    seeds = itertools.count()

    def change(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(output.device).manual_seed(next(seeds))
        return output + output * torch.empty_like(output).normal_(0, size, generator=generator)

    handle = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


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
    """Why the LoRA of a model has to be merged before a push. None if a server can load it."""
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
        if hasattr(module, "lora_A") and TOWER.search(f"{name}."):
            return f"it changes {name}, which is part of the vision tower"
    return None


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of a model with LoRA is one of an adapter's two matrices."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_weights(model: Any) -> NamedWeights:
    """Yield (name, tensor) of each weight of an adapter, named as in its file."""
    for name, parameter in model.named_parameters():
        if is_of_adapter(name):
            yield name.replace(f".{ADAPTER}.", "."), parameter.data
