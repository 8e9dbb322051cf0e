"""The frames of a stream: one request, then items, then an end.

A frame is its kind (1 byte), the length of its payload (4 bytes, big-endian) and its payload.
"""

from __future__ import annotations

import asyncio
import struct
from enum import IntEnum

from ftis_node.errors import RecordError
from ftis_node.gossip.types import ID_BYTES, Fetched, FetchOutcome, GossipLimits

HEADER = struct.Struct(">BI")
CHUNK_BYTES = 1 << 16  # time limits apply to each chunk, so that a long item over a slow link does not time out


def unpack_ids(packed: bytes, *, limits: GossipLimits) -> list[bytes]:
    """Return the unique ids of a peer's request, which are concatenated. Raises RecordError for any other bytes."""
    num_ids, odd_bytes = divmod(len(packed), ID_BYTES)
    if odd_bytes or not 1 <= num_ids <= limits.max_ids_per_request:
        raise RecordError("ids", f"{len(packed)} bytes of ids")
    return list(dict.fromkeys(packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)))


def outcome_of(error: RecordError) -> FetchOutcome:
    return FetchOutcome.BROKEN if error.reason in ("frame_kind", "sealed") else FetchOutcome.TOO_LARGE


class ItemCollector:
    def __init__(self, *, max_items: int, max_item_bytes: int, max_bytes: int) -> None:
        self._items: list[bytes] = []
        self._max_items = max_items
        self._max_item_bytes = max_item_bytes
        self._bytes_left = max_bytes

    @property
    def next_max_bytes(self) -> int:
        return min(self._max_item_bytes, self._bytes_left)

    def add(self, item: bytes) -> None:
        """Add an item. Raises RecordError if it is one too many or too large."""
        if len(self._items) >= self._max_items:
            raise RecordError("frame_count", f"more than the {self._max_items} requested items")
        if len(item) > self.next_max_bytes:
            raise RecordError("frame_size", f"{len(item)} bytes where at most {self.next_max_bytes} are allowed")
        self._bytes_left -= len(item)
        self._items.append(item)

    def end(self, outcome: FetchOutcome) -> Fetched:
        return Fetched(items=tuple(self._items), outcome=outcome)


class Frame(IntEnum):
    """Kind of a frame. A stream without END or BUSY was interrupted."""

    REQUEST = 1
    ITEM = 2
    END = 3  # no further items
    BUSY = 4  # no further items: the server is at its limits


async def read_frame(reader: asyncio.StreamReader, *, max_bytes: int, idle_s: float) -> tuple[Frame, bytes]:
    """Read the next frame.

    Raises RecordError for an unknown kind or a payload above `max_bytes`, TimeoutError if nothing arrives for `idle_s`
    seconds, IncompleteReadError if the stream ends.
    """
    async with asyncio.timeout(idle_s):
        code, length = HEADER.unpack(await reader.readexactly(HEADER.size))
    try:
        kind = Frame(code)
    except ValueError:
        raise RecordError("frame_kind", f"unknown frame {code}") from None
    if length > max_bytes:
        raise RecordError("frame_size", f"a frame of {length} bytes where at most {max_bytes} are allowed")
    payload = bytearray()
    while len(payload) < length:
        async with asyncio.timeout(idle_s):
            payload += await reader.readexactly(min(CHUNK_BYTES, length - len(payload)))
    return kind, bytes(payload)


async def write_frame(writer: asyncio.StreamWriter, kind: Frame, payload: bytes = b"", *, idle_s: float) -> None:
    """Send a frame. Raises TimeoutError if the peer accepts nothing for `idle_s` seconds."""
    frame = HEADER.pack(kind, len(payload)) + payload
    for at in range(0, len(frame), CHUNK_BYTES):
        writer.write(frame[at : at + CHUNK_BYTES])
        async with asyncio.timeout(idle_s):
            await writer.drain()
