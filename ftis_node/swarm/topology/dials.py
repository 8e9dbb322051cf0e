"""Whom to dial: enough members in all, and some in each shard that is read, for topics live on connections.

Gossipsub passes an announcement on among connected peers that read its shard. A node that reads a shard must therefore
be connected to others in it, and those whose own it is are sure to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.swarm.topology.shards import shard_of

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

EXPLORE_FACTOR = 3  # up to this many times the wanted members, each round dials one stranger more
MEMBERS_PER_SHARD = 3  # connected ones, of each shard that is read


def shards_in_need(members: Collection[str], *, read: Collection[int], num_shards: int) -> dict[int, int]:
    """For each shard that is read: how many more of its own members should be connected, where any."""
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
    """Which members to dial in this round; `members` are those of them that are connected.

    Those that are missing in a shard, then as many as are missing in all. With enough of them one more, at random: two
    halves of a swarm that lost sight of each other have enough members each, and only a stranger leads across. A node
    with many members leaves that to the others.
    """
    strangers = sorted(set(candidates) - set(connected))
    rng.shuffle(strangers)
    need = shards_in_need(members, read=read, num_shards=num_shards)
    chosen = []
    for peer_id in strangers:
        shard = shard_of(peer_id, num_shards)
        if need.get(shard, 0) > 0:
            need[shard] -= 1
            chosen.append(peer_id)
    num_more = num_wanted - len(members) - len(chosen)
    if not chosen and num_more <= 0 and len(members) < EXPLORE_FACTOR * num_wanted:
        num_more = 1
    others = [peer_id for peer_id in strangers if peer_id not in chosen]
    return chosen + others[: max(0, num_more)]
