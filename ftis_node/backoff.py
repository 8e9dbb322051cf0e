"""Exponential back-off as a pure function: number of failures in, seconds out; no clock, no random source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """Exponential back-off: `first_s`, then `factor` times longer after each further failure, up to `ceiling_s`.

    `jitter` spreads each wait by up to that fraction in both directions. Nodes that lost the same peer at the same time
    then do not reconnect at the same time.
    """

    first_s: float = 1.0
    factor: float = 2.0
    ceiling_s: float = 60.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if not (0 < self.first_s <= self.ceiling_s and self.factor >= 1 and 0 <= self.jitter < 1):
            raise ValueError(f"invalid back-off: {self}")

    def delay_s(self, num_failures: int, *, draw: float = 0.5) -> float:
        """Return the wait in seconds after `num_failures` (>= 1) failures in a row; `draw` in [0, 1): the jitter."""
        num_doublings = min(num_failures - 1, 64)  # keeps the power finite; every ceiling is reached before
        plain_s = min(self.first_s * self.factor**num_doublings, self.ceiling_s)
        return plain_s * (1 + self.jitter * (2 * draw - 1))
