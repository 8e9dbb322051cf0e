"""The rate at which a counter grows."""

from __future__ import annotations

from collections import deque

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
        """Return the mean rate over the window; 0 without growth in it.

        A gap before the last total counts at most as the window: an idle worker reports no totals.
        """
        while len(self._points) > 1 and self._points[1][0] <= now_s - self._window_s:
            self._points.popleft()
        if len(self._points) < 2:
            return 0.0
        (first_at_s, first), (_, last) = self._points[0], self._points[-1]
        return (last - first) / max(min(now_s - first_at_s, self._window_s), 1e-9)
