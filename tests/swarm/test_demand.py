"""The pull rule: one member is assigned to each group."""

import hashlib
from collections import Counter
from random import Random

import pytest

from ftis_node.swarm.demand import (
    MIN_MEMBERS_PER_SHARD,
    NUM_TURNS,
    assignment_order,
    eligible_members,
    is_assigned,
)
from ftis_node.swarm.topology import shard_of

MEMBERS = [f"peer-{number}" for number in range(20)]
IDS = [hashlib.sha256(bytes([number % 256, number // 256])).digest() for number in range(600)]


def test_each_attempt_assigns_exactly_one_member_and_a_different_one():
    for group_id in IDS[:50]:
        for attempt in range(4):
            assert len([peer for peer in MEMBERS if is_assigned(group_id, peer, MEMBERS, attempt=attempt)]) == 1
        firsts = {
            peer for peer in MEMBERS for attempt in range(4) if is_assigned(group_id, peer, MEMBERS, attempt=attempt)
        }
        assert len(firsts) == 4


def test_an_attempt_beyond_the_number_of_members_starts_again():
    assert is_assigned(IDS[0], "alone", [], attempt=3)
    assert is_assigned(IDS[0], "alone", ["alone"], attempt=0)


def test_all_members_are_eligible_in_a_small_swarm_and_those_of_the_shard_in_a_large_one():
    me, sender = MEMBERS[0], MEMBERS[1]
    few = eligible_members(sender, peer_id=me, known=MEMBERS[1:], shard_members=["x", sender], num_shards=8)
    assert few == MEMBERS[1:]
    many = MEMBERS * MIN_MEMBERS_PER_SHARD
    for other in MEMBERS[1:]:
        eligible = eligible_members(other, peer_id=me, known=many, shard_members=["x", other], num_shards=8)
        assert eligible == (["x", other] if shard_of(other, 8) == shard_of(me, 8) else None)


def test_assignments_agree_with_a_ranking_of_all_eligible_members():
    random = Random(5)
    num_assigned = Counter[int]()
    for group_id in IDS:
        members, sender, peer = random.sample(MEMBERS, random.randint(0, 8)), *random.sample(MEMBERS, 2)
        eligible, attempt = set(random.sample(MEMBERS, random.randint(8, 20))), random.choice((*range(10), 255))
        ranked = assignment_order(group_id, {peer, *(eligible & set(members))} - {sender})
        expected = ranked[attempt % NUM_TURNS % len(ranked)] == peer
        assert expected == is_assigned(
            group_id, peer, members, sender=sender, attempt=attempt, is_eligible=eligible.__contains__
        )
        num_assigned[min(attempt, len(ranked))] += expected
    assert min(num_assigned[attempt] for attempt in range(3)) > 5


@pytest.mark.parametrize(("attempt", "num_visited", "max_queried"), [(0, 16, 1), (255, 80, 16)])
def test_the_work_for_one_group_is_bounded_for_many_members(attempt, num_visited, max_queried):
    visited: list[str] = []
    queried: list[str] = []

    class CountedMembers(list[str]):
        def __iter__(self):
            for member in super().__iter__():
                visited.append(member)
                yield member

    def is_eligible(member):
        queried.append(member)
        return True

    members = CountedMembers(f"member-{number}" for number in range(2000))
    for group_id in IDS:
        is_assigned(group_id, "me", members, attempt=attempt, is_eligible=is_eligible)
    assert len(queried) <= max_queried * len(IDS)
    assert len(visited) < num_visited * len(IDS)
