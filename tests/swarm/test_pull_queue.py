"""The queue of wanted groups: which to request next, and from which peer."""

from dataclasses import replace

import pytest

from ftis_node.swarm.demand import PullDemand, pull_demand
from ftis_node.swarm.pull_queue import MAX_TRIES, PullItem, PullQueue, PullRequest, PullSource

ANY = 1 << 30


def item(name: str, *, sender: str = "a", at: float = 0.0, num_bytes: int = 100, **more: bool) -> PullItem:
    return PullItem(id=name.encode(), sender=sender, number=1, num_bytes=num_bytes, created_at=at, **more)


def ids_of(batch: PullRequest | None) -> list[str]:
    return [] if batch is None else [one.id.decode() for one in batch.items]


def queue_of(*items: PullItem) -> PullQueue:
    queue = PullQueue()
    for one in items:
        assert queue.add(one, holder=one.sender)
    return queue


def test_the_newest_groups_come_first_and_peers_take_turns():
    queue = queue_of(*(item(f"a{n}", at=n) for n in range(3)), *(item(f"b{n}", sender="b", at=n) for n in range(3)))
    order = [ids_of(queue.next_request(most=2, need=None, max_bytes=ANY)) for _ in range(4)]
    assert order == [["a2", "a1"], ["b2", "b1"], ["a0"], ["b0"]]
    assert queue.num_in_flight == len(queue) == 6
    assert queue.next_request(most=2, need=None, max_bytes=ANY) is None


def test_the_need_is_spread_over_senders_and_assigned_groups_come_first():
    queue = queue_of(
        *(item(f"a{n}", at=n) for n in range(5)),
        *(item(f"b{n}", sender="b", at=n) for n in range(5)),
        item("d", sender="b", at=-1.0, is_assigned=True),
    )
    assert ids_of(queue.next_request(most=16, need=2, max_bytes=ANY)) == ["a4"]
    assert ids_of(queue.next_request(most=16, need=1, max_bytes=ANY)) == ["d", "b4"]
    assert queue.next_request(most=16, need=0, max_bytes=ANY) is None


def test_a_request_stays_below_max_bytes_but_holds_at_least_one_group():
    queue = queue_of(*(item(f"a{n}", at=n, num_bytes=60) for n in range(3)))
    assert ids_of(queue.next_request(most=16, need=None, max_bytes=120)) == ["a2", "a1"]
    assert ids_of(queue.next_request(most=16, need=None, max_bytes=10)) == ["a0"]


def test_a_group_that_its_sender_lacks_is_requested_from_holders_then_from_members():
    queue = queue_of(item("a0"))
    assert not queue.add(item("a0"), holder="b")
    requested = []
    for _ in range(MAX_TRIES):
        batch = queue.next_request(most=1, need=None, max_bytes=ANY)
        requested.append(batch.source.peer_id)
        given_up = queue.missed(batch, missing=[b"a0"], others=["a", "c", "b", "d", "e"])
    assert (requested, [one.id for one in given_up]) == (["a", "b", "c", "d"], [b"a0"])
    assert len(queue) == queue.num_in_flight == 0


def test_a_text_group_is_requested_from_its_sender_only():
    queue = queue_of(item("a0", as_text=True))
    batch = queue.next_request(most=1, need=None, max_bytes=ANY)
    assert batch is not None and batch.source == PullSource("a", True)
    assert queue.missed(batch, missing=[b"a0"], others=["b"]) == [item("a0", as_text=True)]


def asked_next(queue: PullQueue, *, but: str = "") -> tuple[PullSource, list[PullItem]]:
    batch = queue.next_request(most=9, need=None, max_bytes=ANY, may_ask=lambda peer: peer != but)
    return batch.source, list(batch.items)


