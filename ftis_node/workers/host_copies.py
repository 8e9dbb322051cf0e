"""Copies of GPU tensors to the host beside the computation: on a separate stream, through two page-locked buffers.

    GPU     copy a to 1 | copy b to 2 | copy c to 1 | ...
    host                | write 1     | write 2     | ...

On the stream of the computation each copy would wait until all passes that are queued there are done. From pageable
memory a copy runs at half the speed, and the host waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from ftis_node.errors import first_line

log = logging.getLogger(__name__)

BUFFER_BYTES = 256 << 20


@contextmanager
def copy_stream(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Run what the block queues beside later work on the device of `tensors`, but after all earlier work."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if device is None:
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@cache  # one of each device: torch keeps the freed memory of each stream for that stream
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def host_parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of contiguous tensors in order, as CPU tensors of uint8. Each is valid until the next one."""
    buffers = (_Buffer(), _Buffer())
    number, copying = 0, None
    for tensor in tensors:
        data = tensor.reshape(-1).view(torch.uint8)
        if not is_on_gpu(data):
            if copying is not None:
                yield copying.wait()
            copying = None
            yield data
            continue
        for part in torch.split(data, BUFFER_BYTES):
            begun = buffers[number % 2].begin(part)
            number += 1
            if copying is not None:
                yield copying.wait()
            copying = begun
    if copying is not None:
        yield copying.wait()


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


class _Buffer:
    """A page-locked buffer, allocated for the first part and larger ones, and the copy into it that is in progress."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._part = self._memory

    def begin(self, part: Tensor) -> _Buffer:
        if len(self._memory) < len(part):
            self._memory = page_locked(min(BUFFER_BYTES, 2 * len(part)))
        self._part = self._memory[: len(part)].copy_(part, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()
        return self

    def wait(self) -> Tensor:
        """Return the copied bytes as soon as they are complete."""
        self._done.synchronize()
        return self._part


def page_locked(num_bytes: int) -> Tensor:
    """Return host memory that is page-locked, if the system locks so much."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # WSL2, or little memory: copies are slower
        log.warning("the system locks no %.0f MB of memory: %s", num_bytes / 1e6, first_line(error))
        return torch.empty(num_bytes, dtype=torch.uint8)
