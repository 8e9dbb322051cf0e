"""Upload budget: requests per minute for each peer and service, bytes per second over all peers.

A peer above its request rate gets BUSY. Above the byte rate a request waits briefly. If the wait would be long, the
peer also gets BUSY and asks another holder. While bandwidth is short, peers that recently received more than their
fair share get BUSY first. The fair share is the mean over the peers that received anything.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from ftis_node.swarm.token_bucket import TokenBucket

MAX_WAIT_S = 2.0  # for one item; a longer wait is answered with BUSY
RECENT_S = 10.0  # time constant of the decay
FADE_PERIOD_S = 0.5
SHARE_FACTOR = 1.5  # tolerance above the mean
MAX_REMEMBERED = 4096  # request buckets; the least recently used is dropped


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
