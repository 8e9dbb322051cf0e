"""Honest members without a model, which send a multiple of the groups of the swarm's nodes.

Each has an identity, a p2pd and valid groups: prompts of the run's task, one right answer, random completions,
true rewards. A node pulls, validates, stores and evicts them like others, and trains on some. The guests share the
process of the soak and never pull anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from ftis_node.config.manifest import load_manifest
from ftis_node.gossip import GossipLimits, NetworkSettings
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.lab.child_processes import ANY_PORT
from ftis_node.records.envelope import announce_group, seal_group
from ftis_node.records.identity import Identity
from ftis_node.swarm.topology import shard_of
from stubs.group_maker import GroupMaker

NUM_GUESTS = 4
NUM_HELD = 2048  # envelopes that a guest keeps
NUM_TOLD = 256  # announcements in a reply to a query
NUM_TOKENS = 12
TURN_S = 0.25


class Guest:
    """One member. It has announced `num_sent` groups."""

    def __init__(self, folder: Path, maker: GroupMaker, address: str) -> None:
        self._identity, self._maker, self.num_sent = Identity.generate(), maker, 0
        self._held: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()  # envelope and announcement, by id
        network = NetworkSettings(sockets_dir=folder, listen=(ANY_PORT,), peers=(address,), use_nat_helpers=False)
        self._gossip = Libp2pGossip(
            network,
            identity=self._identity,
            run_id=maker.manifest.run_id,
            limits=GossipLimits(),
            num_shards=maker.manifest.wire.announcement_shards,
        )
        self._gossip.serve(self._lookup, answer=self._answer)

    async def start(self) -> None:
        """Join the swarm. Raises the errors of `Gossip.start`."""
        await self._gossip.start()

    async def close(self) -> None:
        """Leave the swarm."""
        await self._gossip.close()

    async def send(self, groups_per_s: float) -> None:
        """Announce groups at that rate, a few at a time, until canceled."""
        due, looked_at = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(TURN_S)
            now = time.monotonic()
            due, looked_at = due + (now - looked_at) * groups_per_s, now
            while due >= 1:
                due -= 1
                announcement = self._next()
                shard = shard_of(self._identity.peer_id, self._maker.manifest.wire.announcement_shards)
                await self._gossip.announce(announcement, shard=shard)

    def _next(self) -> bytes:
        self.num_sent += 1
        group = self._maker.group(self._identity, self.num_sent, num_tokens=NUM_TOKENS)
        envelope = seal_group(group, self._identity)
        data = envelope.to_bytes()
        announcement = announce_group(envelope, group, envelope_bytes=len(data)).to_bytes()
        self._held[envelope.id] = data, announcement
        if len(self._held) > NUM_HELD:
            self._held.popitem(last=False)
        return announcement

    async def _lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        return [self._held[one][0] for one in ids if one in self._held]

    async def _answer(self, peer_id: str, question: bytes) -> Sequence[bytes]:
        return [announcement for _, announcement in list(self._held.values())[-NUM_TOLD:]]


@asynccontextmanager
async def guests(folder: Path, model: Path, address: str, *, groups_per_s: float) -> AsyncIterator[list[Guest]]:
    """Start guests that send at that rate together."""
    maker = GroupMaker(model, load_manifest(str(folder / "run.toml")))
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        present = [Guest(folder / f"guest-{number}", maker, address) for number in range(NUM_GUESTS)]
        for guest in present:
            stack.push_async_callback(guest.close)
            await guest.start()
        sending = [tasks.create_task(guest.send(groups_per_s / NUM_GUESTS), name="guest") for guest in present]
        yield present
        for task in sending:
            task.cancel()
