"""GPU tensors shared between two processes: the owner exports them once, and the reader maps them until it closes them.

learner Exporter.share(tensors) --SharedWeights--> OpenedWeights.open(shared), .tensors() engine
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import torch

from ftis_node.errors import SharingError
from ftis_node.workers.weights import cuda_ipc
from ftis_node.workers.weights.shared_weights import ELEMENT_BYTES, SharedStorage, SharedTensor, SharedWeights, check
from ftis_node.workers.weights.tensor_file import DTYPES, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


class Exporter:
    """The exporter of one process's tensors. It exports them once and again only if their memory has moved."""

    def __init__(self) -> None:
        self._places: list[tuple[object, ...]] = []
        self._held: list[torch.UntypedStorage] = []  # so that no other tensor takes their place
        self._shared: SharedWeights | None = None

    def share(self, tensors: Mapping[str, Tensor]) -> SharedWeights:
        """Return the message with which another process maps `tensors`. Waits for all work on their device, so their
        values are final.

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

    def open(self, shared: SharedWeights) -> None:
        """Map the storages that are not mapped yet. After an error no new storage stays open. Raises SharingError."""
        if self._shared is None or self._shared.export_id != shared.export_id:
            self.close()
        check(shared)
        if shared.device_uuid != _uuid_of(self._device):
            raise SharingError("the weights lie on another GPU")
        storages = self._storages or self._open(shared.storages)
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
            empty = torch.empty(0, dtype=DTYPES[each.dtype], device=self._device)
            yield each.name, empty.set_(self._storages[each.storage], each.offset, each.shape, _strides(each.shape))

    def entries(self) -> dict[str, dict[str, object]]:
        """Return types and shapes of the open tensors, as in a safetensors header."""
        assert self._shared is not None, "nothing is open"
        return self._shared.entries()

    def close(self) -> None:
        """Unmap all storages. No view of them may remain."""
        self._storages, self._shared = [], None

    def _open(self, storages: tuple[SharedStorage, ...]) -> list[torch.UntypedStorage]:
        return [cuda_ipc.open_storage(each, self._device.index or 0) for each in storages]


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
        device_uuid=_uuid_of(device),
        storages=tuple(cuda_ipc.export_storage(storage) for storage in held.values()),
        tensors=tuple(shared_tensors),
    )
    check(shared)
    return shared, list(held.values())


def _uuid_of(device: torch.device) -> str:
    return cuda_ipc.device_uuid(device.index or 0)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
