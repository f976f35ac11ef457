"""A stand-in for SGLang's compiled kernels where there is no GPU; `setup.sh --sglang` installs it as `sgl_kernel`.

SGLang names functions of `sgl_kernel` and operators of `torch.ops.sgl_kernel` as its modules are loaded, also where it
then computes by PyTorch alone. Here each name is there, and nothing behind it: who calls one gets an error. The
operators are those that the installed SGLang names, in `operators.txt` beside this file.
"""

import importlib.machinery
import sys
import types
from pathlib import Path

import torch


class MissingKernel:
    """What stands for a kernel that is not there, and for whatever is looked up in it."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return MissingKernel(f"{self._name}.{attribute}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} is a kernel of SGLang's for GPUs, which is not installed here.")


class FindsSubmodules:
    """Of `sys.meta_path`: each submodule of this one is there, and has every name, too."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, cls, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def look_up(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return MissingKernel(f"{spec.name}.{name}")

        module.__getattr__ = look_up
        return module

    @staticmethod
    def exec_module(module):
        """There is nothing to run."""


if __name__ == "sgl_kernel":  # where it is installed

    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{__name__}.{name}")

    sys.meta_path.append(FindsSubmodules)
    LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")  # operators end with it
    for operator in (Path(__file__).parent / "operators.txt").read_text().split():
        LIBRARY.define(f"{operator}(Tensor a) -> Tensor")
