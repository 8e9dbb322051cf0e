"""Unconfirmed groups are announced again."""

from __future__ import annotations

from ftis_node.swarm.delivery.pending_confirmations import PendingConfirmations, Reannouncement

GROUP, OTHER = b"g" * 32, b"o" * 32


def test_it_is_announced_again_ever_more_rarely_and_then_given_up() -> None:
    waiting = PendingConfirmations(first_wait_s=10.0, max_attempts=3)
    waiting.announced(GROUP, now=0.0)
    times = [now for now in range(200) for _ in waiting.due(now=float(now))]
    assert times == [10, 30, 70]
    assert len(waiting) == 0


def test_the_attempt_is_counted_and_a_confirmation_ends_it() -> None:
    waiting = PendingConfirmations(first_wait_s=10.0)
    waiting.announced(GROUP, now=0.0)
    waiting.announced(OTHER, now=5.0)
    assert waiting.due(now=9.9) == []
    assert waiting.due(now=10.0) == [Reannouncement(GROUP, 1)]
    waiting.confirmed(GROUP)
    assert waiting.due(now=100.0) == [Reannouncement(OTHER, 1)]


def test_of_too_many_the_oldest_are_given_up() -> None:
    waiting = PendingConfirmations(first_wait_s=1.0, capacity=2)
    for number in range(3):
        waiting.announced(bytes([number]) * 32, now=0.0)
    assert [due.group_id[0] for due in waiting.due(now=1.0)] == [1, 2]
