"""Which members to dial."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ftis_node.swarm.topology.dials import MEMBERS_PER_SHARD, choose_dials, shards_in_need
from ftis_node.swarm.topology.shards import shard_of

CANDIDATES = [f"peer {number}" for number in range(50)]


@pytest.mark.parametrize(
    ("num_members", "num_dials"),
    [(0, 8), (5, 3), (8, 1), (23, 1), (24, 0)],  # missing ones; one stranger more; many members: none
)
def test_how_many_are_dialled(num_members: int, num_dials: int) -> None:
    chosen = choose_dials(CANDIDATES, [], members=CANDIDATES[:num_members], num_wanted=8, rng=random.Random(1))
    assert len(set(chosen)) == num_dials


def test_only_strangers_are_dialled_and_not_always_the_same() -> None:
    connected = CANDIDATES[:47]
    for seed in range(5):
        chosen = choose_dials(CANDIDATES, connected, members=[], num_wanted=8, rng=random.Random(seed))
        assert set(chosen) == set(CANDIDATES[47:])
    firsts = {
        choose_dials(CANDIDATES, [], members=CANDIDATES[:8], num_wanted=8, rng=random.Random(seed))[0]
        for seed in range(30)
    }
    assert len(firsts) > 10


def test_each_shard_that_is_read_gets_members_of_its_own() -> None:
    chosen = choose_dials(
        CANDIDATES, [], members=[], num_wanted=8, rng=random.Random(1), read=(1, 2, 3, 4), num_shards=8
    )
    per_shard = Counter(shard_of(peer_id, 8) for peer_id in chosen)
    assert {shard: per_shard[shard] for shard in (1, 2, 3, 4)} == dict.fromkeys((1, 2, 3, 4), MEMBERS_PER_SHARD)
    assert len(chosen) == 4 * MEMBERS_PER_SHARD, "and no more than that, where it is enough in all"
    assert shards_in_need(chosen, read=(1, 2), num_shards=8) == {}
    assert shards_in_need(chosen[:0], read=(2, 1), num_shards=8) == {1: MEMBERS_PER_SHARD, 2: MEMBERS_PER_SHARD}
