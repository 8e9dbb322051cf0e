"""Announcements of held groups, and telling them to the readers of this node's shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.records.envelope import Announcement
from ftis_node.swarm.topology.shards import shard_of

if TYPE_CHECKING:
    from ftis_node.node.context import Parts
    from ftis_node.replay.reader import HeldGroup


async def announce(parts: Parts, announcement: Announcement) -> bool:
    """Tells an own group; False where the network is down just now."""
    shard = shard_of(parts.identity.peer_id, parts.manifest.wire.announcement_shards)
    return await parts.gossip.announce(announcement.to_bytes(), shard=shard)


def announcement_of(parts: Parts, held: HeldGroup) -> Announcement:
    """The announcement of a kept group in the exact form: its ids are of our tokenizer, or it would not be here."""
    return Announcement(
        id=held.id,
        number=held.number,
        envelope_bytes=held.num_bytes,
        num_tokens=held.num_tokens,
        tokenizer=bytes.fromhex(parts.tokenizer.fingerprint)[:8],
        policy_version=held.policy_version,
        created_at=held.created_at,
        sender=None if held.own else held.sender,
    )
