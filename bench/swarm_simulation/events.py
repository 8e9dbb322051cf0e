"""Queue of events in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Events:
    """Priority queue of events by time in seconds; `now` is the time of the current event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Schedule `act(*arguments)` in `delay_s`."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), act, arguments))

    def run_until(self, end_s: float) -> None:
        """Run all events up to and including this time."""
        while self._queue and self._queue[0][0] <= end_s:
            self.now, _, act, arguments = heapq.heappop(self._queue)
            act(*arguments)
        self.now = end_s
