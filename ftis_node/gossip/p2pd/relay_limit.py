"""Queries a relay for the limits that it enforces.

p2pd starts two relay services: one with the limits of its command line, one with libp2p's defaults (128 KiB or two
minutes for each connection). The service that registers last answers. With GOMAXPROCS=1 ours usually does: in 36 of 40
starts on idle cores. So a bootstrap node runs p2pd on one core and queries its own relay from a second, short-lived
p2pd. It restarts p2pd if the wrong service answers. A relay answers RESERVE with its limits: `proto/circuit.proto`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from ftis_node.errors import MachineError
from ftis_node.gossip.p2pd import circuit_pb2
from ftis_node.gossip.p2pd.client import P2pdClient, P2pdError
from ftis_node.gossip.p2pd.process import P2pdProcess
from ftis_node.gossip.session_parts import SessionParts

logger = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
MAX_ANSWER_BYTES = 4096
RESERVE = circuit_pb2.HopMessage(type=circuit_pb2.HopMessage.RESERVE).SerializeToString()


@dataclass(frozen=True, slots=True)
class RelayLimit:
    """Bytes that a relay forwards in each direction of one connection, and for how long; 0: unlimited."""

    num_bytes: int
    duration_s: int


async def fetch_limit(client: P2pdClient, peer_id: str, *, timeout_s: float) -> RelayLimit | None:
    """Return the limits of a connected peer's relay; None if it is not a relay or gives no reservation."""
    try:
        async with asyncio.timeout(timeout_s), client.stream(peer_id, HOP, timeout_s=timeout_s) as (reader, writer):
            writer.write(bytes([len(RESERVE)]) + RESERVE)
            await writer.drain()
            return read_reservation(await _read_delimited(reader))
    except (P2pdError, OSError, EOFError, ValueError) as error:
        logger.debug("no relay limits from %s: %r", peer_id, error)
        return None


def read_reservation(message: bytes) -> RelayLimit | None:
    """Return the limits in an answer to RESERVE, None if it is a refusal. Raises ValueError if it is invalid."""
    try:
        answer = circuit_pb2.HopMessage.FromString(message)
    except DecodeError as error:
        raise ValueError(f"the relay's answer is not a HopMessage: {error}") from error
    if answer.status != circuit_pb2.OK:
        return None
    return RelayLimit(num_bytes=answer.limit.data, duration_s=answer.limit.duration)


async def fetch_own_limit(parts: SessionParts, *, control_path: Path, probe_path: Path) -> RelayLimit | None:
    """Return the limits of this node's relay, queried by a second p2pd with a control socket at `probe_path`."""
    timeout_s = parts.settings.dial_timeout_s
    arguments = [f"-listen=/unix{probe_path}", "-noListenAddrs=1", "-b=0", f"-idleTimeout={timeout_s:.0f}s"]
    async with AsyncExitStack() as stack:
        client = P2pdClient(control_path, timeout_s=parts.settings.control_timeout_s)
        stack.callback(probe_path.unlink, missing_ok=True)
        try:
            process = await P2pdProcess.start(arguments, timeout_s=timeout_s)
            stack.push_async_callback(process.stop, timeout_s=0)
            probe = P2pdClient(probe_path, timeout_s=timeout_s)
            peer_id = parts.identity.peer_id
            await probe.connect(peer_id, await client.identify(), timeout_s=timeout_s)
            return await fetch_limit(probe, peer_id, timeout_s=timeout_s)
        except (MachineError, P2pdError, OSError, EOFError) as error:
            logger.debug("cannot query this node's own relay limits: %r", error)
            return None


async def _read_delimited(reader: asyncio.StreamReader) -> bytes:
    length, shift = 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 14:
            raise ValueError("the relay's answer is too long")
    if length > MAX_ANSWER_BYTES:
        raise ValueError(f"the relay's answer has {length} bytes, at most {MAX_ANSWER_BYTES} are read")
    return await reader.readexactly(length)
