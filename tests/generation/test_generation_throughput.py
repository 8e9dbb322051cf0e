"""The moving rate, without waiting."""

from __future__ import annotations

from ftis_node.generation.time_limits import Throughput


def test_the_rate_is_over_the_window_and_falls_when_nothing_comes() -> None:
    throughput = Throughput(window_s=10.0)
    assert throughput.per_second(now_s=0.0) == 0.0
    for second in range(21):
        throughput.reach(second * 100, at_s=float(second))
    assert throughput.per_second(now_s=20.0) == 100.0
    assert throughput.per_second(now_s=25.0) == 50.0
    assert throughput.per_second(now_s=40.0) == 0.0


def test_a_new_worker_counts_from_the_start() -> None:
    throughput = Throughput(window_s=10.0)
    throughput.reach(1000, at_s=0.0)
    throughput.reach(2000, at_s=1.0)
    throughput.reach(50, at_s=2.0)
    throughput.reach(150, at_s=4.0)
    assert throughput.per_second(now_s=4.0) == 50.0
