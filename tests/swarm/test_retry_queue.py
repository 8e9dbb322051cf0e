"""Groups that no peer served are requested again."""

from __future__ import annotations

from ftis_node.swarm.pull_queue import PullItem, RetryQueue


def want(name: str) -> PullItem:
    return PullItem(id=name.encode(), sender="a", number=1, num_bytes=1, created_at=0.0)


def test_it_is_asked_for_again_ever_more_rarely_and_then_given_up() -> None:
    queue, now, waits = RetryQueue(first_wait_s=2.0, max_rounds=3), 0.0, []
    while queue.put(want("x"), now=now):
        began = now
        while not (due := queue.due(now=now)):
            now += 1.0
        waits.append(now - began)
        assert due == [want("x")]
    assert waits == [2.0, 4.0, 8.0]
    assert len(queue) == 0
    assert queue.put(want("x"), now=now), "announced anew, it begins again"


def test_of_too_many_the_oldest_are_given_up() -> None:
    queue = RetryQueue(first_wait_s=1.0, capacity=2)
    for name in ("a", "b", "c"):
        queue.put(want(name), now=0.0)
    assert [one.id for one in queue.due(now=1.0)] == [b"b", b"c"]
