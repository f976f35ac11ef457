"""A device that is not the CPU, without a GPU: tensors of the CPU in a wrapper, which are refused beside plain ones.

As on a GPU: an operation takes tensors of one device, and a plain one only as a number, as an index or to be copied.
`python other_device.py MODEL FOLDER CASE ...` trains on it, and saves the gradients of each case.
"""

import os
import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("gpu")
DEVICE = torch.device("gpu:0")
COPIES = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
INDEXED = "aten.index.", "aten.index_put", "aten._index_put"


class There(torch.Tensor):
    """A tensor of the device. `here` has its values."""

    @staticmethod
    def __new__(cls, here: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls, here.size(), here.stride(), here.storage_offset(), dtype=here.dtype, device=DEVICE
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, dict(kwargs or {}))


def run(func, args, kwargs):
    """The operation on the CPU, if its tensors are of one device."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    there = [each for each in tensors if isinstance(each, There)]
    plain = [each for each in tensors if not isinstance(each, There) and each.dim()]
    if there and func not in COPIES:
        if plain and str(func).startswith(INDEXED):
            plain = [each for each in (args[0], *args[2:3]) if not isinstance(each, There) and each.dim()]
        if plain:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    to_there = isinstance(args[0], There) if func is COPIES[0] else bool(there)
    if kwargs.get("device") is not None:
        to_there, kwargs["device"] = torch.device(kwargs["device"]).type == DEVICE.type, torch.device("cpu")
    of_here = {id(each.here): each for each in there}
    with _disable_current_modes():
        found = func(*tree_map(here, args), **tree_map(here, kwargs))

    def back(value):
        if not to_there or not isinstance(value, torch.Tensor):
            return value
        same = of_here.get(id(value))  # in place
        return There(value) if same is None or same.shape != value.shape else same

    return tree_map(back, found)


def here(value):
    return value.here if isinstance(value, There) else value


class Dispatch(TorchDispatchMode):
    """What makes new tensors on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, dict(kwargs or {}))


class Functions(TorchFunctionMode):
    """What never reaches the dispatch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            return func(*args, **{**kwargs, "device": None}).to(DEVICE)
        if func is torch.Tensor.tolist:
            return here(args[0]).tolist()
        return func(*args, **kwargs)


def main(model: str, folder: str, *cases: str) -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)
    torch.__future__.set_swap_module_params_on_conversion(True)
    import records_batch as batch

    with Dispatch(), Functions():
        for case in cases:
            found = batch.train(model, Path(folder) / case, use_cpu=False, **batch.ON_A_DEVICE[case])
            torch.save(found["gradients"].cpu(), f"{folder}/{case}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
