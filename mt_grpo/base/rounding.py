"""How far rounding alone moves a model's logprobs: the measure for what two computations may differ by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def off_by_rounding(model: Any, size: float) -> Iterator[None]:
    """Context manager in which a model's embeddings are off by `size`, relatively, so that all else rounds anew.

    Right computations of the same logprobs in another order were 0.7 to 1.8 times as far apart on average as those
    with and without it (random models of 4 and 28 layers, and the bundled ones, in bf16). It draws from a generator
    of its own.

    Args:
        model: A transformers model without a wrapper.
        size: 2^-8 for bf16, which rounds by at most 2^-9; 2^-20 for float32.
    """

    def change(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(output.device).manual_seed(0)
        return output + output * torch.empty_like(output).normal_(0, size, generator=generator)

    handle = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()
