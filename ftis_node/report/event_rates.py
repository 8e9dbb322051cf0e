"""Histogram of events over time with a fixed number of buckets; their width doubles when the time exceeds them."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_BUCKETS = 120


@dataclass(slots=True)
class EventRates:
    """Counts by kind over time. `width_s` is the width of a bucket, `began_at` the start of the first one (Unix s)."""

    began_at: float | None = None
    width_s: float = 1.0
    counts: dict[str, list[int]] = field(default_factory=dict)

    def count(self, kind: str, at: float) -> None:
        """Count one event. A time before the first one, after a clock was set back, counts as the first."""
        if self.began_at is None:
            self.began_at = at
        while (place := int(max(0.0, at - self.began_at) / self.width_s)) >= MAX_BUCKETS:
            self.width_s *= 2
            self.counts = {
                name: [sum(pair) for pair in zip(buckets[::2], [*buckets[1::2], 0], strict=False)]
                for name, buckets in self.counts.items()
            }
        buckets = self.counts.setdefault(kind, [])
        buckets.extend([0] * (place + 1 - len(buckets)))
        buckets[place] += 1

    def rates(self, kind: str) -> list[tuple[float, float]]:
        """Return (middle of the bucket in Unix s, events a minute) for all buckets that any kind reached."""
        if self.began_at is None:
            return []
        num_buckets = max(len(buckets) for buckets in self.counts.values())
        found = self.counts.get(kind, [])
        padded = found + [0] * (num_buckets - len(found))
        return [(self.began_at + (place + 0.5) * self.width_s, n * 60 / self.width_s) for place, n in enumerate(padded)]

    def total(self, kind: str) -> int:
        """Return the number of events of a kind."""
        return sum(self.counts.get(kind, ()))
