"""Compact forms of ids and log-probs: arrays of all completions to compressed byte planes and back.

Lossless: as many planes as the largest id needs, and four planes for the float32 log-probs.

Lossy: log-probs as 16-bit fixed point in units of 1/256 nat. An importance ratio is the exponential of a difference of
log-probs. It depends on their absolute error in nats, so a fixed point suits it better than a shorter float. The error
is at most 1/512 nat, which is 0.2 % of any ratio, for likely and unlikely tokens. A bfloat16 at -8 nats has an error of
1.6 % of a ratio. It spends bits to distinguish 1e-5 from 1e-6, which affects no ratio. The 16 bits are sent as three
planes of 5, 8 and 3 bits, lowest first. This split compresses best, because the top 3 bits are nearly always 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ftis_node.errors import RecordError
from ftis_node.records.bounds import MAX_ID_PLANES, MAX_TOKENS, NUM_FLOAT_PLANES, NUM_UNIT_PLANES
from ftis_node.records.byte_planes import compress, count_bytes, decompress, join_bytes, split_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ftis_node.records.byte_planes import Plane

MAX_COMPACT_TOKENS = MAX_TOKENS
UNITS_PER_NAT = 256
MOST_UNITS = 2**16 - 1  # -255.99 nats
LOW_BITS = 5
HIGH_SHIFT = LOW_BITS + 8


def pack_ids(token_ids: NDArray[np.int32]) -> list[bytes]:
    """Return the frames of the ids `[n]`. Raises ValueError for more ids than readers accept."""
    if len(token_ids) > MAX_COMPACT_TOKENS:
        raise ValueError(f"a compact group has at most {MAX_COMPACT_TOKENS} tokens, not {len(token_ids)}")
    unsigned = token_ids.view("<u4")
    return [compress(plane) for plane in split_bytes(unsigned, count_bytes(unsigned))]


def unpack_ids(frames: Sequence[bytes], num_tokens: int) -> NDArray[np.int32]:
    """Return the ids `[num_tokens]`, read-only. Raises RecordError: `malformed`."""
    token_ids = join_bytes(_expand(frames, num_tokens, range(1, MAX_ID_PLANES + 1)), dtype="<u4").view("<i4")
    token_ids.flags.writeable = False
    return token_ids


def pack_logprobs(logprobs: NDArray[np.float32], *, lossy: bool) -> list[bytes]:
    """Return the frames of the log-probs `[n]`. Raises ValueError for NaN in the lossy form."""
    planes = _split_units(_to_units(logprobs)) if lossy else split_bytes(logprobs.view("<u4"), NUM_FLOAT_PLANES)
    return [compress(plane) for plane in planes]


def unpack_logprobs(frames: Sequence[bytes], num_tokens: int, *, lossy: bool) -> NDArray[np.float32]:
    """Return the log-probs `[num_tokens]`, read-only. Raises RecordError: `malformed`."""
    planes = _expand(frames, num_tokens, (NUM_UNIT_PLANES if lossy else NUM_FLOAT_PLANES,))
    logprobs = _from_units(_join_units(planes)) if lossy else join_bytes(planes, dtype="<u4").view("<f4")
    logprobs.flags.writeable = False
    return logprobs


def require_compact_size(num_tokens: int) -> None:
    """Raise RecordError (`size`) for more tokens than readers accept in a compact form."""
    if num_tokens > MAX_COMPACT_TOKENS:
        raise RecordError("size", f"{num_tokens} tokens in a compact form; at most {MAX_COMPACT_TOKENS} are taken")


def _expand(frames: Sequence[bytes], num_tokens: int, allowed: Sequence[int]) -> list[Plane]:
    if len(frames) not in allowed:
        raise RecordError("malformed", f"{len(frames)} planes of a compact form: too few or too many")
    return [decompress(frame, num_bytes=num_tokens) for frame in frames]


def _to_units(logprobs: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return `-logprobs` in units of 1/256 nat, rounded and clamped to 16 bits. Raises ValueError for NaN."""
    if np.isnan(logprobs).any():
        raise ValueError("the lossy form cannot hold a NaN log-prob")
    units: NDArray[np.uint16] = np.clip(np.rint(logprobs * np.float32(-UNITS_PER_NAT)), 0, MOST_UNITS).astype(np.uint16)
    return units


def _from_units(units: NDArray[np.uint16]) -> NDArray[np.float32]:
    logprobs: NDArray[np.float32] = units * np.float32(-1 / UNITS_PER_NAT)
    return logprobs


def _split_units(units: NDArray[np.uint16]) -> tuple[Plane, Plane, Plane]:
    low, high = units & (2**LOW_BITS - 1), units >> HIGH_SHIFT
    return low.astype(np.uint8), (units >> LOW_BITS).astype(np.uint8), high.astype(np.uint8)


def _join_units(planes: Sequence[Plane]) -> NDArray[np.uint16]:
    """Join the three planes. Raises RecordError (`malformed`) if a plane has bits outside its range."""
    low, middle, high = (plane.astype(np.uint16) for plane in planes)
    if low.max() >= 2**LOW_BITS or high.max() > MOST_UNITS >> HIGH_SHIFT:
        raise RecordError("malformed", "a plane of log-probs with more bits than it has")
    units: NDArray[np.uint16] = low | middle << np.uint16(LOW_BITS) | high << np.uint16(HIGH_SHIFT)
    return units
