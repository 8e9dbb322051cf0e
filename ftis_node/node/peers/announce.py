"""Announcements of stored groups, published in this node's gossip shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.records.envelope import Announcement
from ftis_node.swarm.delivery import PendingConfirmations, UnverifiedConfirmations
from ftis_node.swarm.topology import shard_of

if TYPE_CHECKING:
    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.context import NodeContext, NodeDescription
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.replay.reader import HeldGroup

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


class Announcer:
    """Builds announcements and publishes them in this node's gossip shard."""

    def __init__(self, *, context: NodeContext, about: NodeDescription, gossip: Gossip) -> None:
        self._gossip = gossip
        self._tokenizer = about.tokenizer_prefix
        self._shard = shard_of(context.peer_id, context.manifest.wire.announcement_shards)

    async def may_batch(self) -> bool:
        """Return whether an announcement may have further groups in `more`."""
        return await self._gossip.all_read_batches()

    async def announce(self, announcement: Announcement) -> bool:
        """Announce an own group, with those in `more`. Return False if the network is down."""
        return await self._gossip.announce(announcement.to_bytes(), shard=self._shard)

    def announcement_of(self, held: HeldGroup) -> Announcement:
        """Return the announcement of a stored group, as token ids: the buffer stores only ids of our tokenizer."""
        return Announcement(
            id=held.id,
            number=held.number,
            envelope_bytes=held.num_bytes,
            num_tokens=held.num_tokens,
            tokenizer=self._tokenizer,
            policy_version=held.policy_version,
            created_at=held.created_at,
            sender=None if held.own else held.sender,
        )
