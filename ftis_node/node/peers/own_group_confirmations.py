"""Which peers confirmed which of this node's groups, and the groups that wait for a confirmation."""

from __future__ import annotations

from ftis_node.backoff import BackoffTable, doubling
from ftis_node.node.peers.peer_registry import PeerRegistry
from ftis_node.swarm.lru import IdsByPeer, LruDict

MAX_CONFIRMED = 1 << 16
MAX_PENDING = 1024
MAX_UNVERIFIED = 256  # claims of peers to hold a group: all peers see the id in its announcement
MAX_PAIRS = 1 << 14  # peers and groups; a group that is announced again is confirmed again, soon after
REANNOUNCE_S = 10.0  # a group without a confirmation is announced again after this time


class OwnGroupConfirmations:
    """Own groups that peers confirmed. `pending` and `unverified` are the queues of the re-announce loop."""

    def __init__(self, registry: PeerRegistry) -> None:
        self._registry = registry
        self.confirmed_ids = LruDict[bytes, None](MAX_CONFIRMED)
        self.num_confirmed = 0
        self._pairs = LruDict[tuple[str, bytes], None](MAX_PAIRS)
        self.pending = BackoffTable[bytes](doubling(REANNOUNCE_S), capacity=MAX_PENDING)
        self.unverified = IdsByPeer(capacity=MAX_UNVERIFIED)

    def confirm(self, peer_id: str, group_id: bytes) -> bool:
        """Note that `peer_id` has the group. Return True if it is the first peer that confirms the group."""
        peer = self._registry.seen(peer_id)
        if (peer_id, group_id) not in self._pairs:
            peer.confirmed += 1
            self._pairs[peer_id, group_id] = None
        if group_id in self.confirmed_ids:
            return False
        self.confirmed_ids[group_id] = None
        self.pending.discard(group_id)
        self.num_confirmed += 1
        return True
