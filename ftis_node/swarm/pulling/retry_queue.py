"""Wanted groups that nobody gave when asked: asked for again after a while, ever more rarely, while they are fresh.

Whoever holds a group may have been busy, away for a moment, or may not have had it yet itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.swarm.pulling.pull_queue import PullItem


@dataclass(slots=True)
class _Waiting:
    want: PullItem
    due_at: float


class RetryQueue:
    """Bounded: of too many the oldest are given up. `now`: any clock that never goes back, in seconds."""

    def __init__(self, *, first_wait_s: float = 2.0, max_rounds: int = 6, capacity: int = 1024) -> None:
        """Asked for again after `first_wait_s`, then after twice as long, and so on, `max_rounds` times at most."""
        self._first_wait_s = first_wait_s
        self._max_rounds = max_rounds
        self._capacity = capacity
        self._waiting: dict[bytes, _Waiting] = {}
        self._rounds: dict[bytes, int] = {}  # of those that wait or are being asked for

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, want: PullItem, *, now: float) -> bool:
        """Nobody gave it; False where that was the last time."""
        num_rounds = self._rounds.pop(want.id, 0)
        if num_rounds >= self._max_rounds:
            return False
        self._rounds[want.id] = num_rounds + 1
        self._waiting[want.id] = _Waiting(want, now + self._first_wait_s * 2**num_rounds)
        if len(self._waiting) > self._capacity:
            del self._waiting[next(iter(self._waiting))]
        while len(self._rounds) > 2 * self._capacity:
            del self._rounds[next(iter(self._rounds))]
        return True

    def due(self, *, now: float) -> list[PullItem]:
        """What is to be asked for again now."""
        due = [group_id for group_id, waiting in self._waiting.items() if waiting.due_at <= now]
        return [self._waiting.pop(group_id).want for group_id in due]