@pytest.mark.parametrize("first_is_text", [True, False])
@pytest.mark.parametrize("ending", ["busy", "empty", "old", "too_many"])
def test_each_peer_is_asked_by_its_own_announcement(first_is_text, ending):
    """A false announcement of an id, before the true one of its sender, changes nothing for the sender."""
    false = item("x", sender="mallory", at=1.0, num_bytes=1, as_text=first_is_text, is_own=True)
    true = item("x", sender="victim", at=2.0, num_bytes=99, as_text=not first_is_text, is_own=True)
    queue = PullQueue(max_per_holder=2)
    queue.add(false, holder="mallory")
    queue.add(true, holder="victim")
    if ending in ("busy", "empty"):
        batch = queue.next_request(most=1, need=None, max_bytes=ANY)
        assert batch is not None and batch.source == PullSource("mallory", first_is_text)
        if ending == "busy":
            queue.put_back(batch)
            queue.reroute(lambda peer: peer != "mallory")
        else:
            assert queue.missed(batch, missing=[b"x"], others=["other"]) == []
    elif ending == "old":
        queue.drop_older(1.5)
    else:
        for name in "yz":
            queue.add(item(name, sender="mallory", as_text=first_is_text), holder="mallory")
    assert asked_next(queue, but="mallory") == (PullSource("victim", not first_is_text), [true])


def test_a_text_that_claims_the_id_of_another_peers_group_does_not_replace_it():
    queue = queue_of(item("x", sender="mallory", as_text=True))
    queue.add(item("x", sender="victim"), holder="victim")
    queue.next_request(most=1, need=None, max_bytes=ANY)
    queue.arrived([b"x"])
    assert asked_next(queue) == (PullSource("victim", False), [item("x", sender="victim")])


def test_a_peer_that_did_not_announce_a_group_promised_nothing():
    queue = queue_of(item("x", is_own=True))
    batch = queue.next_request(most=1, need=None, max_bytes=ANY)
    assert batch is not None and batch.items[0].is_own
    queue.missed(batch, missing=[b"x"], others=["b"])
    source, (one,) = asked_next(queue)
    assert source == PullSource("b", False) and not one.is_own


def invented_queue(**bounds: int) -> PullQueue:
    """Return a queue with a group that `a` announced, and two newer ones, one assigned, that `mallory` did not send."""
    queue = PullQueue(**bounds)
    for name in "xy":
        queue.add(item(name, sender="mallory", at=9.0, is_own=True, is_assigned=name == "x"), holder="mallory")
    queue.add(item("a0", sender="a", at=1.0), holder="a")
    batch = queue.next_request(most=9, need=None, max_bytes=ANY, may_ask=lambda peer: peer == "mallory")
    assert batch is not None and queue.missed(batch, missing=[b"x", b"y"], others=["a"]) == []
    return queue


def test_groups_that_a_peer_did_not_announce_come_after_its_own_and_are_dropped_first():
    order = [["a0"], ["x"], ["y"]]
    queue = invented_queue()
    assert [ids_of(queue.next_request(most=1, need=1, max_bytes=ANY)) for _ in order] == order
    assert ids_of(invented_queue().next_request(most=9, need=1, max_bytes=ANY)) == ["a0", "x"]
    for queue in (invented_queue(max_per_holder=3), invented_queue(capacity=3)):
        queue.add(item("a1", sender="a", at=2.0), holder="a")
        assert b"a0" in queue and len(queue) == 3
    queue = invented_queue()
    queue.add(item("y", sender="a", at=2.0, is_own=True), holder="a")
    assert asked_next(queue)[1][0] == item("y", sender="a", at=2.0, is_own=True), "it has now announced it"


def test_an_arrived_group_leaves_the_queue_and_a_busy_peer_is_asked_again():
    queue = queue_of(item("a0"), item("a1", at=1.0))
    batch = queue.next_request(most=2, need=None, max_bytes=ANY)
    queue.put_back(batch)
    assert queue.num_in_flight == 0 and len(queue) == 2
    batch = queue.next_request(most=2, need=None, max_bytes=ANY)
    assert ids_of(batch) == ["a1", "a0"]
    queue.arrived([b"a0", b"a1"])
    assert len(queue) == 0 and b"a0" not in queue


