"""Topology: how announcements are divided into shards, and which members a node dials.

A hash of the sender's id selects its directory bucket, and the bucket its shard. All announcements of a sender go to
one topic, so gaps in its sequence numbers are visible. Every node reads its own shard, so each shard with senders has
readers. Gossipsub forwards an announcement among connected peers that read its shard. So a node dials members of each
shard that it reads.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping

NUM_MEMBER_BUCKETS = 64
FIRST_SHARDS = 8  # read at the start, before the traffic is known
GROWTH_MARGIN = 0.75  # fraction of the budget that one more shard must fit in; prevents oscillation
EXPLORE_FACTOR = 3  # up to this many times `num_target` members, each round dials one more at random
MEMBERS_PER_SHARD = 3  # target number of connected members in each shard that is read


def bucket_of(peer_id: str) -> int:
    """Return the bucket in which a peer registers: a hash of its id, so no peer can choose."""
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") % NUM_MEMBER_BUCKETS


def shard_of(peer_id: str, num_shards: int) -> int:
    """Return the shard in which a peer announces. `num_shards` divides the number of buckets."""
    return bucket_of(peer_id) % num_shards


def buckets_of(shard: int, num_shards: int) -> range:
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


def shards_in_need(members: Collection[str], *, read: Collection[int], num_shards: int) -> dict[int, int]:
    """Return how many more members of each shard in `read` should be connected, for shards that need any."""
    missing = dict.fromkeys(sorted(read), MEMBERS_PER_SHARD)
    for peer_id in members:
        shard = shard_of(peer_id, num_shards)
        if shard in missing:
            missing[shard] -= 1
    return {shard: count for shard, count in missing.items() if count > 0}


def choose_dials(
    candidates: Collection[str],
    connected: Collection[str],
    *,
    members: Collection[str],
    num_target: int,
    rng: random.Random,
    read: Collection[int] = (0,),
    num_shards: int = 1,
) -> list[str]:
    """Return the members to dial in this round; `members` are the connected ones among `candidates`.

    The choice covers first the shards that lack members, then the total. A node with enough members dials one more at
    random. Otherwise two halves of a partitioned swarm, each with enough members, would never reconnect. A node with
    `EXPLORE_FACTOR` times `num_target` members does not do this.
    """
    unconnected = sorted(set(candidates) - set(connected))
    rng.shuffle(unconnected)
    need = shards_in_need(members, read=read, num_shards=num_shards)
    chosen = []
    for peer_id in unconnected:
        shard = shard_of(peer_id, num_shards)
        if need.get(shard, 0) > 0:
            need[shard] -= 1
            chosen.append(peer_id)
    num_more = num_target - len(members) - len(chosen)
    if not chosen and num_more <= 0 and len(members) < EXPLORE_FACTOR * num_target:
        num_more = 1
    others = [peer_id for peer_id in unconnected if peer_id not in chosen]
    return chosen + others[: max(0, num_more)]
