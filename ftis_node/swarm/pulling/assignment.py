"""Assigns each group to one member that pulls it, in a swarm so large that no node pulls everything.

If each node chose at random, no node would pull about a third of all groups, and several would pull others. Therefore
rendezvous hashing (Thaler and Ravishankar, 1998) assigns each group to one member of the sender's shard. It is the
member whose hash with the group's id is highest. All members compute the same assignment without communication.

If the assigned member has left or is overloaded, the group stays unconfirmed. Its sender announces it again, and the
member with the next highest hash is assigned.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ftis_node.swarm.topology import shard_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIN_MEMBERS_PER_SHARD = 4  # on average; with fewer, some shard contains only its sender


def is_assigned(group_id: bytes, peer_id: str, members: Iterable[str], *, attempt: int = 0) -> bool:
    """Return whether `peer_id` is the member assigned to a group at this `attempt`; `members` excludes the sender.

    `attempt` counts the earlier announcements of the group.
    """
    own = _weight(group_id, peer_id)
    others = {member for member in members if member != peer_id}
    turn = attempt % (len(others) + 1)
    num_above = 0
    for member in others:  # unsorted: most nodes soon find a higher hash and stop
        num_above += _weight(group_id, member) > own
        if num_above > turn:
            return False
    return num_above == turn


def assignment_order(group_id: bytes, members: Iterable[str]) -> list[str]:
    """Return the members in the order in which they are assigned to a group, one for each attempt."""
    return sorted(set(members), key=lambda member: _weight(group_id, member), reverse=True)


def eligible_members(
    sender: str, *, peer_id: str, known: Sequence[str], shard_members: Sequence[str], num_shards: int
) -> Sequence[str] | None:
    """Return the members to which the sender's groups may be assigned; None if this node is not one of them.

    They are the other members of the sender's shard. In a swarm so small that a shard may be empty, they are all
    `known` members, because every node knows every other there.
    """
    if len(known) < MIN_MEMBERS_PER_SHARD * num_shards:
        return [member for member in known if member != sender]
    if shard_of(sender, num_shards) != shard_of(peer_id, num_shards):
        return None
    return [member for member in shard_members if member != sender]


def _weight(group_id: bytes, peer_id: str) -> bytes:
    return hashlib.blake2b(peer_id.encode(), key=group_id, digest_size=8).digest()
