"""The file of a push: what safetensors' own reader finds in it."""

import json
import random
import struct
import weakref

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mt_grpo.generation.weight_file import DTYPES, write_weights


def sizes(tensors):
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def test_a_file_by_hand(tmp_path):
    """Every byte: the header's length, the header in blanks, the tensors in the order in which they came."""
    path = tmp_path / "model.safetensors"
    tensors = {"b": torch.tensor([1.0, -2.0]), "a": torch.tensor([[258, 3]], dtype=torch.int32)}
    names, seconds = write_weights(path, iter(tensors.items()), sizes(tensors))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert json.loads(data[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "a": {"dtype": "I32", "shape": [1, 2], "data_offsets": [8, 16]},
    }
    assert data[8 + length :] == b"\x00\x00\x80\x3f\x00\x00\x00\xc0" + b"\x02\x01\x00\x00\x03\x00\x00\x00"
    assert names == {"a", "b"} and seconds.keys() == {"gather", "write"}


def random_tensor(rng):
    """Of any dtype and up to three dimensions, some of them empty, some of them a view that is not contiguous."""
    dtype = rng.choice(list(DTYPES))
    shape = [rng.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(rng.randrange(4))]
    tensor = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = (tensor % 2 if dtype == torch.bool else tensor).view(dtype)[..., 0]
    return tensor.transpose(0, 1) if len(shape) > 1 and rng.random() < 0.5 else tensor


@pytest.mark.parametrize("seed", range(30))
def test_the_library_reads_what_was_written(tmp_path, seed):
    """Bit for bit, whatever the dtypes: each tensor stands at a multiple of its element's size."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors = {
        f'layers.{k}."ü"'[: rng.randrange(8, 14)] + str(k): random_tensor(rng) for k in range(rng.randrange(20))
    }
    path = tmp_path / "model.safetensors"
    names, _ = write_weights(path, iter(tensors.items()), sizes(tensors))
    found = load_file(path)
    assert names == found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].contiguous().reshape(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert all(
        (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0 for name, tensor in tensors.items()
    )


def test_a_tensor_is_read_before_the_next_is_asked_for(tmp_path):
    """An iterator may yield the same memory again, with other values, as a gather does. So may it with an odd size."""

    def weights():
        for size in (4, 3):
            buffer = torch.empty(size)
            for k in range(3):
                yield f"{size}.{k}", buffer.fill_(k)
            buffer.fill_(-1.0)

    expected = {f"{size}.{k}": size * 4 for size in (4, 3) for k in range(3)}
    write_weights(tmp_path / "w", weights(), expected)
    found = load_file(tmp_path / "w")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        f"{size}.{k}": [float(k)] * size for size in (4, 3) for k in range(3)
    }


def test_a_name_that_nobody_expected_still_fits(tmp_path):
    """Four more than expected: room is left for some."""
    tensors = {str(k): torch.ones(k, dtype=torch.float16) for k in range(5)}
    names, _ = write_weights(tmp_path / "w", iter(tensors.items()), {"0": 0})
    assert names == load_file(tmp_path / "w").keys() == tensors.keys()


@pytest.mark.parametrize("weights, message", [
    ([("w", torch.ones(2, dtype=torch.complex64))], r"^w is torch\.complex64, expected"),
    ([("w", torch.ones(2)), ("w", torch.ones(2))], "^the weight w was yielded twice$"),
    ([(str(k), torch.ones(2)) for k in range(100)], "^got 100 tensors, expected at most 1"),
])  # fmt: skip
def test_what_cannot_be_written(tmp_path, weights, message):
    with pytest.raises(ValueError, match=message):
        write_weights(tmp_path / "w", iter(weights), {"w": 8})


def test_memory_holds_one_tensor_at_a_time(tmp_path):
    """The memory of what was yielded is free again when the next is asked for."""
    alive = []

    def weights():
        for k in range(5):
            assert not any(reference() is not None for reference in alive)
            values = np.full((64,), k, np.float32)
            alive.append(weakref.ref(values))
            tensor = torch.from_numpy(values)
            del values
            yield str(k), tensor
            del tensor

    write_weights(tmp_path / "w", weights(), {str(k): 256 for k in range(5)})
    assert len(load_file(tmp_path / "w")) == 5
