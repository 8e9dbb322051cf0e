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
    """Own groups that peers confirmed. `pending` and `unverified` are the queues of the re-announce loop.

    `num_confirmed` counts groups that were announced since the start. A peer may also ask for older ones.
    """

    def __init__(self, registry: PeerRegistry) -> None:
        self._registry = registry
        self.confirmed_ids = LruDict[bytes, None](MAX_CONFIRMED)
        self.num_confirmed = 0
        self._unconfirmed = LruDict[bytes, None](MAX_CONFIRMED)  # announced since the start
        self._pairs = LruDict[tuple[str, bytes], None](MAX_PAIRS)
        self.pending = BackoffTable[bytes](doubling(REANNOUNCE_S), capacity=MAX_PENDING)
        self.unverified = IdsByPeer(capacity=MAX_UNVERIFIED)

    def announced(self, group_id: bytes) -> bool:
        """Note the first announcement of a group. Return whether it still needs a confirmation."""
        if group_id in self.confirmed_ids:  # a peer had asked for it before
            self.num_confirmed += 1
            return False
        self._unconfirmed[group_id] = None
        return True

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
        if group_id in self._unconfirmed:
            del self._unconfirmed[group_id]
            self.num_confirmed += 1
        return True
