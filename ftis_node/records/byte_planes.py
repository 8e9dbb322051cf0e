"""Integers split into byte planes, each compressed as one zstd frame.

The high bytes of token ids and log-probs take few values and compress well. The low bytes are noise and do not. With
separate planes the entropy coder uses separate statistics for each. zstd stores an incompressible plane as it is,
ten bytes longer.

Another field gives the size of each plane before decompression. A frame must declare exactly that size and decode to
it. Frames with a dictionary or with trailing data are rejected.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from ftis_node.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Plane = NDArray[np.uint8]

# zstd's fastest strategy. The small hash table and the long minimum match keep it from matching accidental repeats. On
# noise with few values the entropy coder alone is faster and compresses better (by 10 % on the third byte of ids).
PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, window_log=14, hash_log=6, min_match=7, target_length=0
)
MAX_WINDOW_BYTES = 1 << 20  # memory of the decoder besides its output


class _Zstd(threading.local):
    """One zstd compressor and decompressor for each thread, because a zstd context is not thread-safe."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_zstd = _Zstd()


def split_bytes(values: NDArray[Any], num_planes: int) -> list[Plane]:
    """Return the `num_planes` lowest bytes of unsigned little-endian `values` `[n]`, lowest first, `[n]` each."""
    by_byte = values.view(np.uint8).reshape(len(values), values.itemsize)
    return [np.ascontiguousarray(by_byte[:, place]) for place in range(num_planes)]


def join_bytes(planes: Sequence[Plane], *, dtype: str) -> NDArray[Any]:
    """Return the unsigned little-endian integers `[n]` with these bytes, lowest first; missing planes count as 0."""
    values: NDArray[Any] = np.zeros(len(planes[0]), dtype=dtype)
    by_byte = values.view(np.uint8).reshape(len(values), values.itemsize)
    for place, plane in enumerate(planes):
        by_byte[:, place] = plane
    return values


def count_bytes(values: NDArray[Any]) -> int:
    """Return the number of bytes that the largest of the unsigned `values` needs, at least 1."""
    return max(1, (int(values.max()).bit_length() + 7) // 8)


def compress(plane: Plane) -> bytes:
    """Return a plane as a zstd frame."""
    frame: bytes = _zstd.compressor.compress(plane.data)
    return frame


def decompress(frame: bytes, *, num_bytes: int) -> Plane:
    """Return the plane of `num_bytes` bytes in a frame, read-only. Raises RecordError (`malformed`) otherwise."""
    try:
        stated = zstandard.get_frame_parameters(frame)
        if stated.content_size != num_bytes or stated.dict_id:
            raise RecordError("malformed", f"a plane that does not declare the {num_bytes} bytes of its lengths")
        plane = _zstd.decompressor.decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RecordError("malformed", f"a plane is not a zstd frame: {error}") from None
    if len(plane) != num_bytes:
        raise RecordError("malformed", f"a plane of {len(plane)} bytes, its lengths need {num_bytes}")
    return np.frombuffer(plane, dtype=np.uint8)
