"""Weights in the learner's GPU memory, described so that another process can map them (CUDA IPC).

The description is a message of plain bytes and integers, without torch and without pickle. The CUDA driver accepts only
handles that it created itself, and every field is bounded where it is read.

Two processes on one GPU map the same memory, so a handle is no copy: the reader sees the learner's present values. The
learner's next update waits until the reader is done. A late reader detects changed weights by their checksums.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ftis_node.errors import SharingError
from ftis_node.workers.wire import Message

Way: TypeAlias = Literal["ipc", "pinned", "file"]
"""How weights cross: by CUDA IPC, by a page-locked file in memory, by a file."""
WAYS: dict[Way, str] = {"ipc": "CUDA IPC", "pinned": "page-locked file", "file": "file"}

MAX_BYTES = 1 << 50
MAX_PARTS = 1 << 17
ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

Short: TypeAlias = Annotated[bytes, Meta(max_length=256)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_BYTES)]


class SharedStorage(msgspec.Struct, frozen=True, array_like=True):
    """A part of an allocation, with the fields of torch's `_share_cuda_`; sizes and offsets in bytes.

    `ref_counter` names the file in which torch counts readers. `event` is the CUDA event that a reader awaits if it
    `must_wait`.
    """

    handle: Annotated[bytes, Meta(min_length=1, max_length=256)]
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    offset_bytes: Size
    ref_counter: Short
    ref_counter_offset: Size
    event: Short
    must_wait: bool


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous tensor: the number of its storage, and its first element there. `dtype` is safetensors' name."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    storage: Annotated[int, Meta(ge=0, le=MAX_PARTS)]
    dtype: Literal["F32", "BF16", "F16"]
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]
    offset: Size


class SharedWeights(Message, frozen=True):
    """A model's tensors in the memory of the GPU `device_uuid`. `export_id` changes whenever the storages do."""

    export_id: Annotated[str, Meta(min_length=1, max_length=64)]
    device_uuid: Annotated[str, Meta(max_length=64)]
    storages: Annotated[tuple[SharedStorage, ...], Meta(max_length=MAX_PARTS)]
    tensors: Annotated[tuple[SharedTensor, ...], Meta(max_length=MAX_PARTS)]

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return type and shape of each tensor, as in a safetensors header."""
        return {each.name: {"dtype": each.dtype, "shape": list(each.shape)} for each in self.tensors}

    @property
    def num_bytes(self) -> int:
        return sum(prod(each.shape) * ELEMENT_BYTES[each.dtype] for each in self.tensors)


def encode(shared: SharedWeights) -> bytes:
    """Return the bytes that `decode` reads in another process."""
    return msgspec.msgpack.encode(shared)


def decode(message: bytes) -> SharedWeights:
    """Return the message from the bytes of `encode`. Raises SharingError for other bytes, and for messages that `check`
    refuses.
    """
    try:
        shared = msgspec.msgpack.decode(message, type=SharedWeights)
    except msgspec.DecodeError as error:
        raise SharingError(f"the list of shared weights is malformed: {error}") from error
    check(shared)
    return shared


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
