"""The send window: a small message goes at once, or waits to be joined with others."""

from __future__ import annotations

import pytest

from ftis_node.swarm.rate_limits import SendWindow


def test_a_message_waits_for_the_end_of_the_window_only_if_its_destination_is_busy() -> None:
    window = SendWindow(window_s=0.5)
    assert window.wait_s("a", now=10.0) == 0
    window.sent("a", now=10.0)
    assert window.wait_s("a", now=10.1) == pytest.approx(0.4)
    assert window.wait_s("b", now=10.1) == 0
    assert window.wait_s("a", now=10.5) == 0


def test_a_burst_goes_at_once_and_then_one_message_per_window() -> None:
    window = SendWindow(window_s=0.5, burst=3)
    for _ in range(3):
        assert window.wait_s("a", now=10.0) == 0
        window.sent("a", now=10.0)
    assert window.wait_s("a", now=10.0) == pytest.approx(0.5)
    assert window.wait_s("a", now=10.5) == 0
    window.sent("a", now=10.5)
    assert window.wait_s("a", now=10.5) == pytest.approx(0.5)
    assert window.wait_s("a", now=12.0) == 0


def test_the_destinations_are_bounded_and_the_dropped_one_counts_as_idle() -> None:
    window = SendWindow(window_s=0.5, capacity=2)
    for at, name in enumerate(["a", "b", "a", "c"]):
        window.sent(name, now=at / 100)
    assert [name for name in "abc" if window.wait_s(name, now=0.1)] == ["a", "c"]
