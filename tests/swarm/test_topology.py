"""In which shard a node announces, which shards it reads, and which peers it dials."""

import random
from collections import Counter

import pytest

from ftis_node.swarm.topology import (
    MEMBERS_PER_SHARD,
    NUM_MEMBER_BUCKETS,
    bucket_of,
    buckets_of,
    choose_dials,
    choose_shards,
    num_affordable,
    shard_of,
    shards_in_need,
)

PEERS = [f"12D3KooWPeer{number}" for number in range(400)]
CANDIDATES = [f"peer {number}" for number in range(50)]


@pytest.mark.parametrize("num_shards", [1, 4, 64])
def test_the_buckets_of_a_shard_list_the_peers_that_announce_in_it(num_shards):
    for peer in PEERS:
        assert bucket_of(peer) in buckets_of(shard_of(peer, num_shards), num_shards)
    listed = [bucket for shard in range(num_shards) for bucket in buckets_of(shard, num_shards)]
    assert sorted(listed) == list(range(NUM_MEMBER_BUCKETS))


def test_a_node_reads_its_own_shard_and_those_with_the_fewest_readers():
    peer = PEERS[0]
    own = shard_of(peer, 8)
    readers = dict.fromkeys(range(8), 5) | {(own + 1) % 8: 0, (own + 2) % 8: 1}
    assert choose_shards(peer, num_shards=8, count=3, readers=readers) == {own, (own + 1) % 8, (own + 2) % 8}
    assert choose_shards(peer, num_shards=8, count=99, readers={}) == set(range(8))
    assert choose_shards(peer, num_shards=8, count=0, readers={}) == {own}


def test_all_required_shards_are_read_even_beyond_the_count():
    peer = PEERS[0]
    own = shard_of(peer, 8)
    required = frozenset({(own + 3) % 8, (own + 4) % 8})
    readers = dict.fromkeys(range(8), 5) | {(own + 1) % 8: 0}
    assert choose_shards(peer, num_shards=8, count=1, readers=readers, required=required) == {own} | required
    chosen = choose_shards(peer, num_shards=8, count=4, readers=readers, required=required)
    assert chosen == {own, (own + 1) % 8} | required


def test_without_known_readers_nodes_spread_over_the_shards():
    read = [choose_shards(peer, num_shards=16, count=3, readers={}) for peer in PEERS]
    per_shard = [sum(shard in shards for shards in read) for shard in range(16)]
    assert min(per_shard) > 0.5 * sum(per_shard) / 16


@pytest.mark.parametrize(
    ("received_per_s", "num_read", "count"),
    [
        (10.0, 4, 8),  # little traffic: twice as many
        (10.0, 16, 16),  # all shards
        (100.0, 8, 4),  # twice the budget: half as many
        (40.0, 8, 8),  # near the budget: no change
        (1000.0, 1, 1),  # at least one
    ],
)
def test_the_budget_decides_how_many_shards_are_read(received_per_s, num_read, count):
    assert num_affordable(received_per_s, num_read=num_read, num_shards=16, budget_per_s=50.0) == count


@pytest.mark.parametrize(
    ("num_members", "num_dials"),
    [(0, 8), (5, 3), (8, 1), (23, 1), (24, 0)],  # the missing ones; one unknown peer more; none with many members
)
def test_the_number_of_dials_depends_on_the_number_of_members(num_members, num_dials):
    chosen = choose_dials(CANDIDATES, [], members=CANDIDATES[:num_members], num_target=8, rng=random.Random(1))
    assert len(set(chosen)) == num_dials


def test_only_unconnected_peers_are_dialed_in_random_order():
    connected = CANDIDATES[:47]
    for seed in range(5):
        chosen = choose_dials(CANDIDATES, connected, members=[], num_target=8, rng=random.Random(seed))
        assert set(chosen) == set(CANDIDATES[47:])
    firsts = {
        choose_dials(CANDIDATES, [], members=CANDIDATES[:8], num_target=8, rng=random.Random(seed))[0]
        for seed in range(30)
    }
    assert len(firsts) > 10


def test_members_of_each_shard_that_is_read_are_dialed():
    chosen = choose_dials(
        CANDIDATES, [], members=[], num_target=8, rng=random.Random(1), read=(1, 2, 3, 4), num_shards=8
    )
    per_shard = Counter(shard_of(peer_id, 8) for peer_id in chosen)
    assert {shard: per_shard[shard] for shard in (1, 2, 3, 4)} == dict.fromkeys((1, 2, 3, 4), MEMBERS_PER_SHARD)
    assert len(chosen) == 4 * MEMBERS_PER_SHARD, "and no more, because these reach the target"
    assert shards_in_need(chosen, read=(1, 2), num_shards=8) == {}
    assert shards_in_need(chosen[:0], read=(2, 1), num_shards=8) == {1: MEMBERS_PER_SHARD, 2: MEMBERS_PER_SHARD}
