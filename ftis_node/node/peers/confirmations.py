"""Record of which own groups peers have confirmed: confirmed, pending, and not verified yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.swarm.delivery import PendingConfirmations, UnverifiedConfirmations

if TYPE_CHECKING:
    from ftis_node.node.peers.registry import PeerRegistry

MAX_CONFIRMED = 1 << 16
MAX_PAIRS = 1 << 14  # peers and groups; a group that is announced again is confirmed again, soon after
REANNOUNCE_S = 10.0  # a group without a confirmation is announced again after this time


class Confirmations:
    """Own groups that peers confirmed. `pending` and `unverified` are the queues of the re-announce loop."""

    def __init__(self, registry: PeerRegistry, *, reannounce_s: float = REANNOUNCE_S) -> None:
        self._registry = registry
        self.confirmed_ids: dict[bytes, None] = {}
        self.num_confirmed = 0
        self._pairs: dict[tuple[str, bytes], None] = {}
        self.pending = PendingConfirmations(first_wait_s=reannounce_s)
        self.unverified = UnverifiedConfirmations()

    def confirm(self, peer_id: str, group_id: bytes) -> bool:
        """Note that `peer_id` has the group. Return True if it is the first peer that confirms the group."""
        peer = self._registry.seen(peer_id)
        if (peer_id, group_id) not in self._pairs:
            peer.confirmed += 1
            self._pairs[peer_id, group_id] = None
            if len(self._pairs) > MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
        if group_id in self.confirmed_ids:
            return False
        self.confirmed_ids[group_id] = None
        self.pending.confirmed(group_id)
        self.num_confirmed += 1
        if len(self.confirmed_ids) > MAX_CONFIRMED:
            del self.confirmed_ids[next(iter(self.confirmed_ids))]
        return True
