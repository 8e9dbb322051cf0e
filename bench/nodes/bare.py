"""Plain calls between the same p2pds, as a baseline of `bench/gossip.py`: hivemind's RPC without checks.

A body is a protobuf message in reply to its id: no announcement, no signature, no frame of this project, no disk. For
latency a message of an announcement's size goes over a gossipsub topic, and each receiver requests the body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftis_node.gossip.p2pd.client import P2pdClient
from ftis_node.gossip.p2pd.hivemind_bindings import AttachedP2P, Multiaddr, PeerID, p2pd_pb2

Body = p2pd_pb2.PSMessage  # a message with a field of bytes
NAME = "bare"
TOPIC = "/bare"
CALLS_IN_FLIGHT = 16
ANNOUNCEMENT_BYTES = 200
CONTROL_TIMEOUT_S = 20.0


class BareNode:
    """A node that serves bodies by their number, and requests those of others."""

    def __init__(self, peer_id: str, control_path: Path) -> None:
        self.peer_id = peer_id
        self.bodies: list[bytes] = []
        self.received_bytes = 0
        self.latencies_s: list[float] = []
        self._others: list[str] = []
        self._control_path = control_path
        self._control = P2pdClient(control_path, timeout_s=CONTROL_TIMEOUT_S)
        self._p2p: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, peer_ids: Sequence[str]) -> None:
        """Register the call and subscribe to the topic. `peer_ids` are those of all nodes."""
        self._others = [peer_id for peer_id in peer_ids if peer_id != self.peer_id]
        self._p2p = await AttachedP2P.replicate(Multiaddr(f"/unix{self._control_path}"))
        await self._p2p.add_protobuf_handler(NAME, self._give, Body)
        self._tasks.append(asyncio.create_task(self._listen()))

    async def close(self) -> None:
        """Unregister the call and unsubscribe."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._p2p.shutdown()

    async def call(self, peer_id: str, number: int) -> bytes:
        """Request one body."""
        request = Body(data=number.to_bytes(4, "big"))
        answer = await self._p2p.call_protobuf_handler(PeerID.from_base58(peer_id), NAME, request, Body)
        self.received_bytes += len(answer.data)
        return bytes(answer.data)

    async def call_for_all(self) -> None:
        """Request all bodies of all other nodes, many at a time, peers in turn. All nodes have the same number."""
        pending = iter([(peer_id, number) for number in range(len(self.bodies)) for peer_id in self._others])

        async def work() -> None:
            for peer_id, number in pending:
                await self.call(peer_id, number)

        await asyncio.gather(*(work() for _ in range(CALLS_IN_FLIGHT)))

    async def announce(self, number: int) -> None:
        """Announce a body on the topic."""
        message = f"{self.peer_id} {number} {time.monotonic()}".encode().ljust(ANNOUNCEMENT_BYTES)
        await self._control.publish(TOPIC, message)

    async def _give(self, request: Any, context: object) -> Any:
        return Body(data=self.bodies[int.from_bytes(request.data, "big")])

    async def _listen(self) -> None:
        async with self._control.subscribe(TOPIC) as messages, asyncio.TaskGroup() as calls:
            async for message in messages:
                if message.sender != self.peer_id:
                    calls.create_task(self._fetch(message.payload))

    async def _fetch(self, message: bytes) -> None:
        peer_id, number, sent_at = message.decode().split()
        await self.call(peer_id, int(number))
        self.latencies_s.append(time.monotonic() - float(sent_at))
