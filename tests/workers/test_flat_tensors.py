"""Tensors in one buffer keep their values, and its checksums are those of single tensors."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftis_node.workers.flat_tensors import BLOCK_BYTES, FlatTensors
from ftis_node.workers.tensor_file import checksums_of


class Count(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.total += 1
        return function(*args, **(kwargs or {}))


def test_the_checksums_of_a_buffer_are_those_of_its_tensors():
    sizes = (1, 3, 7, BLOCK_BYTES // 2, BLOCK_BYTES // 2 + 1, 40_000)
    values = {f"t{number}": torch.randn(size).bfloat16() for number, size in enumerate(sizes)}
    tensors = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    flat = FlatTensors(tensors.values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert all(torch.equal(tensors[name], value) for name, value in values.items())
    named = tensors | {"half": tensors["t5"].detach()[:20_000], "other": torch.randn(9)}
    assert flat.checksums(named) == checksums_of(named)
    before = flat.checksums(named)
    with torch.no_grad():
        tensors["t2"][6] += 1
        tensors["t5"][39_999] = -3
    after = flat.checksums(named)
    assert after == checksums_of(named)
    assert {name for name in named if before[name] != after[name]} == {"t2", "t5"}
    with Count() as count:
        flat.checksums(tensors)
    assert count.total < 10
