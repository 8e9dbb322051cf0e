"""Shares of a mixture's parts by comparative advantage: values by hand, and bounds on the influence of peers."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.algorithms.group_choice import SignalCount, division_shares, keep_chances

EVEN = {"add": 0.5, "sub": 0.5}
NONE, MANY_WITH, MANY_WITHOUT = SignalCount(), SignalCount(1e6, 1e6), SignalCount(0.0, 1e6)


def counts(add: SignalCount, sub: SignalCount) -> dict[str, SignalCount]:
    return {"add": add, "sub": sub}


def test_a_rate_starts_at_a_half_and_follows_the_groups() -> None:
    assert NONE.rate == 0.5
    count = NONE.with_group(has_signal=True).with_group(has_signal=True).with_group(has_signal=False)
    assert count == (2, 3)
    assert count.rate == pytest.approx(3 / 5)
    assert count.faded() == pytest.approx((1.8, 2.7))
    for _ in range(100):
        count = count.faded()
    assert count.rate == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("proportions", [EVEN, {"add": 0.75, "sub": 0.25}])
@pytest.mark.parametrize("signals", [(9.0, 9.0), (9.0, 3.0)])
def test_equal_rates_of_peers_leave_the_mixture_unchanged(
    proportions: dict[str, float], signals: tuple[float, float]
) -> None:
    """Shares depend on the node's rates relative to those of its peers."""
    of_both = counts(*(SignalCount(num, 10.0) for num in signals))
    assert division_shares(proportions, of_both, of_both) == pytest.approx(proportions)


def test_without_groups_of_peers_the_mixture_is_unchanged() -> None:
    own = counts(MANY_WITH, MANY_WITHOUT)
    assert division_shares(EVEN, own, counts(NONE, NONE)) == EVEN
    assert division_shares(EVEN, own, counts(SignalCount(0.0, 0.5), SignalCount(0.4, 0.4))) == EVEN, "faded counts"
    assert division_shares(EVEN, own, counts(NONE, SignalCount(1.0, 1.0))) != EVEN


def test_shares_by_hand() -> None:
    own = counts(SignalCount(5.0, 6.0), SignalCount(2.0, 6.0))  # rates 6/8 and 3/8
    peers = counts(SignalCount(3.0, 6.0), SignalCount(5.0, 6.0))  # rates 4/8 and 6/8
    shares = division_shares(EVEN, own, peers)
    assert shares == pytest.approx({"add": 0.05 + 0.9 * 1.5 / 2.0, "sub": 0.05 + 0.9 * 0.5 / 2.0})
    thirds = {"add": 2 / 3, "sub": 1 / 3}
    shares = division_shares(thirds, own, peers)
    assert shares == pytest.approx({"add": 0.2 / 3 + 0.9 * 3 / 3.5, "sub": 0.1 / 3 + 0.9 * 0.5 / 3.5})


def test_a_node_generates_little_of_a_part_in_which_only_its_peers_have_a_signal() -> None:
    own, peers = counts(SignalCount(40, 40), SignalCount(0, 40)), counts(SignalCount(0, 40), SignalCount(40, 40))
    shares = division_shares(EVEN, own, peers)
    assert shares["add"] == pytest.approx(0.95, abs=0.01)
    assert shares["sub"] >= 0.05, "the minimum is 0.1 of an even share"
    assert division_shares(EVEN, peers, own) == pytest.approx({"add": shares["sub"], "sub": shares["add"]})


@pytest.mark.parametrize("of_peers", list(product((NONE, MANY_WITH, MANY_WITHOUT), repeat=2)))
def test_peers_cannot_remove_a_part_in_which_the_node_has_a_signal(of_peers: tuple[SignalCount, SignalCount]) -> None:
    """A million groups, with or without a signal, change the ratio of two parts by a factor of four at most."""
    shares = division_shares(EVEN, counts(MANY_WITH, MANY_WITH), counts(*of_peers))
    assert min(shares.values()) >= 0.05 + 0.9 / 5 - 1e-6


RATES = st.floats(0, 1)
GROUPS = st.floats(0, 1e6)


@given(
    st.lists(st.tuples(st.integers(1, 100), RATES, GROUPS, RATES, GROUPS), min_size=1, max_size=8),
    st.lists(st.tuples(RATES, GROUPS), min_size=8, max_size=8),
)
def test_shares_are_valid_and_bounded_for_any_counts_of_peers(
    parts: list[tuple[int, float, float, float, float]], claims: list[tuple[float, float]]
) -> None:
    total = sum(weight for weight, *_ in parts)
    proportions = {str(place): part[0] / total for place, part in enumerate(parts)}
    own = {str(place): SignalCount(rate * num, num) for place, (_, rate, num, _, _) in enumerate(parts)}
    peers = {str(place): SignalCount(rate * num, num) for place, (_, _, _, rate, num) in enumerate(parts)}
    claimed = {str(place): SignalCount(rate * num, num) for place, (rate, num) in enumerate(claims[: len(parts)])}
    shares, moved = division_shares(proportions, own, peers), division_shares(proportions, own, claimed)
    assert sum(shares.values()) == pytest.approx(1)
    for part, even in proportions.items():
        assert shares[part] >= 0.1 * even
        alone = own[part].rate * even / sum(own[other].rate * proportions[other] for other in proportions)
        assert moved[part] >= min(even, 0.9 * alone / 4) - 1e-9
    chances = keep_chances(shares, proportions)
    assert max(chances.values()) == 1
    kept = {part: even * chances[part] for part, even in proportions.items()}
    assert {part: value / sum(kept.values()) for part, value in kept.items()} == pytest.approx(shares)
