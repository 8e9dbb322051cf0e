"""Safetensors files for weights that are published after every step: a writer that overwrites an old file, and a
reader.

The writer of safetensors first copies all bytes and creates a new file each time. This one converts and writes tensor
by tensor, into the pages of the previous version: fresh pages cost half as much again as the copy. The reader of
safetensors (0.8.0, with torch 2.13) leaks 64 bytes a tensor, which is a gigabyte in weeks.

Tensors of a GPU are copied to the host beside the computation: on a separate stream, through two page-locked buffers.

    GPU     copy a to 1 | copy b to 2 | copy c to 1 | ...
    host                | write 1     | write 2     | ...

On the stream of the computation each copy would wait until all passes that are queued there are done. From pageable
memory a copy runs at half the speed, and the host waits for it.

Format: the safetensors README, section "Format" (eight bytes of header length, a JSON header, the tensors' bytes).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ftis_node.errors import ModelError, first_line
from ftis_node.models.model_files import LENGTH_BYTES, read_header

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
WORD_BYTES = 8  # of a checksum
ALIGNMENT = 64  # of the first tensor
logger = logging.getLogger(__name__)
BUFFER_BYTES = 256 << 20
PORTABLE = 1  # cudaHostRegisterPortable: for every context of this process


class LockedFiles:
    """A cache of page-locked mappings of weight files in memory, by device and inode. Not thread-safe.

    The GPU copies to and from them directly, several times faster than from pageable memory. Locking takes longer than
    the copy itself, so mappings stay locked as long as their file exists (`publish_weights` keeps three). If
    CUDA cannot lock a mapping (no GPU, a limit, a file system that is not memory), nothing is locked from then on.
    `why_not` is the reason.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._held: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def lock(self, path: Path) -> Tensor | None:
        """Return the bytes of the file as a page-locked tensor, None if it cannot be locked. Writes change the file.

        The file must have its final size, and its file system space for it.
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
            self.why_not = first_line(error)
            logger.warning("fast weight transfer failed, using a plain file: cannot lock %s: %s", path, self.why_not)
            self.close()
            return None
        self._held[key] = (descriptor, mapping)
        return mapping

    def close(self) -> None:
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


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    locked: LockedFiles | None = None,
) -> dict[str, int]:
    """Write `tensors` as `dtype` (None: each its own), each after `change(name, tensor)`, which keeps its shape.

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
        sums: dict[str, Tensor] = {}
        _write_all(file, memoryview(beginning))
        with copy_stream(tensors.values()):
            for part in host_parts(_summed(values, sums)):
                _write_all(file, part.numpy().data)
            file.truncate()
            return _read_sums(sums)


def _summed(values: Iterable[tuple[str, Tensor]], sums: dict[str, Tensor]) -> Iterator[Tensor]:
    """Yield the tensors, and note their checksums, computed on their device so that they cover the transfer, too."""
    for name, value in values:
        sums[name] = _word_sum(value)
        yield value


def _copy_all(data: Tensor, values: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Copy tensors one after the other into `data`. Returns when all copies are complete."""
    sums, start = {}, 0
    for name, value in values:
        sums[name] = _word_sum(value)
        part = value.reshape(-1).view(torch.uint8)
        data[start : start + part.numel()].copy_(part, non_blocking=True)
        start += part.numel()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return _read_sums(sums)


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
        logger.warning("the system locks no %.0f MB of memory: %s", num_bytes / 1e6, first_line(error))
        return torch.empty(num_bytes, dtype=torch.uint8)


def checksum(tensor: Tensor) -> int:
    """Return the sum modulo 2^64 of a tensor's bytes as little-endian 64-bit words, the last one padded with zeros.

    It is exact and the same on every device. Any change of one element changes it, but a permutation of words does not.
    A core sums 12 GB/s, while the CRC-32 of a checkpoint runs at 2 GB/s.
    """
    return checksums_of({"": tensor})[""]


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor. A GPU sends them in one transfer, because each waits for its queue."""
    return _read_sums({name: _word_sum(tensor) for name, tensor in tensors.items()})


def _word_sum(tensor: Tensor) -> Tensor:
    """Return the checksum on the tensor's device, as an int64 scalar whose additions wrap around."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    num_whole = data.numel() // WORD_BYTES * WORD_BYTES
    words, rest = (data, None) if num_whole == data.numel() else (data[:num_whole], data[num_whole:])
    if words.storage_offset() % WORD_BYTES:  # a part of a larger tensor
        words = words.clone()
    total = words.view(torch.int64).sum()
    if rest is None:
        return total
    return total + pad(rest, (0, WORD_BYTES - rest.numel())).view(torch.int64)[0]


def _read_sums(sums: Mapping[str, Tensor]) -> dict[str, int]:
    """Return `_word_sum`s as unsigned numbers, by one transfer from each device."""
    values: dict[str, int] = {}
    for device in {each.device for each in sums.values()}:
        here = {name: each for name, each in sums.items() if each.device == device}
        values |= zip(here, torch.stack(list(here.values())).tolist(), strict=True)
    return {name: values[name] % 2**64 for name in sums}


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
