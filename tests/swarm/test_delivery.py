"""Unconfirmed groups are announced again, claims are verified, and confirmations are repeated in turn."""

from __future__ import annotations

from ftis_node.gossip.types import GossipLimits
from ftis_node.swarm.delivery import (
    MAX_CONFIRMED_AT_ONCE,
    ConfirmationQueue,
    IdsByPeer,
    RetryQueue,
)

GROUP, OTHER = b"g" * 32, b"o" * 32


def test_the_pauses_double_until_the_last_attempt() -> None:
    queue, now, waits = RetryQueue[str](first_wait_s=2.0, max_attempts=3), 0.0, []
    attempt = 1
    while queue.put("x", attempt=attempt, now=now):
        began = now
        while not (due := queue.due(now=now)):
            now += 1.0
        waits.append(now - began)
        assert due == [("x", attempt)]
        attempt += 1
    assert waits == [2.0, 4.0, 8.0]
    assert len(queue) == 0


def test_what_is_discarded_is_not_tried_again() -> None:
    queue = RetryQueue[bytes](first_wait_s=10.0)
    assert queue.put(GROUP, now=0.0) and queue.put(OTHER, now=5.0)
    assert queue.due(now=9.9) == []
    queue.discard(GROUP)
    assert queue.due(now=100.0) == [(OTHER, 1)]


def test_of_too_many_the_oldest_are_given_up() -> None:
    queue = RetryQueue[int](first_wait_s=1.0, capacity=2)
    for number in range(3):
        queue.put(number, now=0.0)
    assert queue.due(now=1.0) == [(1, 1), (2, 1)]


def test_a_delivery_is_one_peers_and_one_groups() -> None:
    sent = IdsByPeer(capacity=100)
    sent.add("a", b"1")
    sent.add("a", b"1")
    assert sent.has("a", b"1")
    assert not sent.has("a", b"2")
    assert not sent.has("b", b"1")
    assert len(sent) == 1


def test_who_takes_most_makes_others_forgotten_last() -> None:
    sent = IdsByPeer(capacity=10)
    sent.add("honest", b"x")
    for number in range(1000):
        sent.add("greedy", number.to_bytes(2, "big"))
    assert len(sent) == 10
    assert sent.has("honest", b"x")
    assert sent.has("greedy", (999).to_bytes(2, "big"))
    for number in range(100):
        sent.add(f"identity {number}", b"x")
    assert len(sent) == 10


def test_claims_are_taken_in_turn_and_bounded() -> None:
    claims = IdsByPeer(capacity=6)
    claims.add("honest", b"x")
    for number in range(100):
        claims.add("loud", bytes([number]))
    claims.add("loud", bytes([99]))
    assert len(claims) == 6
    assert claims.take(8) == [("honest", b"x"), ("loud", bytes([95]))]
    claims.add("late", b"y")
    assert claims.take(1) == [("loud", bytes([96]))]
    assert claims.take(1) == [("late", b"y")]
    assert [claims.take(1) for _ in range(3)] == [[("loud", bytes([number]))] for number in (97, 98, 99)]
    assert claims.take(8) == []


def test_all_of_a_sender_at_once_and_senders_in_turn() -> None:
    queue = ConfirmationQueue()
    for sender, group_id in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("a", b"1")):
        queue.add(sender, group_id)
    assert queue.take() == ("a", [b"1", b"3"])
    queue.add("a", b"4")
    assert queue.take() == ("b", [b"2"]), "it comes before one that was told a moment ago"
    assert queue.take() == ("a", [b"4"])
    assert queue.take() is None


def test_too_many_are_forgotten() -> None:
    queue = ConfirmationQueue(max_senders=2, max_groups=2)
    for group_id in (b"1", b"2", b"3"):
        queue.add("a", group_id)
    queue.add("b", b"4")
    assert queue.take() == ("a", [b"1", b"2"])
    for sender in ("c", "d"):
        queue.add(sender, b"5")
    assert [queue.take(), queue.take()] == [("c", [b"5"]), ("d", [b"5"])], "b was here longest"


def test_a_message_has_the_ids_that_the_wire_allows() -> None:
    queue, ids = ConfirmationQueue(), [bytes([number]) for number in range(MAX_CONFIRMED_AT_ONCE + 1)]
    for group_id in ids:
        queue.add("a", group_id)
    assert queue.take() == ("a", ids[:-1])
    assert queue.take() == ("a", ids[-1:])
    assert GossipLimits().max_ids_per_request == MAX_CONFIRMED_AT_ONCE
