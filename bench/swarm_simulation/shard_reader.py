"""Chooses the shards that a node reads: its own, and as many others as the budget allows."""

from __future__ import annotations

from ftis_node.swarm.topology import FIRST_SHARDS, choose_shards, num_affordable
from swarm_simulation.transfers import RequestingPeer

FIRST_INTERVAL_S = 10.0


class ShardReader:
    """Shard selection of one node. `shards` are those that it reads now."""

    __slots__ = ("_announcements_before", "_adjusted_at", "_node", "shards")

    def __init__(self, node: RequestingPeer) -> None:
        self._node = node
        self._announcements_before = 0
        self._adjusted_at = 0.0
        self.shards: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Subscribe to the first shards: several for a new node, one for a node of the start, whose number has
        settled.
        """
        world = self._node.world
        self._adjusted_at = world.events.now
        self._read(min(FIRST_SHARDS, world.settings.num_simulated_shards) if world.events.now else 1)

    def adjust(self, num_announcements: int) -> None:
        """Read more or fewer shards, by the announcements received since the last call."""
        world = self._node.world
        passed_s = world.events.now - self._adjusted_at
        if passed_s < FIRST_INTERVAL_S:
            return
        count = num_affordable(
            (num_announcements - self._announcements_before) / passed_s,
            num_read=len(self.shards),
            num_shards=min(world.settings.num_shards, world.settings.num_simulated_shards),
            budget_per_s=world.settings.announcements_per_s,
        )
        self._announcements_before, self._adjusted_at = num_announcements, world.events.now
        if count != len(self.shards):
            self._read(count)

    def leave(self) -> None:
        """Unsubscribe from all shards."""
        for shard in self.shards:
            self._node.world.readers[shard].pop(self._node.peer_id)
        self.shards = frozenset()

    def _read(self, count: int) -> None:
        node, world = self._node, self._node.world
        chosen = choose_shards(
            node.peer_id, num_shards=world.settings.num_shards, count=count, readers=world.known_readers()
        )
        for shard in self.shards - chosen:
            world.readers[shard].pop(node.peer_id)
        for shard in chosen - self.shards:
            world.readers[shard][node.peer_id] = node
        self.shards = chosen
