"""The shards loop: chooses the run's gossip shards that this node reads, by their yield and the budget.

    consumes: counts of announcements received, peers' records     produces: subscriptions, catch-up requests
    waits for: the clock                                           unblocked by: time

The node always reads its own shard and those of trusted peers, because generators with this node's weights are there.
It subscribes to a new shard before it queries the members for earlier groups, so that it misses none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.topology import FIRST_SHARDS, choose_shards, num_affordable, shard_of

if TYPE_CHECKING:
    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.context import NodeContext
    from ftis_node.node.loops.announcements import AnnouncementHandler
    from ftis_node.node.loops.backfill import BackfillLoop
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.peers.registry import PeerRegistry

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 10.0


class ShardsLoop:
    """Loop that selects shards every few seconds. It does nothing in a run with one shard."""

    def __init__(
        self,
        *,
        context: NodeContext,
        gossip: Gossip,
        peers: PeerManager,
        registry: PeerRegistry,
        announcements: AnnouncementHandler,
        backfill: BackfillLoop,
    ) -> None:
        self._context = context
        self._gossip = gossip
        self._peers = peers
        self._registry = registry
        self._announcements = announcements
        self._backfill = backfill
        self._guard = gossip.guard
        self._num_shards = self._context.manifest.wire.announcement_shards
        self._read: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Run until canceled."""
        await self._choose(count=min(FIRST_SHARDS, self._num_shards))
        while True:
            before, counted_at = self._num_announcements(), time.monotonic()
            with waiting_for("the clock"):
                await asyncio.sleep(POLL_INTERVAL_S)
            announcements_per_s = (self._num_announcements() - before) / (time.monotonic() - counted_at)
            count = num_affordable(
                announcements_per_s,
                num_read=len(self._read),
                num_shards=self._num_shards,
                budget_per_s=self._context.settings.swarm.announcements_per_s,
            )
            if count != len(self._read) or not self._required() <= self._read:
                await self._choose(count=count)

    def _num_announcements(self) -> int:
        return self._announcements.announcements_by_shard.total()

    def _required(self) -> frozenset[int]:
        """Return the shards of the trusted peers in the directory."""
        peers = self._peers
        known = self._registry.peers
        return frozenset(shard_of(peer_id, self._num_shards) for peer_id in known if peers.is_trusted(peer_id))

    async def _choose(self, *, count: int) -> None:
        readers = Counter(
            shard for peer in self._registry.peers.values() if peer.record for shard in peer.record.read_shards
        )
        chosen = choose_shards(
            self._context.identity.peer_id,
            num_shards=self._num_shards,
            count=count,
            readers=readers,
            required=self._required(),
        )
        if chosen == self._read:
            return
        await self._gossip.read_shards(chosen)
        news, self._read = chosen - self._read, chosen
        self._context.state.read_shards = chosen
        self._backfill.read_shards(chosen)
        self._context.events.write("shards", read=sorted(chosen))
        log.debug("reading announcements of %d of %d shards", len(chosen), self._num_shards)
        for peer_id in await self._gossip.members():
            with self._guard.work_for(peer_id, Place.CATCH_UP):
                if shard_of(peer_id, self._num_shards) in news:
                    await self._backfill.catch_up(peer_id)
