"""How much may be done in how much time: a token bucket, in whatever unit its owner counts (bytes, tokens, groups).

allowance = Allowance(rate_per_s=100.0, burst=500.0)
allowance.take(30.0, now=clock())      # True: it was there, and is spent
"""

from __future__ import annotations


class TokenBucket:
    """Fills up at a steady rate to its burst, is spent by what is done. `now`: any clock that never goes back, s."""

    __slots__ = ("_burst", "_counted_at", "_left", "_rate_per_s")  # there are several for each peer

    def __init__(self, *, rate_per_s: float, burst: float) -> None:
        """Starts full. Raises ValueError for a rate or burst that is not above 0."""
        if not (rate_per_s > 0 and burst > 0):
            raise ValueError("an allowance has a rate and a burst above 0")
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._left = burst
        self._counted_at: float | None = None

    def left(self, *, now: float) -> float:
        """What may be spent at once; below 0 where more was spent than there was."""
        if self._counted_at is not None:
            self._left = min(self._burst, self._left + (now - self._counted_at) * self._rate_per_s)
        self._counted_at = now
        return self._left

    def take(self, amount: float, *, now: float) -> bool:
        """Spends `amount` where it is there; whether it was."""
        if self.left(now=now) < amount:
            return False
        self._left -= amount
        return True

    def spend(self, amount: float, *, now: float) -> float:
        """Spends `amount` whether it is there or not; seconds until the debt is paid (0 where there is none)."""
        self._left = self.left(now=now) - amount
        return max(0.0, -self._left / self._rate_per_s)

    def wait_s(self, amount: float, *, now: float) -> float:
        """Seconds until `amount` will be there; an amount above the burst waits for a full one."""
        return max(0.0, (min(amount, self._burst) - self.left(now=now)) / self._rate_per_s)
