"""Run by test_sharded.py on two ranks: the trainer with weights that FSDP2 shards, on a CPU.

    python tests/sharded_worker.py train ARGUMENTS     # of mt_grpo_trainer.py
    python tests/sharded_worker.py weights ARGUMENTS   # trains, and compares what would be pushed after the last step

Accelerate shards on GPUs alone: with an FSDP2 configuration and `use_cpu: true` it trains by DDP, which the trainer
refuses. Here accelerate's state is told that it shards. Everything behind that is its own code and PyTorch's, on gloo.
"""

import functools
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mt_grpo_trainer as mt
from mt_grpo import preflight
from mt_grpo.weights import PolicyWeights

own_init = AcceleratorState.__init__


@functools.wraps(own_init)
def sharding_init(self, *args, fsdp_plugin=None, **kwargs):
    own_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
    if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter from all its shards. Collective."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def expected_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a server must get: whole weights under checkpoint names, adapters merged by their formula. Collective."""
    full = {name: whole(parameter).clone() for name, parameter in model.named_parameters(remove_duplicate=False)}
    found = {}
    for name, value in full.items():
        if "lora_" in name:
            continue
        layer, adapted, _ = name.partition(".base_layer.")
        if adapted:
            a, b = full[f"{layer}.lora_A.default.weight"], full[f"{layer}.lora_B.default.weight"]
            value = value + b @ a * model.get_submodule(layer).scaling["default"]
        found[name.removeprefix("base_model.model.").replace(".base_layer", "")] = value
    return found


class CompareWeights(TrainerCallback):
    """After the last step: the walk over the weights, whole, scaled, given up early on one rank, and whole again."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, []
        self.weights = PolicyWeights(trainer.model, trainer.accelerator, trainer.processing_class, mode="none")

    def on_train_end(self, args, state, control, **kwargs):
        model = self.weights.model = self.trainer.model  # wrapped anew when training started, as for a push
        shards = [p for p in model.parameters() if isinstance(p, DTensor)]
        assert shards and all(p.to_local().numel() < p.numel() for p in shards if p.shape[0] > 1), "nothing is sharded"
        expected = expected_weights(model)
        self.compare(dict(self.copied()), expected)
        scaled = dict(self.copied(norm_scale=3.0))
        self.compare(scaled, {**expected, "model.norm.weight": expected["model.norm.weight"] * 3.0})
        with torch.no_grad():
            model(input_ids=torch.tensor([[1, 2, 3]]))  # behind it the root's weights are whole
        self.compare(dict(self.copied()), expected)
        walk = self.weights.named_weights()
        for _ in range(3 if args.process_index == 0 else 10**6):  # rank 0 gives up, such as where a server is gone
            if next(walk, None) is None:
                break
        walk.close()
        self.compare(dict(self.copied()), expected)
        print(f"rank {args.process_index}: {len(expected)} weights are equal", flush=True)

    def copied(self, **kwargs):
        return ((name, tensor.detach().clone()) for name, tensor in self.weights.named_weights(**kwargs))

    def compare(self, found, expected):
        assert found.keys() == expected.keys() == self.weights.expected, found.keys() ^ expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def main() -> None:
    AcceleratorState.__init__ = sharding_init
    preflight.check_sharding = lambda args: None
    what, *arguments = sys.argv[1:]
    if what == "train":
        return mt.main(arguments)
    trainer = mt.build_trainer(*mt.parse_arguments(arguments))
    trainer.add_callback(CompareWeights(trainer))
    trainer.train()


if __name__ == "__main__":
    main()
