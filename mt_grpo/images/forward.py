"""Images in a model's forward pass: its further inputs, and logits of ids that may not be sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mt_grpo.images.pictures import FIRST_ID, Picture, is_picture, pictures_in, with_placeholders

FORBIDDEN = -1e4  # a logit whose probability is 0 in half precision, too


def features_of(pictures: list[Picture]) -> dict[str, Any]:
    """The inputs of a forward pass for several images in order: `pixel_values`, and `image_grid_thw` (images, 3)."""
    names = dict.fromkeys(name for picture in pictures for name in picture.features)
    return {name: torch.cat([picture.features[name] for picture in pictures]) for name in names}


def inputs_of_requests(prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    """(ids with placeholders, further inputs of `generate`) of prompts. They are padded later."""
    if not (pictures := [picture for ids in prompts for picture in pictures_in(ids)]):
        return prompts, {}
    kinds = [[int(is_picture(token)) for token in ids] for ids in prompts]
    return [with_placeholders(ids) for ids in prompts], {**features_of(pictures), "mm_token_type_ids": kinds}


def features_of_rows(input_ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """`inputs_of_rows` of rows (M, L) with images."""
    shown = input_ids >= FIRST_ID
    rows = [pictures_in(row) for row in input_ids.tolist()]
    pictures = [picture for row in rows for picture in row]
    features = {name: values.to(input_ids.device) for name, values in features_of(pictures).items()}
    features |= {"num_images": [len(row) for row in rows], "mm_token_type_ids": shown.int()}
    return input_ids.masked_fill(shown, pictures[0].placeholder), features


def forbid(reader: Any, *models: Any) -> None:
    """Exclude a reader's `unsampled` ids from models' sampling, logprobs and entropy, by a bias that is not saved."""
    # INVARIANT: what is not sampled has no logprob either. A sampled placeholder would stand for no image.
    for model in filter(None, models if reader is not None else ()):
        for head in model.get_output_embeddings().modules():  # several if adapters wrap it, as narrow as their rank
            is_head = isinstance(head, torch.nn.Linear) and len(head.weight) > max(reader.unsampled)
            if not is_head or "bias" in head._buffers:  # a second trainer may get the same model
                continue
            if head._parameters.pop("bias") is not None:
                raise ValueError(f"The head of {type(model).__name__} has a bias, which is not supported with images.")
            head.register_buffer("bias", head.weight.new_zeros(len(head.weight)), persistent=False)
            head.bias[reader.unsampled] = FORBIDDEN


@contextmanager
def forbidding_nothing(model: Any) -> Iterator[None]:
    """Context manager without the bias of `forbid`: a server's logprobs of a prompt cover the whole vocabulary."""
    biases = {m: m.bias for m in model.modules() if isinstance(m, torch.nn.Linear) and "bias" in m._buffers}
    try:
        for head in biases:
            head.bias = torch.zeros_like(head.bias)
        yield
    finally:
        for head, bias in biases.items():
            head.bias = bias
