"""The upload budget: requests per minute, bytes per second, fair shares."""

from __future__ import annotations

import pytest

from ftis_node.swarm.rate_limits import MAX_REMEMBERED, MAX_WAIT_S, UploadBudget


def budget(*, bytes_per_s: float = 1000, requests: float = 60) -> UploadBudget:
    return UploadBudget(max_bytes_per_s=bytes_per_s, max_requests_per_minute=requests)


def test_one_minutes_requests_are_taken_at_once_and_then_one_per_second():
    serving = budget(requests=60)
    assert all(serving.takes_request("a", "fetch", now=0) for _ in range(60))
    assert not serving.takes_request("a", "fetch", now=0)
    assert serving.takes_request("a", "confirm", now=0)  # another service
    assert serving.takes_request("b", "fetch", now=0)  # another peer
    assert serving.takes_request("a", "fetch", now=1)
    assert not serving.takes_request("a", "fetch", now=1)
    assert sum(serving.takes_request("a", "ask", cost=10, now=1) for _ in range(20)) == 6


def test_the_number_of_peers_with_a_request_count_is_bounded():
    serving = budget(requests=1)
    for number in range(MAX_REMEMBERED + 10):
        assert serving.takes_request(f"peer{number}", "fetch", now=0)
    assert len(serving._requests) == MAX_REMEMBERED


def test_bytes_above_the_rate_wait_and_then_are_refused():
    serving = budget(bytes_per_s=1000)
    assert serving.wait_s("a", 1000, now=0) == 0
    waits = [serving.wait_s("a", 500, now=0) for _ in range(6)]
    assert waits == [
        pytest.approx(0.5),
        pytest.approx(1.0),
        pytest.approx(1.5),
        pytest.approx(MAX_WAIT_S),
        None,
        None,
    ]
    assert serving.wait_s("a", 500, now=10) == 0


def test_an_item_larger_than_one_seconds_bytes_is_sent_only_if_the_budget_is_idle():
    serving = budget(bytes_per_s=1000)
    assert serving.wait_s("a", 5000, now=0) == 0
    assert serving.wait_s("a", 1, now=1) is None
    assert serving.wait_s("a", 1, now=5) == 0


def test_above_the_budget_the_peer_that_took_most_is_refused_first():
    serving = budget(bytes_per_s=1000)
    assert serving.wait_s("modest", 100, now=0) == 0
    assert serving.wait_s("greedy", 900, now=0) == 0
    assert serving.wait_s("greedy", 100, now=0) is None
    assert serving.wait_s("modest", 100, now=0) == pytest.approx(0.1)
    assert serving.wait_s("greedy", 100, now=60) == 0  # bytes sent long ago no longer count
