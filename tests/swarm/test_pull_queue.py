"""What to request next, and from which peer."""

from __future__ import annotations

import pytest

from ftis_node.swarm.demand import PullDemand, pull_demand
from ftis_node.swarm.pull_queue import MAX_TRIES, PullItem, PullQueue, PullRequest, PullSource

ANY = 1 << 30


def want(name: str, *, sender: str = "a", at: float = 0.0, num_bytes: int = 100, **more: bool) -> PullItem:
    return PullItem(id=name.encode(), sender=sender, number=1, num_bytes=num_bytes, created_at=at, **more)


def names(batch: PullRequest | None) -> list[str]:
    return [] if batch is None else [one.id.decode() for one in batch.items]


def queue_of(*items: PullItem) -> PullQueue:
    whole_queue = PullQueue()
    for one in items:
        assert whole_queue.add(one, holder=one.sender)
    return whole_queue


def test_the_newest_come_first_and_peers_take_turns() -> None:
    queue = queue_of(*(want(f"a{n}", at=n) for n in range(3)), *(want(f"b{n}", sender="b", at=n) for n in range(3)))
    order = [names(queue.next_request(most=2, need=None, max_bytes=ANY)) for _ in range(4)]
    assert order == [["a2", "a1"], ["b2", "b1"], ["a0"], ["b0"]]
    assert queue.num_in_flight == len(queue) == 6
    assert queue.next_request(most=2, need=None, max_bytes=ANY) is None


def test_what_is_needed_is_spread_over_senders_and_duties_come_on_top() -> None:
    queue = queue_of(
        *(want(f"a{n}", at=n) for n in range(5)),
        *(want(f"b{n}", sender="b", at=n) for n in range(5)),
        want("d", sender="b", at=-1.0, is_assigned=True),
    )
    assert names(queue.next_request(most=16, need=2, max_bytes=ANY)) == ["a4"]
    assert names(queue.next_request(most=16, need=1, max_bytes=ANY)) == ["d", "b4"]
    assert queue.next_request(most=16, need=0, max_bytes=ANY) is None


def test_a_request_keeps_to_its_bytes_but_one_group_always_fits() -> None:
    queue = queue_of(*(want(f"a{n}", at=n, num_bytes=60) for n in range(3)))
    assert names(queue.next_request(most=16, need=None, max_bytes=120)) == ["a2", "a1"]
    assert names(queue.next_request(most=16, need=None, max_bytes=10)) == ["a0"]


def test_a_peer_that_may_not_be_asked_is_passed_over() -> None:
    queue = queue_of(want("a0"), want("b0", sender="b"))
    assert names(queue.next_request(most=1, need=None, max_bytes=ANY, may_ask=lambda peer: peer == "b")) == ["b0"]


def test_what_the_sender_does_not_give_is_asked_of_holders_then_of_members() -> None:
    queue = queue_of(want("a0"))
    assert not queue.add(want("a0"), holder="b")
    requested = []
    for _ in range(MAX_TRIES):
        batch = queue.next_request(most=1, need=None, max_bytes=ANY)
        assert batch is not None
        requested.append(batch.source.peer_id)
        given_up = queue.missed(batch, missing=[b"a0"], others=["a", "c", "b", "d", "e"])
    assert requested == ["a", "b", "c", "d"]
    assert [one.id for one in given_up] == [b"a0"]
    assert len(queue) == queue.num_in_flight == 0


def test_a_text_is_asked_of_its_sender_alone() -> None:
    queue = queue_of(want("a0", as_text=True))
    batch = queue.next_request(most=1, need=None, max_bytes=ANY)
    assert batch is not None and batch.source == PullSource("a", True)
    assert queue.missed(batch, missing=[b"a0"], others=["b"]) == [want("a0", as_text=True)]


