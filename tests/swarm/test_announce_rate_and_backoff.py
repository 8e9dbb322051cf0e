"""The announcement rate limit, and the back-off from a slow peer."""

from __future__ import annotations

from ftis_node.swarm.peer_guard import MAX_FACTOR, PeerBackoff
from ftis_node.swarm.rate_limits import RateLimiter

ANN, BOB = "ann", "bob"


def test_a_peer_may_announce_one_minutes_allowance_at_once_and_then_at_the_rate() -> None:
    limiter = RateLimiter[str](max_per_minute=60)
    assert [limiter.admits(ANN, now=0.0) for _ in range(61)] == [True] * 60 + [False]
    assert limiter.admits(BOB, now=0.0), "each peer has a separate allowance"
    assert [limiter.admits(ANN, now=2.0) for _ in range(3)] == [True, True, False]


def test_a_full_limiter_drops_the_peer_that_announced_longest_ago() -> None:
    limiter = RateLimiter[str](max_per_minute=1, max_keys=2)
    for peer in (ANN, BOB, ANN, "carol"):  # ann announces again, so bob is dropped
        limiter.admits(peer, now=0.0)
    assert not limiter.admits(ANN, now=0.0)
    assert limiter.admits(BOB, now=0.0)


def test_pauses_double_with_each_consecutive_failure_and_end_with_an_answer() -> None:
    backoff = PeerBackoff(first_s=5.0)
    now = 0.0
    for length_s in (5.0, 10.0, 20.0):
        backoff.failed(ANN, now=now)
        assert not backoff.may_ask(ANN, now=now + length_s - 0.1)
        now += length_s
        assert backoff.may_ask(ANN, now=now)
        assert backoff.has_failed(ANN)
    assert backoff.may_ask(BOB, now=now)
    backoff.succeeded(ANN)
    assert not backoff.has_failed(ANN)
    backoff.failed(ANN, now=now)
    assert backoff.may_ask(ANN, now=now + 5.0)


def test_pauses_are_bounded_and_a_requested_pause_is_no_failure() -> None:
    backoff = PeerBackoff(first_s=1.0)
    for _ in range(MAX_FACTOR):
        backoff.failed(ANN, now=0.0)
    assert backoff.may_ask(ANN, now=MAX_FACTOR)
    backoff.rest(BOB, 3.0, now=0.0)
    assert not backoff.may_ask(BOB, now=2.9)
    assert backoff.may_ask(BOB, now=3.0)
    assert not backoff.has_failed(BOB)
