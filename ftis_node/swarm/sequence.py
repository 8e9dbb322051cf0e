"""Sequence numbers of one sender, whose gaps show lost announcements.

A sender numbers its groups 1, 2, 3, ... and announces each. Gossipsub may drop messages without an error. The loss
shows as a gap between numbers, or as a higher number in the sender's directory record. Groups from before the first
received announcement are not a gap: the node queries the fresh ones by time.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_GAPS = 64
MAX_TRIES = 4


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
