"""Lets torchvision's build for CUDA be imported beside a PyTorch for CPUs; `scripts/setup.sh` installs it as a hook.

PyPI's torchvision has compiled kernels for CUDA, which a PyTorch for CPUs cannot load. Its import then fails with
"operator torchvision::nms does not exist", since it describes two operators that those kernels would have defined.
vLLM reads images by torchvision's transforms, which need no kernel. Here the two operators are declared, and nothing
behind them: who calls them gets PyTorch's error that there is no kernel.
"""

import sys


class DeclaresOperators:
    """Of `sys.meta_path`: declares the operators just before torchvision describes them."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(cls)
            import torch

            cls.library = torch.library.Library("torchvision", "FRAGMENT")  # operators end with it
            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, DeclaresOperators)
