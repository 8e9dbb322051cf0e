"""Progress report of a backfill: the number of missed groups that have arrived, and the time for the rest.

A few groups are always missing. Only a backfill of at least `MIN_MISSED` groups is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_MISSED = 32
PERIOD_S = 10.0


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """Progress of a backfill: `num_here` groups arrived in `elapsed_s`, `num_left` are missing (0: it has ended)."""

    num_here: int
    num_left: int
    elapsed_s: float

    @property
    def time_left_s(self) -> float | None:
        """Return the remaining seconds at the rate so far; None before the first group has arrived."""
        return self.elapsed_s * self.num_left / self.num_here if self.num_here else None


class BackfillProgress:
    """State machine that decides when to report progress. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._backfilled_before = 0
        self._reported_here = -1
        self._reported_at = 0.0

    def check(self, *, num_left: int, num_backfilled: int, now: float) -> BackfillReport | None:
        """Return a report at the start, at the end, and each period in which something arrived; otherwise None.

        `num_backfilled` counts all missed groups that have ever arrived.
        """
        if self._began_at is None:
            if num_left < MIN_MISSED:
                return None
            self._began_at, self._backfilled_before, self._reported_here = now, num_backfilled, -1
        report = BackfillReport(num_backfilled - self._backfilled_before, num_left, now - self._began_at)
        is_over = num_left == 0
        is_due = self._reported_here < 0 or (
            now - self._reported_at >= PERIOD_S and report.num_here > self._reported_here
        )
        if is_over:
            self._began_at = None
        if not is_over and not is_due:
            return None
        self._reported_here, self._reported_at = report.num_here, now
        return report
