"""Run by test_sharded.py and test_zero3.py on two ranks: the trainer with weights that are sharded, on a CPU.

Each push is checked.

    python tests/sharded_worker.py train ARGUMENTS     # of mt_grpo_trainer.py
    python tests/sharded_worker.py weights ARGUMENTS   # trains, and compares what would be pushed after the last step

With FAULT="server lost" in the environment one push of `train` fails.

Accelerate shards by FSDP2 on GPUs alone: with an FSDP2 configuration and `use_cpu: true` it trains by DDP, which the
trainer refuses. Here accelerate's state is told that it shards. Everything behind that is its own code and PyTorch's,
on gloo. ZeRO-3 needs no such help: DeepSpeed runs on a CPU with DS_ACCELERATOR=cpu.
"""

import functools
import itertools
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mt_grpo_trainer as mt
from mt_grpo.base.errors import ServerLost
from mt_grpo.generation.weight_sync import WeightSync
from mt_grpo.generation.weight_transfer import WeightTransfer
from mt_grpo.generation.weights import PolicyWeights
from mt_grpo.training.shared_prompts import SharedRow

own_init = AcceleratorState.__init__


@functools.wraps(own_init)
def sharding_init(self, *args, fsdp_plugin=None, **kwargs):
    own_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
    if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a part of it only. ZeRO-3 leaves an empty tensor in its place."""
    if hasattr(parameter, "ds_shape"):
        return parameter.numel() == 0 and parameter.ds_tensor.numel() < parameter.ds_shape.numel()
    return isinstance(parameter, DTensor) and parameter.to_local().numel() < parameter.numel()


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter from all its shards. Collective."""
    if hasattr(parameter, "ds_shape"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
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
    """After the last step: the iteration over the weights: whole, and with noise."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.weights = PolicyWeights(trainer.model, trainer.accelerator, trainer.processing_class, mode="none")

    def on_train_end(self, args, state, control, **kwargs):
        model = self.weights.model = self.trainer.model  # wrapped anew when training started, as for a push
        assert_sharded(model)
        expected = self.expected = expected_weights(model)
        self.compare(dict(self.copied()))
        own = self.exact(model)
        logits = self.logits(model)  # behind it the root's weights are whole
        self.compare(dict(self.copied()))
        self.logits(model)
        with self.weights.noise(adapter=False):
            noisy = expected_weights(model)
            same = [name for name, value in noisy.items() if torch.equal(value, expected[name])]
            assert not same and noisy.keys() == expected.keys(), same
            assert (self.logits(model) - logits).abs().mean() > 0.1
            self.compare(dict(self.copied()), noisy)
            self.logits(model)
        assert torch.equal(self.logits(model), logits)
        assert all(torch.equal(value, own[name]) for name, value in self.exact(model).items())
        rank = args.process_index
        torch.save(dict(self.copied()), Path(args.output_dir) / f"pushed-{rank}.pt")
        print(f"rank {rank}: {len(expected)} weights are equal", flush=True)

    def exact(self, model) -> dict[str, torch.Tensor]:
        return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}

    def logits(self, model) -> torch.Tensor:
        model.eval()  # LoRA's dropout
        with torch.no_grad():
            return model(input_ids=torch.tensor([[1, 2, 3]])).logits.float()

    def copied(self):
        return ((name, tensor.detach().clone()) for name, tensor in self.weights.named_weights())

    def compare(self, found, expected=None):
        expected = self.expected if expected is None else expected
        assert found.keys() == expected.keys() == self.weights.expected.keys(), found.keys() ^ expected.keys()
        assert {name: tensor.nbytes for name, tensor in found.items()} == self.weights.expected
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def assert_sharded(model: torch.nn.Module) -> None:
    whole_ones = [n for n, p in model.named_parameters() if not is_sharded(p) and n.split(".")[-1] != "bias"]
    assert not whole_ones, f"not sharded: {whole_ones[:3]}"


class Failing:
    """An iteration over the weights whose reader fails after five of them."""

    def __init__(self, weights, error: Exception):
        self.weights, self.error = weights, error

    def __iter__(self):
        yield from itertools.islice(self.weights, 5)
        raise self.error


def fail_once() -> None:
    """Make the third push fail: the first ones are the check that pushes arrive, and step 1."""
    pushes, write = itertools.count(1), WeightTransfer._write

    def write_or_fail(self, named_weights, *args):
        lost = ServerLost("lost after 5 weights")
        return write(self, Failing(named_weights, lost) if next(pushes) == 3 else named_weights, *args)

    WeightTransfer._write = write_or_fail


def check_each_pass() -> None:
    """Logprobs are float32, and gradients add up so: of FSDP2, behind each pass, on the ranks that own them."""
    step, spread = Trainer.training_step, SharedRow.spread

    def step_and_check(self, model, *args):
        loss = step(self, model, *args)
        if self.is_deepspeed_enabled:
            assert model.optimizer.gradient_accumulation_dtype == torch.float32
        else:
            assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad), "not handed out"
        return loss

    def check_and_spread(self, values):
        if values.dtype != torch.float32:
            sys.exit(f"logprobs in {values.dtype}")  # no error, which would only end the try of shared rows
        return spread(self, values)

    Trainer.training_step, SharedRow.spread = step_and_check, check_and_spread


def main() -> None:
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        AcceleratorState.__init__ = sharding_init
    check_each_pass()
    WeightSync.CHECK_EVERY = 1
    what, *arguments = sys.argv[1:]
    if what == "train":
        if os.environ.get("FAULT") == "server lost" and os.environ["RANK"] == "0":
            fail_once()
        return mt.main(arguments)
    trainer = mt.build_trainer(*mt.parse_arguments(arguments))
    trainer.add_callback(CompareWeights(trainer))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
