"""Selects the members to dial: enough in total, and some in each shard that this node reads.

Gossipsub forwards an announcement among connected peers that read its shard. A node that reads a shard must therefore
be connected to others that read it. Members of that shard always read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.swarm.topology.shards import shard_of

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

EXPLORE_FACTOR = 3  # up to this many times the wanted members, each round dials one more at random
MEMBERS_PER_SHARD = 3  # connected members wanted in each shard that is read


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
    num_wanted: int,
    rng: random.Random,
    read: Collection[int] = (0,),
    num_shards: int = 1,
) -> list[str]:
    """Return the members to dial in this round; `members` are the connected ones among `candidates`.

    The choice covers first the shards that lack members, then the total. A node with enough members dials one more at
    random. Otherwise two halves of a partitioned swarm, each with enough members, would never reconnect. A node with
    `EXPLORE_FACTOR` times the wanted members does not do this.
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
    num_more = num_wanted - len(members) - len(chosen)
    if not chosen and num_more <= 0 and len(members) < EXPLORE_FACTOR * num_wanted:
        num_more = 1
    others = [peer_id for peer_id in unconnected if peer_id not in chosen]
    return chosen + others[: max(0, num_more)]
