"""What a loud peer may say, and how long a slow one is left in peace."""

from __future__ import annotations

from ftis_node.swarm.peer_backoff import MAX_DOUBLINGS, PeerBackoff
from ftis_node.swarm.reputation.rate_limits import AnnounceRateLimiter

ANN, BOB = "ann", "bob"


def test_a_peer_may_say_a_minutes_worth_at_once_and_then_at_the_rate() -> None:
    voices = AnnounceRateLimiter(max_per_minute=60)
    assert [voices.admits(ANN, now=0.0) for _ in range(61)] == [True] * 60 + [False]
    assert voices.admits(BOB, now=0.0), "each has its own"
    assert [voices.admits(ANN, now=2.0) for _ in range(3)] == [True, True, False]


def test_of_too_many_voices_the_one_heard_longest_ago_is_forgotten() -> None:
    voices = AnnounceRateLimiter(max_per_minute=1, max_peers=2)
    for peer in (ANN, BOB, ANN, "carol"):  # ann was heard again, so bob goes
        voices.admits(peer, now=0.0)
    assert not voices.admits(ANN, now=0.0)
    assert voices.admits(BOB, now=0.0)


def test_pauses_double_with_each_failure_in_a_row_and_end_with_an_answer() -> None:
    pauses = PeerBackoff(first_s=5.0)
    now = 0.0
    for length_s in (5.0, 10.0, 20.0):
        pauses.failed(ANN, now=now)
        assert not pauses.may_ask(ANN, now=now + length_s - 0.1)
        now += length_s
        assert pauses.may_ask(ANN, now=now)
        assert pauses.has_failed(ANN)
    assert pauses.may_ask(BOB, now=now)
    pauses.succeeded(ANN)
    assert not pauses.has_failed(ANN)
    pauses.failed(ANN, now=now)
    assert pauses.may_ask(ANN, now=now + 5.0)


def test_a_pause_has_a_longest_length_and_one_that_was_asked_for_is_no_failure() -> None:
    pauses = PeerBackoff(first_s=1.0)
    for _ in range(MAX_DOUBLINGS + 5):
        pauses.failed(ANN, now=0.0)
    assert pauses.may_ask(ANN, now=2.0**MAX_DOUBLINGS)
    pauses.rest(BOB, 3.0, now=0.0)
    assert not pauses.may_ask(BOB, now=2.9)
    assert pauses.may_ask(BOB, now=3.0)
    assert not pauses.has_failed(BOB)
