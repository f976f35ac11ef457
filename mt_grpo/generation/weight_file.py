"""The file of a push: safetensors, written tensor by tensor.

The library's `save_file` needs all tensors at once: a second copy of the model, next to the trained one. Here a
tensor is in memory only while it is written. The format is safetensors': the length of a header, the header in JSON
(what each tensor is and where), the tensors without gaps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from io import RawIOBase
from pathlib import Path

import torch

DTYPES = {  # safetensors' names
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ALIGNED = 8  # bytes, of the widest dtype: a reader maps a tensor as it stands in the file
ENTRY = 256  # bytes of the header for one tensor, its name apart


def write_weights(
    path: Path, named_weights: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, int]
) -> tuple[set[str], dict[str, float]]:
    """Write a safetensors file.

    Args:
        path: The path of the new file.
        named_weights: (name, tensor on any device). A tensor may change once the next one is asked for.
        expected: Name -> bytes. Room for a header with these names is left before the first tensor.

    Returns:
        The names that were written, and seconds: `gather` (the iterator, and to the CPU) and `write`.

    Raises:
        ValueError: A name came twice, a dtype is not supported by the format, or the header does not fit.
        OSError: The file cannot be written.
    """
    # INVARIANT: the header is not known before the last tensor, and no gap may follow it: it ends in blanks.
    room = sum(len(json.dumps(name)) + ENTRY for name in expected) + 4096
    start = -(-(8 + room) // ALIGNED) * ALIGNED
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    seconds = dict.fromkeys(("gather", "write"), 0.0)
    late: list[tuple[str, torch.Tensor]] = []  # those that would leave the next one at an odd place
    position = 0

    with open(path, "wb", buffering=0) as file:
        file.seek(start)

        def write(name: str, tensor: torch.Tensor) -> None:
            nonlocal position
            end = position + tensor.nbytes
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            write_all(file, memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
            position = end

        asked = time.perf_counter()
        for name, tensor in named_weights:
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{name} is {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}")
            if name in header or any(name == other for other, _ in late):
                raise ValueError(f"the weight {name} was yielded twice")
            tensor = tensor.detach().cpu().contiguous()
            got = time.perf_counter()
            if tensor.nbytes % ALIGNED:
                late.append((name, tensor.clone()))
            else:
                write(name, tensor)
            seconds["gather"] += got - asked
            del tensor  # before the next one is asked for
            asked = time.perf_counter()
            seconds["write"] += asked - got
        for name, tensor in sorted(late, key=lambda item: -item[1].element_size()):
            write(name, tensor)
        text = json.dumps(header).encode().ljust(start - 8)
        if len(text) > start - 8:
            raise ValueError(f"got {len(header) - 1} tensors, expected at most {len(expected)}")
        file.seek(0)
        write_all(file, memoryview((start - 8).to_bytes(8, "little") + text))
        seconds["write"] += time.perf_counter() - asked
    return header.keys() - {"__metadata__"}, seconds


def write_all(file: RawIOBase, view: memoryview) -> None:
    """Write all of a view. A write to a nearly full disk may take a part without an error; the next one raises it."""
    while view:
        view = view[file.write(view) :]
