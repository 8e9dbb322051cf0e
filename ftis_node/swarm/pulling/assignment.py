"""Who pulls a group when a swarm is so large that nobody pulls everything.

If each node chose for itself, a third of all groups would be pulled by nobody while others are pulled thrice. So among
the members of the sender's shard one is on duty for each group: the one whose hash with the group's id is highest
(rendezvous hashing; Thaler and Ravishankar, 1998). All of them come to the same answer without a word. Where that
member has left, or cannot keep up, nobody confirms the group; its sender announces it again, and the next is on duty.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ftis_node.swarm.topology.shards import shard_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIN_MEMBERS_PER_SHARD = 4  # members on average: with fewer, some shard has only its sender


def is_assigned(group_id: bytes, peer_id: str, members: Iterable[str], *, attempt: int = 0) -> bool:
    """Whether `peer_id` is the one of `members` (the sender is none of them) who pulls a group at this `attempt`.

    `attempt` counts how often the group was announced before. False for a peer that is no member.
    """
    own = _weight(group_id, peer_id)
    others = {member for member in members if member != peer_id}
    turn = attempt % (len(others) + 1)
    num_above = 0
    for member in others:  # in no order: most nodes soon come upon somebody before them, and hash no more
        num_above += _weight(group_id, member) > own
        if num_above > turn:
            return False
    return num_above == turn


def assignment_order(group_id: bytes, members: Iterable[str]) -> list[str]:
    """The members in the order in which they are on duty for a group: of each attempt the next."""
    return sorted(set(members), key=lambda member: _weight(group_id, member), reverse=True)


def eligible_members(
    sender: str, *, peer_id: str, known: Sequence[str], shard_members: Sequence[str], num_shards: int
) -> Sequence[str] | None:
    """The members among whom the duty for a sender's groups goes round; None where this node has no part in it.

    They are the other members of the sender's shard. In a swarm so small that a shard may have none, they are all
    members `known`: everybody knows everybody there.
    """
    if len(known) < MIN_MEMBERS_PER_SHARD * num_shards:
        return [member for member in known if member != sender]
    if shard_of(sender, num_shards) != shard_of(peer_id, num_shards):
        return None
    return [member for member in shard_members if member != sender]


def _weight(group_id: bytes, peer_id: str) -> bytes:
    return hashlib.blake2b(peer_id.encode(), key=group_id, digest_size=8).digest()
