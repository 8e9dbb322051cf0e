"""A token bucket for any unit: bytes, tokens, groups.

bucket = TokenBucket(rate_per_s=100.0, burst=500.0)
bucket.take(30.0, now=clock())      # True: 30 were available and are now spent
"""

from __future__ import annotations


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
