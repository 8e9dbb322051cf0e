"""A token bucket for any unit: bytes, tokens, groups.

bucket = TokenBucket(rate_per_s=100.0, burst=500.0)
bucket.take(30.0, now=clock())      # True: 30 were available and are now spent

Nagle's rule (RFC 896) for small messages to one destination: send at once if idle, else gather for a short time.

Each message has a fixed cost: frames, handshakes, acknowledgments. Under load one message holds what several would.

Upload budget: requests per minute for each peer and service, bytes per second over all peers.

A peer above its request rate gets BUSY. Above the byte rate a request waits briefly. If the wait would be long, the
peer also gets BUSY and asks another holder. While bandwidth is short, peers that recently received more than their
fair share get BUSY first. The fair share is the mean over the peers that received anything.
"""

from __future__ import annotations

import math
from collections import OrderedDict

MAX_WAIT_S = 2.0  # for one item; a longer wait is answered with BUSY
RECENT_S = 10.0  # time constant of the decay
FADE_PERIOD_S = 0.5
SHARE_FACTOR = 1.5  # tolerance above the mean
MAX_REMEMBERED = 4096  # request buckets; the least recently used is dropped


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


class UploadBudget:
    """Token buckets for requests and bytes, with fair sharing between peers. `now` is a monotonic clock in seconds."""

    def __init__(self, *, max_bytes_per_s: float, max_requests_per_minute: float) -> None:
        """`max_requests_per_minute` is the rate and the burst for each service of each peer."""
        self._max_requests_per_minute = max_requests_per_minute
        self._line = TokenBucket(rate_per_s=max_bytes_per_s, burst=max_bytes_per_s)
        self._requests: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()
        self._recent = RecentBytes()

    def takes_request(self, peer_id: str, service: str, *, cost: float = 1.0, now: float) -> bool:
        """Return whether to serve a request, and charge it. `cost` is in units of a usual request."""
        key = (peer_id, service)
        allowance = self._requests.pop(key, None) or TokenBucket(
            rate_per_s=self._max_requests_per_minute / 60, burst=self._max_requests_per_minute
        )
        self._requests[key] = allowance
        if len(self._requests) > MAX_REMEMBERED:
            self._requests.popitem(last=False)
        return allowance.take(cost, now=now)

    def wait_s(self, peer_id: str, num_bytes: int, *, now: float) -> float | None:
        """Return the seconds to wait before sending `num_bytes`, and charge them; None if the peer must ask another.

        An item larger than one second's rate is sent when the budget is full.
        """
        left = self._line.left(now=now)
        debt_s = self._line.wait_s(num_bytes, now=now)
        is_full = left < num_bytes
        if debt_s > MAX_WAIT_S or (is_full and self._recent.is_above_share(peer_id, now=now)):
            return None
        self._line.spend(num_bytes, now=now)
        self._recent.add(peer_id, num_bytes, now=now)
        return debt_s


class RecentBytes:
    """Bytes sent to each peer recently, with exponential decay."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._counted_at = 0.0

    def add(self, peer_id: str, num_bytes: int, *, now: float) -> None:
        self._fade(now)
        self._given[peer_id] = self._given.get(peer_id, 0.0) + num_bytes

    def is_above_share(self, peer_id: str, *, now: float) -> bool:
        """Return whether the peer received clearly more than the mean of all that received something."""
        self._fade(now)
        share = sum(self._given.values()) / len(self._given) if self._given else math.inf
        return self._given.get(peer_id, 0.0) > SHARE_FACTOR * share

    def _fade(self, now: float) -> None:
        """Apply the decay and drop peers below one byte; at most every 0.5 s, because there may be thousands."""
        if now < self._counted_at + FADE_PERIOD_S:
            return
        left = math.exp((self._counted_at - now) / RECENT_S)
        self._given = {peer: given * left for peer, given in self._given.items() if given * left >= 1}
        self._counted_at = now


class TokenBucket:
    """Token bucket: refills at a steady rate up to its burst. `now` is a monotonic clock in seconds."""

    __slots__ = ("_burst", "_counted_at", "_left", "_rate_per_s")  # a node holds several for each peer

    def __init__(self, *, rate_per_s: float, burst: float) -> None:
        """Start full. Raises ValueError if the rate or the burst is not above 0."""
        if not (rate_per_s > 0 and burst > 0):
            raise ValueError("a token bucket needs a rate and a burst above 0")
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._left = burst
        self._counted_at: float | None = None

    def left(self, *, now: float) -> float:
        """Return the amount available now; negative if more was spent than was available."""
        if self._counted_at is not None:
            self._left = min(self._burst, self._left + (now - self._counted_at) * self._rate_per_s)
        self._counted_at = now
        return self._left

    def take(self, amount: float, *, now: float) -> bool:
        """Spend `amount` if it is available; return whether it was."""
        if self.left(now=now) < amount:
            return False
        self._left -= amount
        return True

    def spend(self, amount: float, *, now: float) -> float:
        """Spend `amount` even if it is not available; return the seconds until the debt is repaid (0: no debt)."""
        self._left = self.left(now=now) - amount
        return max(0.0, -self._left / self._rate_per_s)

    def wait_s(self, amount: float, *, now: float) -> float:
        """Return the seconds until `amount` is available; an amount above the burst waits for a full bucket."""
        return max(0.0, (min(amount, self._burst) - self.left(now=now)) / self._rate_per_s)
