"""Nagle's rule (RFC 896) for small messages to one destination: send at once if idle, else gather for a short time.

Each message has a fixed cost: frames, handshakes, acknowledgments. Under load one message holds what several would.
"""

from __future__ import annotations

from collections import OrderedDict


class SendWindow:
    """Start times of the last window of each destination. `now`: monotonic, in seconds."""

    def __init__(self, *, window_s: float, capacity: int = 256) -> None:
        """Above `capacity` destinations the one used longest ago is dropped, so it counts as idle."""
        self._window_s = window_s
        self._capacity = capacity
        self._sent_at: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, destination: str, *, now: float) -> float:
        """Return how long to gather before the next message to `destination`; 0 if it is idle."""
        sent_at = self._sent_at.get(destination)
        return 0.0 if sent_at is None else max(0.0, sent_at + self._window_s - now)

    def sent(self, destination: str, *, now: float) -> None:
        """Start a window: a message goes to `destination` now."""
        self._sent_at[destination] = now
        self._sent_at.move_to_end(destination)
        if len(self._sent_at) > self._capacity:
            self._sent_at.popitem(last=False)
