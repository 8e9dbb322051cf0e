"""Tensors in one buffer, of which all checksums take three operations and one transfer.

    buffer   a a a . | b . . . | c c . .        blocks of `BLOCK_BYTES`; each tensor begins a block, zeros fill its last

One by one, 290 tensors take some 1,500 operations after each step, which the host launches while the engine waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ftis_node.workers.tensor_file import checksums_of

BLOCK_BYTES = 8192


class ChecksummedBuffer:
    """A buffer that the given tensors now share. Their values may change, but they must not move."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Move `tensors`, which are on one device and share no memory, into one buffer."""
        owners: list[int] = []
        self._numbers: dict[tuple[int, int], int] = {}
        moved = list(tensors)
        for number, tensor in enumerate(moved):
            self._numbers[len(owners) * BLOCK_BYTES, tensor.nbytes] = number
            owners += [number] * -(-tensor.nbytes // BLOCK_BYTES)
        device = moved[0].device
        self._owners = torch.tensor(owners, device=device)
        self._buffer = torch.zeros(len(owners) * BLOCK_BYTES, dtype=torch.uint8, device=device)
        for (start, num_bytes), tensor in zip(self._numbers, moved, strict=True):
            part = self._buffer[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = part.copy_(tensor)

    def checksums(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return what `checksums_of(tensors)` returns. Tensors outside of the buffer are summed one by one."""
        begin = self._buffer.data_ptr()
        places = {name: (tensor.data_ptr() - begin, tensor.nbytes) for name, tensor in tensors.items()}
        others = {name: tensor for name, tensor in tensors.items() if places[name] not in self._numbers}
        of_blocks = self._buffer.view(torch.int64).view(len(self._owners), -1).sum(dim=1)
        sums = of_blocks.new_zeros(len(self._numbers)).index_add(0, self._owners, of_blocks).tolist()
        found = {name: sums[self._numbers[place]] % 2**64 for name, place in places.items() if name not in others}
        return found | checksums_of(others)
