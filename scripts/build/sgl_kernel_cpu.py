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


class Missing(types.ModuleType):
    """What stands for a module of kernels, for a kernel, and for whatever is looked up in one."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} is a kernel of SGLang's for GPUs, which is not installed here.")


class FindsSubmodules:
    """Of `sys.meta_path`: each submodule of this one is there, and has every name, too."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, cls, is_package=True) if name.startswith("sgl_kernel.") else None

    @staticmethod
    def create_module(spec):
        return Missing(spec.name)

    @staticmethod
    def exec_module(module):
        """There is nothing to run."""


if __name__ == "sgl_kernel":  # where it is installed
    sys.modules[__name__].__class__ = Missing
    sys.meta_path.append(FindsSubmodules)
    LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")  # operators end with it
    for operator in (Path(__file__).parent / "operators.txt").read_text().split():
        LIBRARY.define(f"{operator}(Tensor a) -> Tensor")
