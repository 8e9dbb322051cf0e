"""The shards loop: chooses the gossip shards that the node reads, by the pull rule, their yield and the budget.

The node always reads its own shard and those of trusted peers, because generators with this node's weights are there.
It subscribes to a new shard before it queries the members for earlier groups, so that it misses none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass

from ftis_node.node.loops.announcement_backfill import BackfillLoop
from ftis_node.node.peers.announcements import AnnouncementHandler
from ftis_node.node.peers.node_part import NodePart
from ftis_node.swarm.demand import pulls_all
from ftis_node.swarm.topology import FIRST_SHARDS, choose_shards, num_affordable, shard_of

log = logging.getLogger(__name__)

SHARDS_INTERVAL_S = 10.0
ANNOUNCEMENTS_PER_S = 50.0  # above it a node that does not pull every group reads fewer shards


@dataclass(eq=False, repr=False)
class ShardsLoop(NodePart):
    """Loop that selects shards every few seconds. It does nothing in a run with one shard.

    A node that pulls every group reads every shard. Otherwise a burst of announcements would end a subscription, and
    the groups of that shard would arrive ten seconds late.
    """

    announcements: AnnouncementHandler
    backfill: BackfillLoop

    def __post_init__(self) -> None:
        self._num_shards = self.context.manifest.wire.announcement_shards

    async def run(self) -> None:
        await self._choose(count=min(FIRST_SHARDS, self._num_shards))
        while True:
            before, counted_at = self.announcements.announcements_by_shard.total(), time.monotonic()
            await asyncio.sleep(SHARDS_INTERVAL_S)
            num_received = self.announcements.announcements_by_shard.total() - before
            count = await self._num_to_read(num_received / (time.monotonic() - counted_at))
            read = self.context.state.read_shards
            if count != len(read) or not self._required() <= read:
                await self._choose(count=count)

    async def _num_to_read(self, announcements_per_s: float) -> int:
        swarm, num_members = self.context.settings.swarm, len(await self.gossip.known_members())
        if pulls_all(swarm.pull_policy, num_members=num_members):
            return self._num_shards
        how = {"num_read": len(self.context.state.read_shards), "num_shards": self._num_shards}
        return num_affordable(announcements_per_s, **how, budget_per_s=ANNOUNCEMENTS_PER_S)

    def _required(self) -> frozenset[int]:
        trusted = filter(self.peers.is_trusted, self.peers.registry.peers)
        return frozenset(shard_of(peer_id, self._num_shards) for peer_id in trusted)

    async def _choose(self, *, count: int) -> None:
        readers = Counter(
            shard for peer in self.peers.registry.peers.values() if peer.record for shard in peer.record.read_shards
        )
        chosen = choose_shards(
            self.context.peer_id, num_shards=self._num_shards, count=count, readers=readers, required=self._required()
        )
        news = chosen - self.context.state.read_shards
        if chosen == self.context.state.read_shards:
            return
        await self.gossip.read_shards(chosen)
        self.context.state.read_shards = chosen
        self.context.events.write("shards", read=sorted(chosen))
        log.debug("reading announcements of %d of %d shards", len(chosen), self._num_shards)
        for peer_id in await self.gossip.members():
            if shard_of(peer_id, self._num_shards) in news:
                self.backfill.catch_up(peer_id)
