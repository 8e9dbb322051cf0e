"""Safetensors files that are handed over after every step: written into one that may already be there, and read.

safetensors' own writer makes a copy of all bytes first and a new file each time. This one goes tensor by tensor,
converting each on the way, into the pages that the previous version has left: fresh pages cost half as much again as
the copying, and mapping the file more than that. Its reader (0.8.0, with torch 2.13) never gives back 64 bytes a
tensor, which in a node that runs for weeks adds up to a gigabyte.

Format: the safetensors README, section "Format" (eight bytes of header length, a JSON header, the tensors' bytes).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from ftis_node.errors import ModelError
from ftis_node.models.safetensors_file import read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from io import FileIO
    from pathlib import Path

    from torch import Tensor

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = {
    **{name: dtype for dtype, name in NAMES.items()},
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LENGTH_BYTES = 8
ALIGNMENT = 64  # of the first tensor


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
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        kind = dtype or tensor.dtype
        if not tensor.is_floating_point() or kind not in NAMES:
            raise ValueError(f"{name} is of {tensor.dtype}: only floats are published")
        start, end = end, end + tensor.numel() * kind.itemsize
        entries[name] = {"dtype": NAMES[kind], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGNMENT)
    with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
        _write_all(file, memoryview(len(header).to_bytes(LENGTH_BYTES, "little") + header))
        for name, tensor in tensors.items():
            value = change(name, tensor).detach().to(dtype or tensor.dtype).cpu().contiguous()
            _write_all(file, value.reshape(-1).view(torch.uint8).numpy().data)
        file.truncate()


def _write_all(file: FileIO, data: memoryview) -> None:
    """One write may take less than it is given, above 2 GiB always."""
    while data:
        data = data[file.write(data) :]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU: views of one private mapping, whose pages are read when they are touched.

    Raises ModelError where the file is missing or damaged.
    """
    header = read_header(path)
    try:
        mapped = torch.from_file(str(path), shared=False, size=header.num_bytes, dtype=torch.uint8)
        data = mapped[header.data_start :]
        return {name: _view(data, entry) for name, entry in header.tensors.items()}
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"weight file {path} is damaged: {error!r}") from error


def _view(data: Tensor, entry: Mapping[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    dtype, part = DTYPES[entry["dtype"]], data[start:end]
    if part.storage_offset() % dtype.itemsize:  # the format does not promise it
        part = part.clone()
    return part.view(dtype).view(entry["shape"])
