"""Sequence numbers of one sender, whose gaps show lost announcements, and the progress of a backfill.

A sender numbers its groups 1, 2, 3, ... and announces each. Gossipsub may drop messages without an error. The loss
shows as a gap between numbers, or as a higher number in the sender's directory record. Groups from before the first
received announcement are not a gap: the node queries the fresh ones by time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_GAPS = 64
MAX_TRIES = 4
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
    """Decides when to report progress. Times are seconds of a monotonic clock.

    A few groups are always missing, so only a backfill of at least `MIN_MISSED` groups is reported.
    """

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


class SequenceGap(NamedTuple):
    """Missing sequence numbers `first` to `last`, and how often they were queried without success."""

    first: int
    last: int
    tries: int = 0


class SequenceTracker:
    """Sequence tracker for one sender. At most `MAX_GAPS` gaps are kept; the oldest is dropped first."""

    __slots__ = ("_gaps", "at", "highest")  # one object for each sender: slots need a third of the memory

    def __init__(self, *, at: float) -> None:
        """`at` is the time at which the peer was first seen, in seconds of the caller's clock."""
        self.highest = 0
        self.at = at  # when the peer last announced a higher number, or was queried
        self._gaps: list[SequenceGap] = []  # in rising order

    @property
    def gaps(self) -> tuple[SequenceGap, ...]:
        """Return the missing ranges, newest first."""
        return tuple(reversed(self._gaps))

    def note(self, number: int, *, at: float) -> None:
        """Add a sequence number that the sender announced or served.

        Only a higher number moves `self.at`: a group that arrives late, or a repeated announcement, does not show that
        this node gets the newest ones.
        """
        if number > self.highest:
            self.at = max(self.at, at)
            if self.highest and number > self.highest + 1:
                self._add(SequenceGap(self.highest + 1, number - 1))
            self.highest = number
        else:
            self._gaps = [part for gap in self._gaps for part in _without(gap, number)]

    def note_tail(self, last_number: int) -> None:
        """Add the last number in the sender's directory record."""
        if self.highest and last_number > self.highest:
            self._add(SequenceGap(self.highest + 1, last_number))
        self.highest = max(self.highest, last_number)

    def note_query(self, gap: SequenceGap, *, is_final: bool) -> None:
        """Note that `gap` was queried and answered. Missing numbers are queried again after an incomplete answer.

        The sender's own complete answer is final, because the sender holds all of its fresh groups.
        """
        kept: list[SequenceGap] = []
        for known in self._gaps:
            if known.last < gap.first or known.first > gap.last:
                kept.append(known)
            elif not is_final and known.tries + 1 < MAX_TRIES:
                kept.append(known._replace(tries=known.tries + 1))
        self._gaps = kept

    def _add(self, gap: SequenceGap) -> None:
        self._gaps.append(gap)
        del self._gaps[:-MAX_GAPS]


def _without(gap: SequenceGap, number: int) -> list[SequenceGap]:
    """Return the parts of a gap that remain after one of its numbers arrived."""
    if not gap.first <= number <= gap.last:
        return [gap]
    parts = [gap._replace(last=number - 1), gap._replace(first=number + 1)]
    return [part for part in parts if part.first <= part.last]
