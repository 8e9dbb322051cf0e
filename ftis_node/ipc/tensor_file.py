"""Writing tensors into a safetensors file that may already be there, straight into its pages.

safetensors' own writer makes a copy of all bytes first and a new file each time. Weights are handed over after every
step, and fresh pages cost more than copying; so this one maps the file and lets torch copy, convert and fetch from the
GPU in a single pass into pages that the previous version has left.

Format: the safetensors README, section "Format" (eight bytes of header length, a JSON header, the tensors' bytes).
"""

from __future__ import annotations

import json
import mmap
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
LENGTH_BYTES = 8
ALIGNMENT = 64  # of the first tensor; all sizes are multiples of an element's


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> None:
    """Write `tensors` by name as `dtype` (None: each its own), each after `change(name, tensor)` of the same shape.

    A file that is there is written over. Raises ValueError for tensors that are no floats, OSError where the disk is
    full; the file is then of no use.
    """
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -(dtype or item[1].dtype).itemsize):
        kind = dtype or tensor.dtype
        if not tensor.is_floating_point() or kind not in NAMES:
            raise ValueError(f"{name} is of {tensor.dtype}: only floats are published")
        start, end = end, end + tensor.numel() * kind.itemsize
        entries[name] = {"dtype": NAMES[kind], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries | {"__metadata__": {"format": "pt"}}, separators=(",", ":")).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGNMENT)
    data_start = LENGTH_BYTES + len(header)
    with path.open("r+b" if path.exists() else "w+b") as file:
        if file.seek(0, os.SEEK_END) != data_start + end:
            file.truncate(0)
            os.posix_fallocate(file.fileno(), 0, data_start + end)  # a full disk is an error here, not a signal below
        with mmap.mmap(file.fileno(), data_start + end) as pages:
            pages[:data_start] = len(header).to_bytes(LENGTH_BYTES, "little") + header
            _fill(pages, data_start, tensors, entries, dtype, change)


def _fill(
    pages: mmap.mmap,
    data_start: int,
    tensors: Mapping[str, Tensor],
    entries: Mapping[str, dict[str, Any]],
    dtype: torch.dtype | None,
    change: Callable[[str, Tensor], Tensor],
) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.numel():
                kind, offset = dtype or tensor.dtype, data_start + entries[name]["data_offsets"][0]
                target = torch.frombuffer(pages, dtype=kind, count=tensor.numel(), offset=offset)
                target.view(tensor.shape).copy_(change(name, tensor))
                del target  # it holds on to the pages
