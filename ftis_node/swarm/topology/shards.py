"""Announcements are sharded by sender, so that the announcements a node reads fit its budget in a swarm of any size.

A hash of the peer id selects the directory bucket, and the bucket selects the shard. All announcements of a sender go
to one topic, so gaps in its sequence numbers are visible. The members of a shard can be found without asking any of
them.

Every node reads its own shard, so each shard with senders has readers. The rest of the budget goes to the shards with
the fewest known readers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_MEMBER_BUCKETS = 64
FIRST_SHARDS = 8  # read at the start, before the traffic is known
GROWTH_MARGIN = 0.75  # fraction of the budget that one more shard must fit in; prevents oscillation


def bucket_of(peer_id: str) -> int:
    """Return the bucket in which a peer registers: a hash of its id, so no peer can choose."""
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") % NUM_MEMBER_BUCKETS


def shard_of(peer_id: str, num_shards: int) -> int:
    """Return the shard in which a peer announces. `num_shards` divides the number of buckets."""
    return bucket_of(peer_id) % num_shards


def buckets_of(shard: int, num_shards: int) -> range:
    """Return the buckets in which the peers of a shard register."""
    return range(shard, NUM_MEMBER_BUCKETS, num_shards)


def choose_shards(
    peer_id: str,
    *,
    num_shards: int,
    count: int,
    readers: Mapping[int, int],
    required: frozenset[int] = frozenset(),
) -> frozenset[int]:
    """Return the `count` shards to read: the own one and all `required`, then those with the fewest `readers`.

    The result is larger than `count` if more are required. Ties are broken by a hash of the node's id and the shard, so
    nodes prefer different shards.
    """
    first = required | {shard_of(peer_id, num_shards)}
    others = (shard for shard in range(num_shards) if shard not in first)
    ranked = sorted(others, key=lambda shard: (readers.get(shard, 0), _draw(peer_id, shard)))
    return first | frozenset(ranked[: max(0, count - len(first))])


def num_affordable(received_per_s: float, *, num_read: int, num_shards: int, budget_per_s: float) -> int:
    """Return how many shards to read, if `num_read` of them bring `received_per_s` announcements a second together.

    Above the budget, the result is the number that fits, at least one. Well below it, the result grows to at most twice
    `num_read`, as far as the budget allows.
    """
    each_per_s = received_per_s / num_read
    if received_per_s > budget_per_s:
        return max(1, min(num_read - 1, int(budget_per_s / each_per_s)))
    most = min(num_shards, 2 * num_read)
    if each_per_s * most <= GROWTH_MARGIN * budget_per_s:
        return most
    return max(num_read, int(GROWTH_MARGIN * budget_per_s / each_per_s))


def _draw(peer_id: str, shard: int) -> bytes:
    return hashlib.sha256(f"{peer_id}/{shard}".encode()).digest()
