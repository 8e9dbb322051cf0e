"""GPU tensors shared between two processes: the owner exports them once, and the reader maps them until it closes them.

    learner Exporter.share(tensors) --SharedWeights--> OpenedWeights.open(shared), .tensors() engine

`torch.multiprocessing` sends CUDA tensors with `_share_cuda_` and `_new_shared_cuda`
(torch/multiprocessing/reductions.py). They are private and have had these eight fields since torch 1.2. All uses of
them are in this file. Any other form of their results raises SharingError: weights then go through a file.

Only memory from `cudaMalloc` has a handle that every process may open. Expandable segments (`expandable_segments:True`)
are passed as file descriptors, which needs the right to trace the other process. The allocator of torch reads the
setting for each new segment (CUDACachingAllocator.cpp, `get_free_block`: "someone might temporarily disable it"). So
weights are allocated first, and segments are expandable from then on (`grow_segments`).

Read in torch 2.13. It has run with torch 2.11 on an H200.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from msgspec.structs import astuple
from torch import Tensor

from ftis_node.errors import SharingError, first_line
from ftis_node.workers.tensor_file import DTYPES, NAMES
from ftis_node.workers.weight_store import ELEMENT_BYTES, SharedStorage, SharedTensor, SharedWeights, check_handles

# The handle of a cudaMalloc allocation: a version byte, "c", and the 64 bytes of cudaIpcMemHandle_t.
HANDLE_BYTES, HANDLE_KIND = 66, ord("c")
FIELD_TYPES = (int, bytes, int, int, bytes, int, bytes, bool)
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GROWING = "expandable_segments:True"


def export_storage(storage: torch.UntypedStorage) -> SharedStorage:
    """Return the fields with which another process maps `storage`, which must outlive it. Raises SharingError."""
    try:
        fields = storage._share_cuda_()  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError) as error:
        raise SharingError(f"CUDA IPC cannot export a handle: {first_line(error)}") from error
    if not isinstance(fields, tuple) or tuple(map(type, fields)) != FIELD_TYPES:
        raise SharingError("torch exports CUDA memory in an unknown form")
    _, handle, num_bytes, offset_bytes, ref_counter, ref_counter_offset, event, must_wait = fields
    if len(handle) != HANDLE_BYTES or handle[1] != HANDLE_KIND:
        raise SharingError("the weights are in expandable segments, whose handles another process cannot open")
    return SharedStorage(handle, num_bytes, offset_bytes, ref_counter, ref_counter_offset, event, must_wait)


def open_storage(shared: SharedStorage, device: int) -> torch.UntypedStorage:
    """Map another process's storage until the result is freed. Raises SharingError if CUDA refuses."""
    try:
        opened: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device, *astuple(shared))
    except (RuntimeError, AttributeError, TypeError) as error:
        raise SharingError(f"CUDA IPC cannot open a handle: {first_line(error)}") from error
    return opened


def device_uuid(device: torch.device) -> str:
    """Return a GPU's UUID, independent of CUDA_VISIBLE_DEVICES. Raises SharingError without one."""
    try:
        return str(torch.cuda.get_device_properties(device.index or 0).uuid)
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise SharingError(f"there is no GPU whose memory could be shared: {first_line(error)}") from error


def grow_segments() -> bool:
    """Enable expandable segments for new allocations, unless the user set that option. Returns whether it did."""
    if any(name in os.environ for name in ALLOCATOR_SETTINGS):
        return False
    setter: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        return False
    torch.cuda.empty_cache()
    setter(GROWING)
    return True


class Exporter:
    """The exporter of one process's tensors. It exports them once and again only if their memory has moved."""

    def __init__(self) -> None:
        self._places: list[tuple[object, ...]] = []
        self._held: list[torch.UntypedStorage] = []  # so that no other tensor takes their place
        self._shared: SharedWeights | None = None

    def share(self, tensors: Mapping[str, Tensor]) -> SharedWeights:
        """Return the message with which another process maps `tensors`, after all work on their device.

        Raises SharingError if one is not contiguous, has an integer type, or cannot be exported.
        """
        places: list[tuple[object, ...]] = [
            (name, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        ]
        if self._shared is None or places != self._places:
            self._shared, self._places = None, []
            self._shared, self._held = _export(tensors)
            self._places = places
        if any(storage.device.type == "cuda" for storage in self._held):
            torch.cuda.synchronize()
        return self._shared


class OpenedWeights:
    """Another process's storages, mapped into `device` of this process until `close` or the next export."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: list[torch.UntypedStorage] = []
        self._shared: SharedWeights | None = None

    @property
    def is_open(self) -> bool:
        return self._shared is not None

    def open(self, shared: SharedWeights) -> None:
        """Map the storages that are not mapped yet. After an error no new storage stays open. Raises SharingError."""
        if self._shared is None or self._shared.export_id != shared.export_id:
            self.close()
        check_handles(shared)
        if shared.device_uuid != device_uuid(self._device):
            raise SharingError("the weights lie on another GPU")
        storages = self._storages or [open_storage(each, self._device.index or 0) for each in shared.storages]
        if len(storages) != len(shared.storages) or any(
            storage.nbytes() < each.num_bytes for storage, each in zip(storages, shared.storages, strict=True)
        ):
            self.close()
            raise SharingError("the opened memory differs from the shared one")
        self._storages, self._shared = storages, shared

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of the open export, in its order: read-only views of the other process's memory."""
        assert self._shared is not None, "nothing is open"
        for each in self._shared.tensors:
            values = torch.empty(0, dtype=DTYPES[each.dtype], device=self._device).set_(self._storages[each.storage])
            yield each.name, values[each.offset : each.offset + prod(each.shape)].view(each.shape)

    def entries(self) -> dict[str, dict[str, object]]:
        """Return types and shapes of the open tensors, as in a safetensors header."""
        assert self._shared is not None, "nothing is open"
        return self._shared.entries()

    def close(self) -> None:
        """Unmap all storages. No view of them may remain."""
        self._storages, self._shared = [], None


def _export(tensors: Mapping[str, Tensor]) -> tuple[SharedWeights, list[torch.UntypedStorage]]:
    held: dict[int, torch.UntypedStorage] = {}
    numbers: dict[int, int] = {}
    shared_tensors, device = [], torch.device("cpu")
    for name, tensor in tensors.items():
        kind = NAMES.get(tensor.dtype, "")
        if kind not in ELEMENT_BYTES or not tensor.is_contiguous() or not tensor.numel():
            raise SharingError(f"{name} ({tensor.dtype}) is not a contiguous tensor of 16-bit or 32-bit floats")
        storage, device = tensor.untyped_storage(), tensor.device
        held.setdefault(storage.data_ptr(), storage)
        number = numbers.setdefault(storage.data_ptr(), len(numbers))
        shape = tuple(tensor.shape)
        shared_tensors.append(SharedTensor(name, number, kind, shape, tensor.storage_offset()))  # type: ignore[arg-type]
    shared = SharedWeights(
        export_id=uuid.uuid4().hex,
        device_uuid=device_uuid(device),
        storages=tuple(export_storage(storage) for storage in held.values()),
        tensors=tuple(shared_tensors),
    )
    return shared, list(held.values())
