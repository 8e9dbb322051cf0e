"""The order of pulls if nodes have domains."""

from hypothesis import given
from hypothesis import strategies as st

from ftis_node.swarm.demand import ANY, DomainPortion, OwnDomain, portions
from ftis_node.swarm.pull_queue import PullItem, PullQueue

COUNTS = st.integers(0, 50)
SHARES = st.floats(0, 1)


def test_portions_by_hand():
    assert portions(0.75, stock=8, need=8, num_inside=0, num_outside=0) == (
        DomainPortion(6, True),
        DomainPortion(2, False),
        ANY,
    )
    assert portions(0.25, stock=8, need=0, num_inside=0, num_outside=8) == (
        DomainPortion(0, False),
        DomainPortion(2, True),
        ANY,
    )
    assert portions(1.0, stock=8, need=0, num_inside=8, num_outside=0) == (
        DomainPortion(0, True),
        DomainPortion(0, False),
        ANY,
    )
    assert portions(0.5, stock=8, need=None, num_inside=3, num_outside=2) == (DomainPortion(None, False), ANY)
    assert portions(0.5, stock=8, need=None, num_inside=2, num_outside=3) == (DomainPortion(None, True), ANY)


@given(share=SHARES, stock=COUNTS, need=st.none() | COUNTS, inside=COUNTS, outside=COUNTS)
def test_portions_keep_within_the_shares_and_any_group_comes_last(share, stock, need, inside, outside):
    made = portions(share, stock=stock, need=need, num_inside=inside, num_outside=outside)
    assert made[-1] == ANY, "any group fills what one domain lacks"
    if need is not None:
        taken = {portion.in_domain: portion.num or 0 for portion in made[:-1]}
        assert set(taken) == {True, False}
        assert sum(taken.values()) <= stock
        assert taken[True] + inside <= max(inside, round(share * stock))
        assert taken[False] + outside <= max(outside, stock - round(share * stock))


def test_a_group_is_in_the_domain_only_if_all_its_labels_are():
    domain = OwnDomain(frozenset({"a", "b"}), share=1.0)
    assert domain.is_claimed(frozenset({"a"}))
    assert domain.is_claimed(frozenset({"a", "b"}))
    assert not domain.is_claimed(frozenset({"a", "c"}))
    assert not domain.is_claimed(frozenset()), "a group without labels is in no domain"


def test_only_matching_groups_are_requested_and_assigned_ones_always():
    queue = PullQueue()
    for number, sender in enumerate("aabb"):
        name = f"{sender}{number}".encode()
        queue.add(PullItem(name, sender, number + 1, 100, float(number), is_assigned=name == b"b2"), holder=sender)
    requested = []
    while batch := queue.next_request(most=9, need=None, max_bytes=1 << 20, is_meant=lambda item: item.sender == "a"):
        requested.append([item.id for item in batch.items])
    assert requested == [[b"a1", b"a0"], [b"b2"]]
    assert queue.num_in_flight_of(lambda item: item.sender == "a") == 2
    rest = queue.next_request(most=9, need=None, max_bytes=1 << 20)
    assert rest is not None and [item.id for item in rest.items] == [b"b3"]
