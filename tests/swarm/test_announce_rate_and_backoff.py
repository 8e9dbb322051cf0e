"""Announcement rate limit, and the back-off of a slow peer."""

from __future__ import annotations

from ftis_node.swarm.peer_guard import MAX_FACTOR, PeerBackoff
from ftis_node.swarm.rate_limits import RateLimiter

ANN, BOB = "ann", "bob"


def test_a_peer_may_say_a_minutes_worth_at_once_and_then_at_the_rate() -> None:
    limiter = RateLimiter[str](max_per_minute=60)
    assert [limiter.admits(ANN, now=0.0) for _ in range(61)] == [True] * 60 + [False]
    assert limiter.admits(BOB, now=0.0), "each has its own"
    assert [limiter.admits(ANN, now=2.0) for _ in range(3)] == [True, True, False]


def test_of_too_many_voices_the_one_heard_longest_ago_is_forgotten() -> None:
    limiter = RateLimiter[str](max_per_minute=1, max_keys=2)
    for peer in (ANN, BOB, ANN, "carol"):  # ann was heard again, so bob goes
        limiter.admits(peer, now=0.0)
    assert not limiter.admits(ANN, now=0.0)
    assert limiter.admits(BOB, now=0.0)


def test_pauses_double_with_each_failure_in_a_row_and_end_with_an_answer() -> None:
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


def test_a_pause_has_a_longest_length_and_one_that_was_asked_for_is_no_failure() -> None:
    backoff = PeerBackoff(first_s=1.0)
    for _ in range(MAX_FACTOR):
        backoff.failed(ANN, now=0.0)
    assert backoff.may_ask(ANN, now=MAX_FACTOR)
    backoff.rest(BOB, 3.0, now=0.0)
    assert not backoff.may_ask(BOB, now=2.9)
    assert backoff.may_ask(BOB, now=3.0)
    assert not backoff.has_failed(BOB)
