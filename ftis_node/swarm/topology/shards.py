"""Announcements are sharded by their sender, so that what a node hears stays within its budget however large the swarm.

A peer's id decides the bucket in which the directory lists it, and the bucket its shard: all announcements of a sender
go to one topic, so gaps in its running numbers can be seen, and the members of a shard can be found without asking
anybody. Every node reads the shard that it speaks in, so each shard has readers for as long as it has speakers; what
the budget leaves goes to the shards that fewest others are seen to read.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_MEMBER_BUCKETS = 64
FIRST_SHARDS = 8  # read from the start, before anything is known of the traffic
ROOM_TO_GROW = 0.75  # of the budget: one shard more must fit below it, or a node would come and go


def bucket_of(peer_id: str) -> int:
    """The bucket in which a peer registers: a hash of its id, so nobody chooses."""
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") % NUM_MEMBER_BUCKETS


def shard_of(peer_id: str, num_shards: int) -> int:
    """The shard in which a peer announces. `num_shards` divides the number of buckets."""
    return bucket_of(peer_id) % num_shards


def buckets_of(shard: int, num_shards: int) -> range:
    """The buckets that list the peers of a shard."""
    return range(shard, NUM_MEMBER_BUCKETS, num_shards)


def choose_shards(
    peer_id: str,
    *,
    num_shards: int,
    count: int,
    readers: Mapping[int, int],
    required: frozenset[int] = frozenset(),
) -> frozenset[int]:
    """The `count` shards that a node reads: its own and all `required`, then those with the fewest known `readers`.

    More than `count` where more are required. Where several have as few readers, each node prefers others: a hash of
    its id and the shard decides.
    """
    first = required | {shard_of(peer_id, num_shards)}
    others = (shard for shard in range(num_shards) if shard not in first)
    ranked = sorted(others, key=lambda shard: (readers.get(shard, 0), _draw(peer_id, shard)))
    return first | frozenset(ranked[: max(0, count - len(first))])


def num_affordable(heard_per_s: float, *, num_read: int, num_shards: int, budget_per_s: float) -> int:
    """How many shards to read, when `num_read` of them bring `heard_per_s` announcements a second together.

    Over the budget: as many as fit, at least one. Well below it: up to twice as many, as far as they will fit.
    """
    each_per_s = heard_per_s / num_read
    if heard_per_s > budget_per_s:
        return max(1, min(num_read - 1, int(budget_per_s / each_per_s)))
    most = min(num_shards, 2 * num_read)
    if each_per_s * most <= ROOM_TO_GROW * budget_per_s:
        return most
    return max(num_read, int(ROOM_TO_GROW * budget_per_s / each_per_s))


def _draw(peer_id: str, shard: int) -> bytes:
    return hashlib.sha256(f"{peer_id}/{shard}".encode()).digest()
