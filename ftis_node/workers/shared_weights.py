"""Weights in the learner's GPU memory, described so that another process can map them (CUDA IPC).

The description is a message of plain bytes and integers, without pickle. The CUDA driver accepts only handles that it
created itself. A handle is no copy: the reader sees the learner's present values. The learner's next update waits until
the reader is done. A late reader detects changed weights by their checksums.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal, TypeAlias

import msgspec

from ftis_node.errors import SharingError
from ftis_node.workers.wire import Message

Transfer: TypeAlias = Literal["ipc", "pinned", "file"]
"""The transfer method: CUDA IPC, a page-locked file in memory, or a file."""
TRANSFERS: dict[Transfer, str] = {"ipc": "CUDA IPC", "pinned": "page-locked file", "file": "file"}

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class SharedStorage(msgspec.Struct, frozen=True, array_like=True):
    """A part of an allocation, with the fields of torch's `_share_cuda_`; sizes and offsets in bytes.

    `ref_counter` names the file in which torch counts readers. `event` is the CUDA event that a reader awaits if it
    `must_wait`.
    """

    handle: bytes
    num_bytes: int
    offset_bytes: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    must_wait: bool


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous tensor: the number of its storage, and its first element there. `dtype` is safetensors' name."""

    name: str
    storage: int
    dtype: Literal["F32", "BF16", "F16"]
    shape: tuple[int, ...]
    offset: int


class SharedWeights(Message, frozen=True):
    """A model's tensors in the memory of the GPU `device_uuid`. `export_id` changes whenever the storages do."""

    export_id: str
    device_uuid: str
    storages: tuple[SharedStorage, ...]
    tensors: tuple[SharedTensor, ...]

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return type and shape of each tensor, as in a safetensors header."""
        return {each.name: {"dtype": each.dtype, "shape": list(each.shape)} for each in self.tensors}

    @property
    def num_bytes(self) -> int:
        return sum(prod(each.shape) * ELEMENT_BYTES[each.dtype] for each in self.tensors)


def check(shared: SharedWeights) -> None:
    """Raise SharingError if a tensor has no storage, exceeds it, or is named twice."""
    if len({each.name for each in shared.tensors}) < len(shared.tensors):
        raise SharingError("the list of shared weights names a tensor twice")
    for each in shared.tensors:
        if each.storage >= len(shared.storages):
            raise SharingError(f"shared weights {each.name}: there is no storage {each.storage}")
        end = (each.offset + prod(each.shape)) * ELEMENT_BYTES[each.dtype]
        if end > shared.storages[each.storage].num_bytes:
            raise SharingError(f"shared weights {each.name} reach beyond their storage")
