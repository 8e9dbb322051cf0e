"""This node's groups that no peer has confirmed yet: announced again with exponential back-off.

An announcement may get lost, or the member assigned to pull the group may have left. The repeated announcement reaches
other members, and the next member in order is assigned (`pulling/assignment.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ftis_node.backoff import ExponentialBackoff


@dataclass(frozen=True, slots=True)
class Reannouncement:
    """A group to announce again; `attempt` counts its earlier announcements."""

    group_id: bytes
    attempt: int


@dataclass(slots=True)
class _Waiting:
    attempt: int
    next_at: float


class PendingConfirmations:
    """Retry queue of unconfirmed groups; above `capacity` the oldest is dropped. `now`: monotonic, in seconds."""

    def __init__(self, *, first_wait_s: float, max_attempts: int = 4, capacity: int = 1024) -> None:
        """Announce again after `first_wait_s`, then after twice as long each time, at most `max_attempts` times."""
        self._backoff = ExponentialBackoff(first_s=first_wait_s, ceiling_s=inf)
        self._max_attempts = max_attempts
        self._capacity = capacity
        self._waiting: dict[bytes, _Waiting] = {}  # in the order of their first announcement

    def __len__(self) -> int:
        return len(self._waiting)

    def announced(self, group_id: bytes, *, now: float) -> None:
        """Add a group that was announced for the first time."""
        self._waiting[group_id] = _Waiting(attempt=0, next_at=now + self._backoff.delay_s(1))
        if len(self._waiting) > self._capacity:
            del self._waiting[next(iter(self._waiting))]

    def confirmed(self, group_id: bytes) -> None:
        """Remove a group that a peer has confirmed."""
        self._waiting.pop(group_id, None)

    def due(self, *, now: float) -> list[Reannouncement]:
        """Return the groups to announce again now; schedules the next attempt of each."""
        due = []
        for group_id, waiting in list(self._waiting.items()):
            if waiting.next_at > now:
                continue
            waiting.attempt += 1
            due.append(Reannouncement(group_id, waiting.attempt))
            waiting.next_at = now + self._backoff.delay_s(waiting.attempt + 1)
            if waiting.attempt >= self._max_attempts:
                del self._waiting[group_id]
        return due