def test_the_queue_is_bounded_and_drops_the_oldest():
    queue = PullQueue(max_per_holder=3)
    for number in range(5):
        queue.add(item(f"a{number}", at=number), holder="a")
    assert len(queue) == 3
    queue.drop_older(3.0)
    assert ids_of(queue.next_request(most=9, need=None, max_bytes=ANY)) == ["a4", "a3"]
    assert queue.next_request(most=9, need=None, max_bytes=ANY) is None


@pytest.mark.parametrize(
    ("rule", "num_members", "num_ready", "expected"),
    [
        ("auto", 16, 999, PullDemand(need=None, takes_assigned=True)),
        ("auto", 17, 0, PullDemand(need=19, takes_assigned=True)),
        ("auto", 17, 19, PullDemand(need=0, takes_assigned=True)),
        ("auto", 17, 999, PullDemand(need=0, takes_assigned=True)),
        ("needed", 1, 0, PullDemand(need=19, takes_assigned=True)),
        ("all", 999, 0, PullDemand(need=None, takes_assigned=True)),
    ],
)
def test_the_rule_auto_pulls_only_needed_groups_in_a_large_swarm(rule, num_members, num_ready, expected):
    demand = pull_demand(rule, num_members=num_members, per_step=10, num_ready=num_ready, num_in_flight=1)  # type: ignore[arg-type]
    assert demand == expected


def test_a_full_queue_drops_the_oldest_and_assigned_groups_last():
    queue = PullQueue(capacity=3)
    for number in range(6):
        queue.add(item(f"w{number}", sender=f"s{number}", at=number, is_assigned=number in (0, 2)), holder=f"s{number}")
    assert len(queue) == 3
    assert [ids_of(queue.next_request(most=9, need=0, max_bytes=ANY)) for _ in range(2)] == [["w0"], ["w2"]]
    assert ids_of(queue.next_request(most=9, need=9, max_bytes=ANY)) == ["w5"]


def test_assigned_groups_alone_are_requested_without_a_need():
    """Also one that is assigned later, and one that its holder lacked."""
    queue = queue_of(*(item(f"a{number}", sender=f"s{number}") for number in range(5)))
    assert queue.next_request(most=9, need=0, max_bytes=ANY) is None
    queue.add(item("a3", sender="s3", is_assigned=True), holder="s3")
    batch = queue.next_request(most=9, need=0, max_bytes=ANY)
    assert batch is not None and ids_of(batch) == ["a3"]
    queue.put_back(batch)
    assert queue.next_request(most=9, need=0, max_bytes=ANY) == batch
    queue.missed(batch, missing=[b"a3"], others=["s9"])
    hint = replace(batch.items[0], is_announced=False)
    assert queue.next_request(most=9, need=0, max_bytes=ANY) == PullRequest(PullSource("s9", False), (hint,))
    assert queue.next_request(most=9, need=0, max_bytes=ANY) is None, "the group is in flight"


@pytest.mark.parametrize(("num_in_flight", "takes_assigned"), [(39, True), (40, False)])
def test_a_node_with_too_many_requests_in_flight_takes_no_assigned_groups(num_in_flight, takes_assigned):
    demand = pull_demand("needed", num_members=99, per_step=10, num_ready=0, num_in_flight=num_in_flight)
    assert demand.takes_assigned == takes_assigned


def test_a_group_of_a_paused_peer_is_requested_from_another_holder():
    queue = queue_of(item("x", sender="paused"), item("y", sender="paused"))
    queue.add(item("x"), holder="a")
    queue.reroute(lambda peer: peer != "paused")
    batch = queue.next_request(most=16, need=None, max_bytes=ANY, may_ask=lambda peer: peer != "paused")
    assert (batch.source.peer_id, ids_of(batch)) == ("a", ["x"])
    assert ids_of(queue.next_request(most=16, need=None, max_bytes=ANY)) == ["y"], "no other peer holds it"


def test_a_full_queue_drops_the_oldest_of_the_sender_with_most():
    queue = PullQueue(capacity=4)
    for name in ("a0", "a1", "a2", "b0", "c0"):
        queue.add(item(name, sender=name[0]), holder=name[0])
    assert len(queue) == 4
    assert b"a0" not in queue
    assert b"c0" in queue
