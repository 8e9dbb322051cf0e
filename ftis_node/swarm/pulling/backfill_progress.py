"""Whether a node is catching up with what it missed, and how far it is: counts and the time in, a report out.

A few groups are always missing somewhere; only from so many on is it an absence that people want to hear of.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_MISSED = 32
PERIOD_S = 10.0


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """`num_here` of the missed groups arrived in `elapsed_s`, `num_left` are still wanted; 0 ends the absence."""

    num_here: int
    num_left: int
    elapsed_s: float

    @property
    def time_left_s(self) -> float | None:
        """At the speed so far; None before the first one arrived."""
        return self.elapsed_s * self.num_left / self.num_here if self.num_here else None


class BackfillProgress:
    """Looked at now and then. Times are in seconds, of any clock that does not jump."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._repaired_before = 0
        self._told_here = -1
        self._told_at = 0.0

    def look(self, *, num_left: int, num_backfilled: int, now: float) -> BackfillReport | None:
        """A report at the begin, at the end, and each period in which something arrived; None in between.

        `num_repaired` counts all missed groups that ever arrived.
        """
        if self._began_at is None:
            if num_left < MIN_MISSED:
                return None
            self._began_at, self._repaired_before, self._told_here = now, num_backfilled, -1
        report = BackfillReport(num_backfilled - self._repaired_before, num_left, now - self._began_at)
        is_over = num_left == 0
        is_due = self._told_here < 0 or (now - self._told_at >= PERIOD_S and report.num_here > self._told_here)
        if is_over:
            self._began_at = None
        if not is_over and not is_due:
            return None
        self._told_here, self._told_at = report.num_here, now
        return report
