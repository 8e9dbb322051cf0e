"""Progress report of a backfill: how many missed groups have arrived, and how long the rest takes.

A few groups are always missing somewhere. Only an absence with at least `MIN_MISSED` missed groups is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_MISSED = 32
PERIOD_S = 10.0


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """`num_here` missed groups arrived in `elapsed_s`; `num_left` are still missing, 0 ends the backfill."""

    num_here: int
    num_left: int
    elapsed_s: float

    @property
    def time_left_s(self) -> float | None:
        """Extrapolated from the speed so far; None before the first group arrived."""
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

        `num_backfilled` counts all missed groups that ever arrived.
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
