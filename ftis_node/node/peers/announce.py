"""Announcements of stored groups, published in this node's gossip shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.records.envelope import Announcement
from ftis_node.swarm.topology import shard_of

if TYPE_CHECKING:
    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.context import NodeContext, NodeDescription
    from ftis_node.replay.reader import HeldGroup


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
