"""Frames of a stream: one request, then items, then an end.

    frame = kind (1 byte) + length (4 bytes, big-endian) + payload

The length is checked before the payload is read, and every read and write has a time limit. So a peer can neither
exhaust memory nor block a task. A stream without END or BUSY was interrupted.
"""

from __future__ import annotations

import asyncio
import struct
from enum import IntEnum

from ftis_node.errors import RecordError

HEADER = struct.Struct(">BI")
CHUNK_BYTES = 1 << 16  # time limits apply to each chunk, so that a long body over a slow link does not time out


class Frame(IntEnum):
    """Kind of a frame."""

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
    writer.write(HEADER.pack(kind, len(payload)) + payload[:CHUNK_BYTES])
    offset = CHUNK_BYTES
    while True:
        async with asyncio.timeout(idle_s):
            await writer.drain()
        if offset >= len(payload):
            return
        writer.write(payload[offset : offset + CHUNK_BYTES])
        offset += CHUNK_BYTES
