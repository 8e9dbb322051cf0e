"""Weight files in memory with page-locked mappings, so that the GPU copies to and from them directly.

Such a copy is several times faster than one from pageable memory, which the driver copies twice. Locking pages takes
longer than the copy itself, so mappings stay locked as long as their file exists. The store overwrites the files of old
versions (`store.WeightStore`), so there are at most three.

If CUDA cannot lock a mapping (no GPU, a limit, a file system that is not memory), nothing is locked from then on. Files
are then written and read without locks.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

logger = logging.getLogger(__name__)

PORTABLE = 1  # cudaHostRegisterPortable: for every context of this process


class LockedFiles:
    """A cache of page-locked mappings by device and inode of the file. `lock` returns None if a mapping cannot be
    locked.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._held: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def lock(self, path: Path) -> Tensor | None:
        """Return the bytes of the file as a page-locked tensor; writes to it change the file.

        The file must have its final size, and its file system space for it. After one failure no further lock is tried.
        """
        self._forget_removed()
        if self.why_not:
            return None
        status = path.stat()
        key = (status.st_dev, status.st_ino)
        if key in self._held and self._held[key][1].numel() == status.st_size:
            return self._held[key][1]
        self._release(key)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            mapping = torch.from_file(str(path), shared=True, size=status.st_size, dtype=torch.uint8)
            register(mapping)
        except (RuntimeError, AssertionError, AttributeError) as error:
            os.close(descriptor)
            self.why_not = (str(error).splitlines() or [type(error).__name__])[0]
            logger.warning("weights cross in a plain file: CUDA does not lock %s: %s", path, self.why_not)
            self.close()
            return None
        self._held[key] = (descriptor, mapping)
        return mapping

    def close(self) -> None:
        """Unlock all mappings."""
        for key in list(self._held):
            self._release(key)

    def _forget_removed(self) -> None:
        """Unlock the mappings of removed files, which keep their memory."""
        for key, (descriptor, mapping) in list(self._held.items()):
            status = os.fstat(descriptor)
            if status.st_nlink == 0 or status.st_size != mapping.numel():
                self._release(key)

    def _release(self, key: tuple[int, int]) -> None:
        if (entry := self._held.pop(key, None)) is not None:
            descriptor, mapping = entry
            os.close(descriptor)
            unregister(mapping)


def register(mapping: Tensor) -> None:
    """Lock the pages of a CPU tensor. Raises RuntimeError if CUDA refuses, AssertionError without CUDA."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    _check(runtime, runtime.cudaHostRegister(mapping.data_ptr(), mapping.numel(), PORTABLE))


def unregister(mapping: Tensor) -> None:
    """Unlock the pages of a tensor that `register` locked. Raises RuntimeError."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    _check(runtime, runtime.cudaHostUnregister(mapping.data_ptr()))


def _check(runtime: Any, result: Any) -> None:
    """Raise RuntimeError for an error, and clear it: otherwise CUDA reports it again at this thread's next kernel."""
    if result == runtime.cudaError.success:
        return
    with suppress(RuntimeError):  # this kernel reports the pending error
        torch.ones(1, device="cuda")
    torch.cuda.check_error(result)
