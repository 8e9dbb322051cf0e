"""Own groups that no peer has confirmed yet: announced again, ever more rarely, while they are fresh.

"Published" means that another peer has it. An announcement may be lost, or the member on duty may have left; announced
again it reaches others, and the next member is on duty (`duty.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reannouncement:
    """A group to announce again; `attempt` counts its announcements before this one."""

    group_id: bytes
    attempt: int


@dataclass(slots=True)
class _Waiting:
    attempt: int
    next_at: float


class PendingConfirmations:
    """Bounded: of too many the oldest are given up. `now` is any clock that never goes back, in seconds."""

    def __init__(self, *, first_wait_s: float, max_attempts: int = 4, capacity: int = 1024) -> None:
        """Announced again after `first_wait_s`, then after twice as long, and so on, `max_attempts` times at most."""
        self._first_wait_s = first_wait_s
        self._max_attempts = max_attempts
        self._capacity = capacity
        self._waiting: dict[bytes, _Waiting] = {}  # in the order of their first announcement

    def __len__(self) -> int:
        return len(self._waiting)

    def announced(self, group_id: bytes, *, now: float) -> None:
        """A group was announced for the first time."""
        self._waiting[group_id] = _Waiting(attempt=0, next_at=now + self._first_wait_s)
        if len(self._waiting) > self._capacity:
            del self._waiting[next(iter(self._waiting))]

    def confirmed(self, group_id: bytes) -> None:
        """A peer has it."""
        self._waiting.pop(group_id, None)

    def due(self, *, now: float) -> list[Reannouncement]:
        """What is to be announced again now. Each is given once for its time."""
        due = []
        for group_id, waiting in list(self._waiting.items()):
            if waiting.next_at > now:
                continue
            waiting.attempt += 1
            due.append(Reannouncement(group_id, waiting.attempt))
            waiting.next_at = now + self._first_wait_s * 2**waiting.attempt
            if waiting.attempt >= self._max_attempts:
                del self._waiting[group_id]
        return due
