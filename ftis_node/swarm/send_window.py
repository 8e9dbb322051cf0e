"""Nagle's rule (RFC 896) for small messages to one destination: send at once if idle, else gather for a short time.

Each message has a fixed cost: frames, handshakes, acknowledgments. Under load one message holds what several would.
"""

from __future__ import annotations

from collections import OrderedDict


class SendWindow:
    """Rate limiter by the generic cell rate algorithm, for each destination. `now`: monotonic, in seconds.

    `burst` messages go at once, then one in each window.
    """

    def __init__(self, *, window_s: float, burst: int = 1, capacity: int = 256) -> None:
        """Above `capacity` destinations the one used longest ago is dropped, so it counts as idle."""
        self._window_s = window_s
        self._burst_s = (burst - 1) * window_s
        self._capacity = capacity
        self._free_at: OrderedDict[str, float] = OrderedDict()  # the windows of the messages so far end then

    def wait_s(self, destination: str, *, now: float) -> float:
        """Return how long to gather before the next message to `destination`; 0 if it is idle."""
        return max(0.0, self._free_at.get(destination, now) - self._burst_s - now)

    def sent(self, destination: str, *, now: float) -> None:
        """Start a window: a message goes to `destination` now."""
        self._free_at[destination] = max(now, self._free_at.get(destination, now)) + self._window_s
        self._free_at.move_to_end(destination)
        if len(self._free_at) > self._capacity:
            self._free_at.popitem(last=False)
