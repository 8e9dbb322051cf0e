"""Which confirmations count: bodies that were sent, and claims that are verified."""

from __future__ import annotations

from ftis_node.swarm.delivery.sent_bodies import SentBodies
from ftis_node.swarm.delivery.unverified_confirmations import UnverifiedConfirmations


def test_a_delivery_is_one_peers_and_one_groups() -> None:
    sent = SentBodies()
    sent.note("a", b"1")
    sent.note("a", b"1")
    assert sent.has("a", b"1")
    assert not sent.has("a", b"2")
    assert not sent.has("b", b"1")
    assert len(sent) == 1


def test_who_takes_most_makes_others_forgotten_last() -> None:
    sent = SentBodies(capacity=10)
    sent.note("honest", b"x")
    for number in range(1000):
        sent.note("greedy", number.to_bytes(2, "big"))
    assert len(sent) == 10
    assert sent.has("honest", b"x")
    assert sent.has("greedy", (999).to_bytes(2, "big"))
    for number in range(100):
        sent.note(f"identity {number}", b"x")
    assert len(sent) == 10


def test_claims_are_taken_in_turn_and_bounded() -> None:
    claims = UnverifiedConfirmations(capacity=6)
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
