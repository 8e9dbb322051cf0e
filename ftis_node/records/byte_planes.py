"""Integers as planes of bytes, each plane one zstd frame.

The high parts of token ids and of log-probs take few values and compress; the low parts are noise and do not. Each
plane has separate statistics, which is all that an entropy coder needs. zstd stores an incompressible plane as it is,
ten bytes longer.

No frame is decompressed before its size is known from another field. A frame must declare exactly that size and decode
to it. It needs no dictionary and is alone in its bytes.
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

# zstd's fastest strategy. The table is too small, and the shortest match too long, to find repeats that are chance. On
# noise of few values the entropy coder alone is smaller (by 10 % on the third byte of ids) and quicker.
PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, window_log=14, hash_log=6, min_match=7, target_length=0
)
MAX_WINDOW_BYTES = 1 << 20  # what decoding may hold beside its output


class _Zstd(threading.local):
    """zstd's working memory, made once a thread: a context may not be used by two at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_zstd = _Zstd()


def split_bytes(values: NDArray[Any], num_planes: int) -> list[Plane]:
    """The `num_planes` lowest bytes of unsigned little-endian `values` `[n]`, lowest first: `[n]` each."""
    by_byte = values.view(np.uint8).reshape(len(values), values.itemsize)
    return [np.ascontiguousarray(by_byte[:, place]) for place in range(num_planes)]


def join_bytes(planes: Sequence[Plane], *, dtype: str) -> NDArray[Any]:
    """The unsigned little-endian integers `[n]` with these bytes, lowest first; bytes that have no plane are 0."""
    values: NDArray[Any] = np.zeros(len(planes[0]), dtype=dtype)
    by_byte = values.view(np.uint8).reshape(len(values), values.itemsize)
    for place, plane in enumerate(planes):
        by_byte[:, place] = plane
    return values


def count_bytes(values: NDArray[Any]) -> int:
    """How many bytes the largest of the unsigned `values` needs, at least 1."""
    return max(1, (int(values.max()).bit_length() + 7) // 8)


def compress(plane: Plane) -> bytes:
    """A plane as a frame."""
    frame: bytes = _zstd.compressor.compress(plane.data)
    return frame


def decompress(frame: bytes, *, num_bytes: int) -> Plane:
    """The plane of `num_bytes` bytes in a frame, read-only. Raises RecordError (`malformed`) for any other."""
    try:
        stated = zstandard.get_frame_parameters(frame)
        if stated.content_size != num_bytes or stated.dict_id:
            raise RecordError("malformed", f"a plane that does not state the {num_bytes} bytes the lengths promise")
        plane = _zstd.decompressor.decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RecordError("malformed", f"a plane is no zstd frame: {error}") from None
    if len(plane) != num_bytes:
        raise RecordError("malformed", f"a plane of {len(plane)} bytes where the lengths promise {num_bytes}")
    return np.frombuffer(plane, dtype=np.uint8)
