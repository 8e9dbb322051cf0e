"""How much a node gives to its peers: requests a minute for each peer and service, bytes a second in all.

A peer over its requests is told BUSY. Bytes above the rate are spread out by short waits; where the wait would be long
the peer is told BUSY too, and turns elsewhere. While the line is full, peers that took more than their share are told
so first: a share is what was given lately, over the peers that it was given to.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from ftis_node.swarm.token_bucket import TokenBucket

MAX_WAIT_S = 2.0  # for one item; a longer debt is refused
RECENT_S = 10.0  # what was given fades with this time constant
FADE_PERIOD_S = 0.5
SHARE_FACTOR = 1.5  # a little more than the others' is no more than a share
MAX_REMEMBERED = 4096  # request allowances; the one not used for longest is forgotten


class UploadBudget:
    """Facts and the time in (`now` in seconds, any clock that never goes back), decisions out."""

    def __init__(self, *, max_bytes_per_s: float, max_requests_per_minute: float) -> None:
        """Each service of each peer may be asked `max_requests_per_minute` times at once, and so often a minute."""
        self._max_requests_per_minute = max_requests_per_minute
        self._line = TokenBucket(rate_per_s=max_bytes_per_s, burst=max_bytes_per_s)
        self._requests: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()
        self._recent = RecentBytes()

    def takes_request(self, peer_id: str, service: str, *, cost: float = 1.0, now: float) -> bool:
        """Whether a request may be worked on. `cost`: how many usual ones it counts for."""
        key = (peer_id, service)
        allowance = self._requests.pop(key, None) or TokenBucket(
            rate_per_s=self._max_requests_per_minute / 60, burst=self._max_requests_per_minute
        )
        self._requests[key] = allowance
        if len(self._requests) > MAX_REMEMBERED:
            self._requests.popitem(last=False)
        return allowance.take(cost, now=now)

    def wait_s(self, peer_id: str, num_bytes: int, *, now: float) -> float | None:
        """Seconds to wait before sending `num_bytes`, which are then spent; None where the peer is to turn elsewhere.

        An item above the rate of a whole second goes when the line is at rest.
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
    """What each peer was given lately, fading."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._counted_at = 0.0

    def add(self, peer_id: str, num_bytes: int, *, now: float) -> None:
        """These bytes were given."""
        self._fade(now)
        self._given[peer_id] = self._given.get(peer_id, 0.0) + num_bytes

    def is_above_share(self, peer_id: str, *, now: float) -> bool:
        """Whether a peer had clearly more than the mean of those that had something."""
        self._fade(now)
        share = sum(self._given.values()) / len(self._given) if self._given else math.inf
        return self._given.get(peer_id, 0.0) > SHARE_FACTOR * share

    def _fade(self, now: float) -> None:
        """What faded below a byte is forgotten. Not at every call: there may be thousands of peers."""
        if now < self._counted_at + FADE_PERIOD_S:
            return
        left = math.exp((self._counted_at - now) / RECENT_S)
        self._given = {peer: given * left for peer, given in self._given.items() if given * left >= 1}
        self._counted_at = now
