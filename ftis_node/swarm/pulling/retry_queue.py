"""Retry queue of groups that no peer could serve: requested again with exponential back-off while they are fresh.

A holder may have been busy or unreachable, or may not have had the group yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from ftis_node.backoff import ExponentialBackoff

if TYPE_CHECKING:
    from ftis_node.swarm.pulling.pull_queue import PullItem


@dataclass(slots=True)
class _Waiting:
    item: PullItem
    due_at: float


class RetryQueue:
    """Bounded retry queue; above `capacity` the oldest group is dropped. `now` is a monotonic clock in seconds."""

    def __init__(self, *, first_wait_s: float = 2.0, max_rounds: int = 6, capacity: int = 1024) -> None:
        """Retry after `first_wait_s`, then after twice as long each time, at most `max_rounds` times."""
        self._backoff = ExponentialBackoff(first_s=first_wait_s, ceiling_s=inf)
        self._max_rounds = max_rounds
        self._capacity = capacity
        self._waiting: dict[bytes, _Waiting] = {}
        self._rounds: dict[bytes, int] = {}  # retries of each group that waits or is in flight

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: PullItem, *, now: float) -> bool:
        """Add a group that no peer served; return False if that was its last retry."""
        num_rounds = self._rounds.pop(item.id, 0) + 1
        if num_rounds > self._max_rounds:
            return False
        self._rounds[item.id] = num_rounds
        self._waiting[item.id] = _Waiting(item, now + self._backoff.delay_s(num_rounds))
        if len(self._waiting) > self._capacity:
            del self._waiting[next(iter(self._waiting))]
        while len(self._rounds) > 2 * self._capacity:
            del self._rounds[next(iter(self._rounds))]
        return True

    def due(self, *, now: float) -> list[PullItem]:
        """Remove and return the groups to request again now."""
        due = [group_id for group_id, waiting in self._waiting.items() if waiting.due_at <= now]
        return [self._waiting.pop(group_id).item for group_id in due]
