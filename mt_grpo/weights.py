"""The policy's parameters under their checkpoint names, and a count of the weight changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration


class PolicyWeights(VLLMGeneration):
    """TRL's iteration over the parameters (FSDP 1 and 2, ZeRO-3, PEFT) without its vLLM client. Two things differ.

    1. With an unsharded PEFT model each adapted layer is merged in a copy. TRL merges and unmerges the whole model
       itself, which in bf16 changes the frozen weights a little at every sync.
    2. Tied parameters are yielded under all their names. `named_parameters()` yields them once. vLLM on CPU packs
       `lm_head` at load and does not update it from the embedding, so it would sample from old weights.
    """

    def _init_vllm(self) -> None:
        """Collect the names of the weights. No vLLM client is made: `VLLMServerClient` sends the weights."""
        model = self.model
        self.sharded = self._dist.is_fsdp or getattr(self.accelerator.state, "deepspeed_plugin", None) is not None
        by_parameter: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not self._is_adapter(name):
                by_parameter.setdefault(id(parameter), []).append(self._server_name(name))
        self.expected = {name for names in by_parameter.values() for name in names}
        self._tied = {name: set(names) - {name} for names in by_parameter.values() for name in names}
        norms = [
            n for n, m in model.named_modules() if "Norm" in type(m).__name__ and not re.search(r"\.\d+(\.|$)", n)
        ]
        self.final_norm = norms[-1] if norms else None

    def _is_adapter(self, name: str) -> bool:
        return is_peft_model(self.model) and (self.model.prefix in name or "original_module" in name)

    def _server_name(self, name: str) -> str:
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        return self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."])

    def named_weights(self, norm_scale: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) with merged adapters. A tensor is valid only until the next one is requested.

        Gathering shards is collective: every rank must iterate to the end. A generator that is closed early runs to
        its end, so that no rank waits for ever and no adapter stays merged. `norm_scale` multiplies the final norm.
        """
        for module in self.model.modules():
            if isinstance(
                module, FSDPModule
            ):  # a forward pass leaves the root's weights whole, and TRL expects shards
                module.reshard()
        exact = is_peft_model(self.model) and not self.sharded
        source = self._merged_layer_by_layer() if exact else self._iter_named_params()
        scaled = self.final_norm and self._server_name(self.final_norm + ".weight").rpartition(".")[0]
        sent: set[str] = set()
        try:
            for name, tensor in source:
                if norm_scale != 1.0 and name.rpartition(".")[0] == scaled:
                    tensor = tensor * norm_scale
                for alias in (name, *sorted(self._tied.get(name, ()))):
                    if alias not in sent:
                        sent.add(alias)
                        yield alias, tensor
        finally:
            for _ in source:
                pass
            if is_peft_model(self.model):
                for module in self._adapted_layers().values():
                    if module.merged:
                        module.unmerge()

    def _adapted_layers(self) -> dict[str, Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return {name: module for name, module in self.model.named_modules() if isinstance(module, BaseTunerLayer)}

    def _merged_layer_by_layer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor). Adapted layers are merged in a copy, so that the policy's weights never change."""
        layers = self._adapted_layers()
        for name, parameter in self.model.named_parameters():
            if self._is_adapter(name):
                continue
            layer, base, inner = name.partition(".base_layer.")
            if base and layer in layers:
                merged = copy.deepcopy(layers[layer])
                merged.merge()
                parameter = merged.get_base_layer().get_parameter(inner)
            yield self._server_name(name), parameter.data


class WeightCounter(TrainerCallback):
    """Counts weight changes. `global_step` does not: loading a checkpoint changes the weights at the same step."""

    def __init__(self):
        self.version = 0
        self.loads = 0

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.version += 1

    def on_train_begin(self, args, state, control, **kwargs):  # after resume_from_checkpoint has loaded
        self.version += 1
        self.loads += 1

    def on_train_end(self, args, state, control, **kwargs):  # after load_best_model_at_end has loaded
        self.version += 1
        self.loads += 1
