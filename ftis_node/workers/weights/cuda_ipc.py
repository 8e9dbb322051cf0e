"""The private functions of torch for CUDA IPC. All uses of them are in this file: check it after an update of torch.

`torch.multiprocessing` sends CUDA tensors with `_share_cuda_` and `_new_shared_cuda`
(torch/multiprocessing/reductions.py, `reduce_tensor` and `rebuild_cuda_tensor`). They have had these eight fields since
torch 1.2. Any other version of torch, and any other form of their results, raises SharingError: weights then go through
a file.

Only memory from `cudaMalloc` has a handle that every process may open. Expandable segments (`expandable_segments:True`)
are passed as file descriptors, which needs the right to trace the other process. The allocator of torch reads the
setting for each new segment (CUDACachingAllocator.cpp, `get_free_block`: "someone might temporarily disable it"). So
weights are allocated first, and segments are expandable from then on (`grow_segments`).

Read in torch 2.13; nothing here has run on a GPU yet.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from ftis_node.errors import SharingError
from ftis_node.workers.weights.shared_weights import SharedStorage

OLDEST_TORCH, FIRST_UNKNOWN_TORCH = (2, 11), (2, 14)
# The handle of a cudaMalloc allocation: a version byte, "c", and the 64 bytes of cudaIpcMemHandle_t.
HANDLE_BYTES, HANDLE_KIND = 66, ord("c")
FIELD_TYPES = (int, bytes, int, int, bytes, int, bytes, bool)
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GROWING = "expandable_segments:True"


def export_storage(storage: torch.UntypedStorage) -> SharedStorage:
    """Return the fields with which another process maps `storage`. Do not free `storage` before that process has closed
    it.

    Raises SharingError.
    """
    _check_torch()
    try:
        fields = storage._share_cuda_()  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError) as error:
        raise SharingError(f"CUDA IPC cannot export a handle: {_first_line(error)}") from error
    if not isinstance(fields, tuple) or tuple(map(type, fields)) != FIELD_TYPES:
        raise SharingError("torch exports CUDA memory in an unknown form")
    _, handle, num_bytes, offset_bytes, ref_counter, ref_counter_offset, event, must_wait = fields
    if len(handle) != HANDLE_BYTES or handle[1] != HANDLE_KIND:
        raise SharingError("the weights are in expandable segments, whose handles another process cannot open")
    return SharedStorage(handle, num_bytes, offset_bytes, ref_counter, ref_counter_offset, event, must_wait)


def open_storage(shared: SharedStorage, device: int) -> torch.UntypedStorage:
    """Map another process's storage until the result is freed. Raises SharingError if CUDA refuses."""
    _check_torch()
    try:
        opened: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
            device,
            shared.handle,
            shared.num_bytes,
            shared.offset_bytes,
            shared.ref_counter,
            shared.ref_counter_offset,
            shared.event,
            shared.must_wait,
        )
    except (RuntimeError, AttributeError, TypeError) as error:
        raise SharingError(f"CUDA IPC cannot open a handle: {_first_line(error)}") from error
    return opened


def device_uuid(device: int) -> str:
    """Return a GPU's UUID, independent of CUDA_VISIBLE_DEVICES. Raises SharingError without one."""
    try:
        return str(torch.cuda.get_device_properties(device).uuid)
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise SharingError(f"there is no GPU whose memory could be shared: {_first_line(error)}") from error


def grow_segments() -> bool:
    """Enable expandable segments for new allocations, unless the user set that option. Returns whether they are
    enabled.

    Free blocks of the other kind return to the GPU.
    """
    if any(name in os.environ for name in ALLOCATOR_SETTINGS):
        return False
    setter: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        return False
    torch.cuda.empty_cache()
    setter(GROWING)
    return True


def _check_torch() -> None:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not OLDEST_TORCH <= version < FIRST_UNKNOWN_TORCH:
        raise SharingError(f"CUDA IPC was not tried with torch {torch.__version__}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
