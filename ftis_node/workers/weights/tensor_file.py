"""Safetensors files for weights that are published after every step: a writer that overwrites an old file, and a
reader.

The writer of safetensors first copies all bytes and creates a new file each time. This one converts and writes tensor
by tensor, into the pages of the previous version. Fresh pages cost half as much again as the copy, and mapping the file
costs more than that. The reader of safetensors (0.8.0, with torch 2.13) leaks 64 bytes a tensor. In a node that runs
for weeks that adds up to a gigabyte.

Format: the safetensors README, section "Format" (eight bytes of header length, a JSON header, the tensors' bytes).
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import torch

from ftis_node.errors import ModelError
from ftis_node.models.safetensors_file import read_header
from ftis_node.workers.weights.shared_weights import WORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from io import FileIO
    from pathlib import Path

    from torch import Tensor

    from ftis_node.workers.weights.page_locked import LockedFiles

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8
ALIGNMENT = 64  # of the first tensor


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    locked: LockedFiles | None = None,
) -> dict[str, int]:
    """Write `tensors` by name as `dtype` (None: each its own), each after `change(name, tensor)`, which keeps its
    shape.

    With `locked` they are copied straight into the file's pages, if those can be locked. Returns the checksum of each.
    An existing file is overwritten. Raises ValueError for a dtype that the format lacks, and for a non-float tensor if
    `dtype` is given. Raises OSError if the disk is full: the file is then unusable.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        kind = dtype or tensor.dtype
        if kind not in NAMES or (dtype is not None and not tensor.is_floating_point()):
            raise ValueError(f"{name} is of {tensor.dtype}: it cannot be written as {kind}")
        start, end = end, end + tensor.numel() * kind.itemsize
        entries[name] = {"dtype": NAMES[kind], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGNMENT)
    beginning = len(header).to_bytes(LENGTH_BYTES, "little") + header
    values = (
        (name, change(name, tensor).detach().to(dtype or tensor.dtype).contiguous()) for name, tensor in tensors.items()
    )
    with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
        if locked is not None:
            num_bytes = len(beginning) + end
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # otherwise a full disk kills the process (SIGBUS)
            file.truncate(num_bytes)
            if (mapping := locked.lock(path)) is not None:
                mapping[: len(beginning)] = torch.frombuffer(bytearray(beginning), dtype=torch.uint8)
                return _copy_all(mapping[len(beginning) :], values)
        checksums: dict[str, int] = {}
        _write_all(file, memoryview(beginning))
        for name, value in values:
            checksums[name] = checksum(value)  # on its device, so that the checksum covers the transfer, too
            _write_all(file, value.cpu().reshape(-1).view(torch.uint8).numpy().data)
        file.truncate()
    return checksums


def _copy_all(data: Tensor, values: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Copy tensors one after the other into `data`. Returns when all copies are complete."""
    checksums, start = {}, 0
    for name, value in values:
        checksums[name] = checksum(value)
        part = value.reshape(-1).view(torch.uint8)
        data[start : start + part.numel()].copy_(part, non_blocking=True)
        start += part.numel()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return checksums


def checksum(tensor: Tensor) -> int:
    """Return the sum modulo 2^64 of a tensor's bytes as little-endian 64-bit words, the last one padded with zeros.

    It is exact and the same on every device. Any change of one element changes it, but a permutation of words does not.
    A core sums 12 GB/s, while the CRC-32 of a checkpoint runs at 2 GB/s.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // WORD_BYTES * WORD_BYTES
    words, rest = data[:whole], data[whole:]
    if words.storage_offset() % WORD_BYTES:  # a part of a larger tensor
        words = words.clone()
    return (int(words.view(torch.int64).sum()) + int.from_bytes(bytes(rest.tolist()), "little")) % 2**64


def _write_all(file: FileIO, data: memoryview) -> None:
    """Write all bytes. One system call may write fewer, and always does above 2 GiB."""
    while data:
        data = data[file.write(data) :]


def read_tensors(path: Path, *, locked: LockedFiles | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU: views of one private mapping, whose pages are read on first use.

    With `locked`, if the file's pages can be locked, they are read-only views of the file itself. Raises ModelError if
    the file is missing or damaged.
    """
    header = read_header(path)
    try:
        mapped = None if locked is None else locked.lock(path)
        if mapped is None:
            mapped = torch.from_file(str(path), shared=False, size=header.num_bytes, dtype=torch.uint8)
        data = mapped[header.data_start :]
        return {name: _view(data, entry) for name, entry in header.tensors.items()}
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"weight file {path} is damaged: {error!r}") from error


def _view(data: Tensor, entry: Mapping[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    dtype, part = DTYPES[entry["dtype"]], data[start:end]
    if part.storage_offset() % dtype.itemsize:  # the format does not guarantee it
        part = part.clone()
    return part.view(dtype).view(entry["shape"])
