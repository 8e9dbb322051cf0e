"""A peer that outlives the power cuts of a node and records which groups were acknowledged.

It sends valid groups to the node and records the acknowledged ones. It pulls the announced groups of the node,
acknowledges them, and records their numbers. No power cut may contradict these records.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.stubs.group_maker import GroupMaker
from ftis_node.errors import RecordError
from ftis_node.gossip import FetchOutcome, GossipLimits
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.records.envelope import announce_group, open_announcement, open_envelope, seal_group
from ftis_node.records.identity import Identity
from tests.gossip.helpers import settings

PERIOD_S = 0.5
NUM_TOKENS = 12
LIMITS = GossipLimits(max_body_bytes=4 << 20)


class RecordingPeer:
    """One peer in this process, with a separate p2pd.

    `acknowledged` has the group of each (sender, number) that one side acknowledged to the other.
    """

    def __init__(self, gossip: Libp2pGossip, identity: Identity, maker: GroupMaker) -> None:
        self._gossip, self._identity, self._maker = gossip, identity, maker
        self._envelopes: dict[bytes, bytes] = {}
        self._ids: dict[bytes, tuple[str, int]] = {}
        self._newest: list[bytes] = []
        self.acknowledged: dict[tuple[str, int], str] = {}
        self.contradictions: list[str] = []
        gossip.serve(self._lookup, on_confirm=self._on_confirm, answer=self._answer)

    @property
    def address(self) -> str:
        """The address that the node dials."""
        return self._gossip.addresses[0]

    async def send(self) -> None:
        """Announce a valid group each period, until cancelled."""
        number = 0
        while True:
            number += 1
            group = self._maker.group(self._identity, number, num_tokens=NUM_TOKENS)
            envelope = seal_group(group, self._identity)
            data = envelope.to_bytes()
            self._envelopes[envelope.id], self._ids[envelope.id] = data, (group.sender, number)
            self._newest = [announce_group(envelope, group, envelope_bytes=len(data)).to_bytes()]
            await self._gossip.announce(self._newest[0])
            await asyncio.sleep(PERIOD_S)

    async def receive(self) -> None:
        """Pull and acknowledge the groups that the node announces, until cancelled."""
        async for message in self._gossip.announcements():
            try:
                announcement = open_announcement(message.payload)
            except RecordError as error:
                self.contradictions.append(f"an announcement is invalid: {error}")
                continue
            if announcement.sender is None:
                await self._pull(message.sender, announcement.number, announcement.id)

    async def _pull(self, sender: str, number: int, group_id: bytes) -> None:
        known = self.acknowledged.get((sender, number))
        if known not in (None, group_id.hex()):
            self.contradictions.append(f"number {number} was announced for {known} and for {group_id.hex()}")
        fetched = await self._gossip.fetch(sender, [group_id])
        if fetched.outcome is FetchOutcome.COMPLETE and not fetched.bodies:
            self.contradictions.append(f"group {number} was announced and cannot be fetched")
        for body in fetched.bodies:
            assert open_envelope(body).id == group_id
            self.acknowledged[sender, number] = group_id.hex()
            await self._gossip.confirm(sender, [group_id])

    async def _lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        return [self._envelopes[one] for one in ids if one in self._envelopes]

    async def _on_confirm(self, peer_id: str, ids: Sequence[bytes]) -> None:
        self.acknowledged |= {self._ids[group_id]: group_id.hex() for group_id in ids if group_id in self._ids}

    async def _answer(self, peer_id: str, question: bytes) -> Sequence[bytes]:
        return self._newest


@asynccontextmanager
async def recording_peer(folder: Path, maker: GroupMaker) -> AsyncIterator[RecordingPeer]:
    """Yield a peer that sends and receives until the block ends. Raises the error of a task that failed."""
    identity = Identity.generate()
    gossip = Libp2pGossip(settings(folder), identity=identity, run_id=maker.manifest.run_id, limits=LIMITS)
    peer = RecordingPeer(gossip, identity, maker)
    await gossip.start()
    tasks = [asyncio.create_task(peer.send(), name="send"), asyncio.create_task(peer.receive(), name="receive")]
    try:
        yield peer
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await gossip.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error
