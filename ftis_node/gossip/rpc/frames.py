"""The wire of a served stream: one request, then items, then an end.

    frame = kind (1 byte) + length (4 bytes, big-endian) + payload

The length is checked before anything of that size is read, and every wait has a limit, so a peer can make us neither
hold more than was agreed nor wait for ever. A stream that ends without END or BUSY was cut.
"""

from __future__ import annotations

import asyncio
import struct
from enum import IntEnum

from ftis_node.errors import RecordError

HEADER = struct.Struct(">BI")
CHUNK_BYTES = 1 << 16  # progress is judged by chunks, so that a long body over a slow line is not taken for silence


class Frame(IntEnum):
    """What a frame is."""

    REQUEST = 1
    ITEM = 2
    END = 3  # that was all
    BUSY = 4  # no item will come: too many streams are being served


async def read_frame(reader: asyncio.StreamReader, *, max_bytes: int, idle_s: float) -> tuple[Frame, bytes]:
    """The next frame.

    Raises RecordError for an unknown kind or a payload over `max_bytes`, TimeoutError where nothing comes for `idle_s`
    seconds, IncompleteReadError where the stream ends.
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
    """Sends a frame. Raises TimeoutError where the other end takes nothing for `idle_s` seconds."""
    writer.write(HEADER.pack(kind, len(payload)) + payload[:CHUNK_BYTES])
    offset = CHUNK_BYTES
    while True:
        async with asyncio.timeout(idle_s):
            await writer.drain()
        if offset >= len(payload):
            return
        writer.write(payload[offset : offset + CHUNK_BYTES])
        offset += CHUNK_BYTES
