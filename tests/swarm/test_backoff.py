"""The waits after failures: of a peer, of a group without a confirmation, of a lost member."""

import random

from ftis_node.backoff import BackoffTable, ExponentialBackoff, doubling

ANN, BOB = "ann", "bob"


def test_waits_double_with_each_failure_in_a_row_and_end_with_a_success():
    table = BackoffTable[str](doubling(5.0))
    now = 0.0
    for num_failures, length_s in enumerate((5.0, 10.0, 20.0), start=1):
        table.failed(ANN, now=now)
        assert not table.is_due(ANN, now=now + length_s - 0.1)
        assert table.due(now=now + length_s - 0.1) == []
        now += length_s
        assert table.is_due(ANN, now=now)
        assert table.due(now=now) == [(ANN, num_failures)]
    assert table.is_due(BOB, now=now) and not table.has_failed(BOB)
    table.discard(ANN)
    assert not table.has_failed(ANN)
    table.failed(ANN, now=now)
    assert table.is_due(ANN, now=now + 5.0)


def test_waits_are_bounded_and_a_requested_pause_is_no_failure():
    table = BackoffTable[str](doubling(1.0))
    for _ in range(100):
        table.failed(ANN, now=0.0)
    assert table.is_due(ANN, now=64.0)
    table.pause(BOB, 3.0, now=0.0)
    assert not table.is_due(BOB, now=2.9)
    assert table.is_due(BOB, now=3.0)
    assert not table.has_failed(BOB)


def test_a_full_table_forgets_the_key_that_failed_longest_ago():
    table = BackoffTable[int](doubling(1.0), capacity=2)
    for number in range(3):
        table.failed(number, now=0.0)
    assert table.due(now=1.0) == [(1, 1), (2, 1)]
    table.keep({2})
    assert table.due(now=1.0) == [(2, 1)]


def test_jitter_is_drawn_for_each_wait_and_a_count_can_be_set():
    table = BackoffTable[str](ExponentialBackoff(first_s=10, ceiling_s=15, jitter=0.2), rng=random.Random(1))
    waits = set()
    for _ in range(20):
        table.failed(ANN, now=0.0, num_failures=9)
        waits.add(next(at for at in range(200) if table.is_due(ANN, now=at / 10)))
    assert 120 <= min(waits) < max(waits) <= 180
