"""Time limits of calls in flight, which pause while the generator sleeps.

A request that waits because the learner uses the GPU is not slow. Only time with an awake generator counts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_POINTS = 1024  # a window of seconds needs a few dozen; this bounds them if no caller reads the rate


class Throughput:
    """A sliding window: the growth of a total per second over `window_s` seconds. The caller passes the time."""

    def __init__(self, *, window_s: float = 15.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque(maxlen=MAX_POINTS)

    def reach(self, total: int, *, at_s: float) -> None:
        """Record the total at a time. A total below the last one restarts the window: it comes from a new worker."""
        if self._points and total < self._points[-1][1]:
            self._points.clear()
        self._points.append((at_s, total))

    def per_second(self, *, now_s: float) -> float:
        """Return the mean rate over the window; 0 without growth in it."""
        while len(self._points) > 1 and self._points[1][0] <= now_s - self._window_s:
            self._points.popleft()
        if len(self._points) < 2:
            return 0.0
        (first_at_s, first), (_, last) = self._points[0], self._points[-1]
        return (last - first) / max(now_s - first_at_s, 1e-9)


class TimeLimits:
    """One limit for each call, in seconds; None: none. `pause` and `resume` apply to all calls, also later ones."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._is_halted = False
        self._left_s: dict[asyncio.Timeout, float] = {}  # the time of the last pause, or of the call's start

    @asynccontextmanager
    async def of_a_call(self) -> AsyncIterator[None]:
        """Raise TimeoutError if the block takes longer."""
        async with asyncio.timeout(None) as timeout:
            if self._limit_s is not None:
                self._left_s[timeout] = self._limit_s
                if not self._is_halted:
                    self._start(timeout)
            try:
                yield
            finally:
                self._left_s.pop(timeout, None)

    def pause(self) -> None:
        if self._is_halted:
            return
        self._is_halted = True
        now = asyncio.get_running_loop().time()
        for timeout in self._left_s:
            end = timeout.when()
            if end is not None and not timeout.expired():
                self._left_s[timeout] = end - now
                timeout.reschedule(None)

    def resume(self) -> None:
        if not self._is_halted:
            return
        self._is_halted = False
        for timeout in self._left_s:
            if not timeout.expired():
                self._start(timeout)

    def _start(self, timeout: asyncio.Timeout) -> None:
        timeout.reschedule(asyncio.get_running_loop().time() + self._left_s[timeout])