def test_what_arrived_is_no_longer_wanted_and_a_busy_peer_is_asked_again() -> None:
    queue = queue_of(want("a0"), want("a1", at=1.0))
    batch = queue.next_request(most=2, need=None, max_bytes=ANY)
    assert batch is not None
    queue.put_back(batch)
    assert queue.num_in_flight == 0 and len(queue) == 2
    batch = queue.next_request(most=2, need=None, max_bytes=ANY)
    assert names(batch) == ["a1", "a0"]
    queue.arrived([b"a0", b"a1"])
    assert len(queue) == 0 and b"a0" not in queue


def test_the_queue_is_bounded_and_drops_the_oldest() -> None:
    queue = PullQueue(max_per_holder=3)
    for number in range(5):
        queue.add(want(f"a{number}", at=number), holder="a")
    assert len(queue) == 3
    assert queue.drop_older(3.0) == 1
    assert names(queue.next_request(most=9, need=None, max_bytes=ANY)) == ["a4", "a3"]
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
def test_a_large_swarm_is_pulled_as_needed(rule: str, num_members: int, num_ready: int, expected: PullDemand) -> None:
    made = pull_demand(rule, num_members=num_members, small_swarm=16, per_step=10, num_ready=num_ready, num_in_flight=1)  # type: ignore[arg-type]
    assert made == expected


def test_of_too_many_in_all_the_oldest_are_forgotten_and_duties_last() -> None:
    queue = PullQueue(capacity=3)
    for number in range(6):
        queue.add(want(f"w{number}", sender=f"s{number}", at=number, is_assigned=number in (0, 2)), holder=f"s{number}")
    assert len(queue) == 3
    requested = [names(queue.next_request(most=9, need=0, max_bytes=ANY)) for _ in range(2)]
    assert requested == [["w0"], ["w2"]]
    assert names(queue.next_request(most=9, need=9, max_bytes=ANY)) == ["w5"]


def test_a_duty_is_found_among_others_wherever_it_came_from() -> None:
    queue = queue_of(*(want(f"a{number}", sender=f"s{number}") for number in range(5)))
    assert queue.next_request(most=9, need=0, max_bytes=ANY) is None
    queue.add(want("a3", sender="s3", is_assigned=True), holder="s3")
    batch = queue.next_request(most=9, need=0, max_bytes=ANY)
    assert batch is not None and names(batch) == ["a3"]
    queue.put_back(batch)
    assert queue.next_request(most=9, need=0, max_bytes=ANY) == batch
    queue.missed(batch, missing=[b"a3"], others=["s9"])
    assert queue.next_request(most=9, need=0, max_bytes=ANY) == PullRequest(PullSource("s9", False), batch.items)
    assert queue.next_request(most=9, need=0, max_bytes=ANY) is None, "it is in flight"


@pytest.mark.parametrize(("num_in_flight", "takes_assigned"), [(39, True), (40, False)])
def test_duties_are_left_by_a_node_that_cannot_keep_up(num_in_flight: int, takes_assigned: bool) -> None:
    made = pull_demand("needed", num_members=99, small_swarm=16, per_step=10, num_ready=0, num_in_flight=num_in_flight)
    assert made.takes_assigned == takes_assigned


def test_what_waits_for_a_paused_peer_is_asked_of_another_that_holds_it() -> None:
    queue = queue_of(want("x", sender="thief"), want("y", sender="thief"))
    queue.add(want("x"), holder="a")
    queue.reroute(lambda peer: peer != "thief")
    batch = queue.next_request(most=16, need=None, max_bytes=ANY, may_ask=lambda peer: peer != "thief")
    assert batch is not None
    assert (batch.source.peer_id, names(batch)) == ("a", ["x"])
    assert names(queue.next_request(most=16, need=None, max_bytes=ANY)) == ["y"], "nobody else has it"


def test_of_too_many_wants_in_all_the_oldest_of_whoever_has_most_go() -> None:
    queue = PullQueue(capacity=4)
    for name in ("a0", "a1", "a2", "b0", "c0"):
        queue.add(want(name, sender=name[0]), holder=name[0])
    assert len(queue) == 4
    assert b"a0" not in queue
    assert b"c0" in queue
