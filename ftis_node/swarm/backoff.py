"""How long to wait before the next try. A pure policy: failures in, seconds out; no clock, no random source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """Waits `first_s`, then `factor` times longer after each further failure, never longer than `ceiling_s`.

    `jitter` spreads the wait by up to that share to both sides, so that nodes which lost the same peer together do
    not come back together.
    """

    first_s: float = 1.0
    factor: float = 2.0
    ceiling_s: float = 60.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if not (0 < self.first_s <= self.ceiling_s and self.factor >= 1 and 0 <= self.jitter < 1):
            raise ValueError(f"no usable back-off: {self}")

    def delay_s(self, num_failures: int, *, draw: float = 0.5) -> float:
        """Seconds to wait after `num_failures` (>= 1) failures in a row; `draw` in [0, 1) places it in its spread."""
        num_doublings = min(num_failures - 1, 64)  # beyond that any ceiling is reached; keeps the power finite
        plain_s = min(self.first_s * self.factor**num_doublings, self.ceiling_s)
        return plain_s * (1 + self.jitter * (2 * draw - 1))
