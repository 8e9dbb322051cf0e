"""The shards loop: how many of the run's shards are read, and which, by what they bring and what the budget allows.

consumes: counts of announcements heard, peers' records     produces: subscriptions, catch-up requests
waits for: the clock                                        unblocked by: time

The own shard and those of trusted peers are always read: among these are the generators that serve this node's weights.
A shard more is read before its members are asked for what they made meanwhile, so that nothing falls in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.topology.shards import FIRST_SHARDS, choose_shards, num_affordable, shard_of

if TYPE_CHECKING:
    from ftis_node.node.context import Parts
    from ftis_node.node.loops.pull import PullLoop

log = logging.getLogger(__name__)

LOOK_S = 10.0


class ShardsLoop:
    """One look every few seconds. Does nothing in a run with one shard."""

    def __init__(self, parts: Parts, pull: PullLoop) -> None:
        self._parts = parts
        self._pull = pull
        self._num_shards = parts.manifest.wire.announcement_shards
        self._read: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Until cancelled."""
        await self._choose(count=min(FIRST_SHARDS, self._num_shards))
        while True:
            before, counted_at = self._num_heard(), time.monotonic()
            with waiting_for("the clock"):
                await asyncio.sleep(LOOK_S)
            heard_per_s = (self._num_heard() - before) / (time.monotonic() - counted_at)
            count = num_affordable(
                heard_per_s,
                num_read=len(self._read),
                num_shards=self._num_shards,
                budget_per_s=self._parts.settings.swarm.announcements_per_s,
            )
            if count != len(self._read) or not self._required() <= self._read:
                await self._choose(count=count)

    def _num_heard(self) -> int:
        return self._pull.ear.heard_in_shard.total()

    def _required(self) -> frozenset[int]:
        """The shards of the trusted peers in the directory."""
        peers = self._parts.peers
        known = self._parts.registry.peers
        return frozenset(shard_of(peer_id, self._num_shards) for peer_id in known if peers.is_trusted(peer_id))

    async def _choose(self, *, count: int) -> None:
        parts = self._parts
        readers = Counter(
            shard for peer in parts.registry.peers.values() if peer.record for shard in peer.record.read_shards
        )
        chosen = choose_shards(
            parts.identity.peer_id,
            num_shards=self._num_shards,
            count=count,
            readers=readers,
            required=self._required(),
        )
        if chosen == self._read:
            return
        await parts.gossip.read_shards(chosen)
        news, self._read = chosen - self._read, chosen
        parts.state.read_shards = chosen
        self._pull.follow(chosen)
        parts.events.write("shards", read=sorted(chosen))
        log.info("reading announcements of %d of %d shards", len(chosen), self._num_shards)
        for peer_id in await parts.gossip.members():
            with parts.guard.work_for(peer_id, Place.CATCH_UP):
                if shard_of(peer_id, self._num_shards) in news:
                    await self._pull.catch_up(peer_id)
