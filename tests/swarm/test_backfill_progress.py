"""Backfill progress is reported at the start, while groups arrive, and at the end; a few missing groups are not."""

from __future__ import annotations

from ftis_node.swarm.sequence import MIN_MISSED, PERIOD_S, BackfillProgress, BackfillReport


def test_an_absence_from_begin_to_end() -> None:
    watch = BackfillProgress()
    assert watch.check(num_left=MIN_MISSED - 1, num_backfilled=7, now=0.0) is None
    assert watch.check(num_left=100, num_backfilled=7, now=10.0) == BackfillReport(0, 100, 0.0)
    assert watch.check(num_left=80, num_backfilled=27, now=10.0 + PERIOD_S / 2) is None, "too soon"
    report = watch.check(num_left=75, num_backfilled=32, now=10.0 + PERIOD_S)
    assert report == BackfillReport(25, 75, PERIOD_S)
    assert report.time_left_s == 3 * PERIOD_S
    assert watch.check(num_left=75, num_backfilled=32, now=10.0 + 3 * PERIOD_S) is None, "nothing arrived"
    assert watch.check(num_left=0, num_backfilled=107, now=10.0 + 3.5 * PERIOD_S) == BackfillReport(
        100, 0, 3.5 * PERIOD_S
    )
    assert watch.check(num_left=0, num_backfilled=107, now=500.0) is None
    assert watch.check(num_left=MIN_MISSED, num_backfilled=107, now=501.0) == BackfillReport(0, MIN_MISSED, 0.0)


def test_no_time_is_promised_before_something_arrived() -> None:
    assert BackfillReport(0, 40, 12.0).time_left_s is None
