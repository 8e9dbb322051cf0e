"""The token bucket."""

from __future__ import annotations

import pytest

from ftis_node.swarm.rate_limits import TokenBucket


def test_a_burst_is_there_at_once_and_then_the_rate() -> None:
    allowance = TokenBucket(rate_per_s=10.0, burst=20.0)
    assert allowance.take(20.0, now=100.0)
    assert not allowance.take(1.0, now=100.0)
    assert allowance.wait_s(5.0, now=100.0) == pytest.approx(0.5)
    assert allowance.take(5.0, now=100.5)
    assert not allowance.take(1.0, now=100.5)


def test_it_never_holds_more_than_its_burst() -> None:
    allowance = TokenBucket(rate_per_s=10.0, burst=20.0)
    allowance.take(20.0, now=0.0)
    assert allowance.left(now=1e6) == 20.0
    assert allowance.wait_s(50.0, now=1e6) == 0.0, "more than a burst waits for a full one only"


def test_a_debt_is_paid_before_anything_more_is_allowed() -> None:
    allowance = TokenBucket(rate_per_s=10.0, burst=20.0)
    assert allowance.spend(50.0, now=0.0) == pytest.approx(3.0)
    assert not allowance.take(1.0, now=3.0)
    assert allowance.take(1.0, now=3.1)


@pytest.mark.parametrize(("rate_per_s", "burst"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_an_allowance_of_nothing_is_refused(rate_per_s: float, burst: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(rate_per_s=rate_per_s, burst=burst)
