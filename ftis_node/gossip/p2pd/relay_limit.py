"""Asks a relay for the limits that it enforces.

p2pd starts two relay services: one with the limits of its command line, one with libp2p's defaults (128 KiB or two
minutes for each connection). The service that registers last answers. The one with our limits waits for an event in its
own goroutine. It registers last mostly if Go runs one goroutine at a time (GOMAXPROCS=1: 36 of 40 starts on idle cores,
17 of 30 on busy ones; otherwise 5 of 40 and 8 of 30).

Therefore a bootstrap node runs p2pd on one core and queries its own relay from a second, short-lived p2pd. It restarts
p2pd if the wrong service answers.

A relay answers RESERVE with its limits. Messages of the protocol "hop":
https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.errors import MachineError
from ftis_node.gossip.p2pd.client import P2pdClient, P2pdError
from ftis_node.gossip.p2pd.process import P2pdProcess

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE = b"\x02\x08\x00"  # two bytes: type = RESERVE
LIMIT, STATUS = 4, 5  # numbers of fields
STATUS_OK = 100
DURATION, DATA = 1, 2  # within the limit
MAX_ANSWER_BYTES = 4096
NUM_ARGUMENT_BYTES = {1: 8, 5: 4}  # by wire type: fixed-size values


@dataclass(frozen=True, slots=True)
class RelayLimit:
    """Bytes that a relay forwards in each direction of one connection, and for how long; 0: unlimited."""

    num_bytes: int
    duration_s: int


async def fetch_limit(client: P2pdClient, peer_id: str, *, timeout_s: float) -> RelayLimit | None:
    """Return the limits of a connected peer's relay; None if it is not a relay or gives no reservation."""
    try:
        async with asyncio.timeout(timeout_s), client.stream(peer_id, HOP, timeout_s=timeout_s) as (reader, writer):
            writer.write(RESERVE)
            await writer.drain()
            return read_reservation(await _read_delimited(reader))
    except (P2pdError, OSError, EOFError, ValueError) as error:
        logger.debug("no relay limits from %s: %r", peer_id, error)
        return None


def read_reservation(message: bytes) -> RelayLimit | None:
    """Return the limits in an answer to RESERVE, None if it is a rejection. Raises ValueError if it is invalid."""
    fields = _fields(message)
    if fields.get(STATUS) != STATUS_OK:
        return None
    limit = fields.get(LIMIT, b"")
    if not isinstance(limit, bytes):
        raise ValueError("a limit that is a number")
    within = _fields(limit)
    num_bytes, duration_s = within.get(DATA, 0), within.get(DURATION, 0)
    if not isinstance(num_bytes, int) or not isinstance(duration_s, int):
        raise ValueError("a limit without numbers")
    return RelayLimit(num_bytes=num_bytes, duration_s=duration_s)


async def fetch_own_limit(client: P2pdClient, probe_path: Path, *, peer_id: str, timeout_s: float) -> RelayLimit | None:
    """Return the limits of the relay behind `client`, queried by a second p2pd with a socket at `probe_path`."""
    arguments = [f"-listen=/unix{probe_path}", "-noListenAddrs=1", "-b=0", f"-idleTimeout={timeout_s:.0f}s"]
    try:
        process = await P2pdProcess.start(arguments, timeout_s=timeout_s)
    except MachineError as error:
        logger.debug("cannot query this node's own relay limits: %s", error)
        return None
    probe = P2pdClient(probe_path, timeout_s=timeout_s)
    try:
        await probe.connect(peer_id, await client.identify(), timeout_s=timeout_s)
        return await fetch_limit(probe, peer_id, timeout_s=timeout_s)
    except (P2pdError, OSError, EOFError) as error:
        logger.debug("cannot query this node's own relay limits: %r", error)
        return None
    finally:
        probe.close()
        await process.stop(timeout_s=0)


async def _read_delimited(reader: asyncio.StreamReader) -> bytes:
    length, shift = 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 14:
            raise ValueError("an answer too long")
    if length > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {length} bytes")
    return await reader.readexactly(length)


def _fields(message: bytes) -> dict[int, int | bytes]:
    """Return the fields of a protobuf message: numbers and byte strings. Raises ValueError if it is malformed."""
    fields: dict[int, int | bytes] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire_type = tag & 7
        if wire_type == 0:
            fields[tag >> 3], at = _varint(message, at)
            continue
        if wire_type == 2:
            length, at = _varint(message, at)
        elif wire_type in NUM_ARGUMENT_BYTES:
            length = NUM_ARGUMENT_BYTES[wire_type]
        else:
            raise ValueError(f"wire type {wire_type}")
        if at + length > len(message):
            raise ValueError("a message that ends too early")
        fields[tag >> 3], at = message[at : at + length], at + length
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("a message that ends too early")
        value |= (message[at] & 0x7F) << shift
        at += 1
        if not message[at - 1] & 0x80:
            return value, at
    raise ValueError("a number too long")
