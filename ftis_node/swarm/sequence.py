"""Sequence numbers of one sender, whose gaps show lost announcements.

A number is an epoch and a counter: `epoch << COUNTER_BITS | counter`. Each start of a node begins a new epoch, the
Unix time in seconds or the last epoch plus one. Within an epoch the sender counts its groups 1, 2, 3, ... and announces
each. Groups from before the first received announcement are not a gap: the node queries the fresh ones by time. The
same holds for the end of an earlier epoch.
"""

from __future__ import annotations

from typing import NamedTuple

COUNTER_BITS = 20
MAX_COUNTER = (1 << COUNTER_BITS) - 1
MAX_GAPS = 64
MAX_TRIES = 4


def epoch_of(number: int) -> int:
    return number >> COUNTER_BITS


def counter_of(number: int) -> int:
    return number & MAX_COUNTER


def epoch_base(epoch: int) -> int:
    """Return the number before the first group of an epoch."""
    return epoch << COUNTER_BITS


class SequenceGap(NamedTuple):
    """Missing sequence numbers `first` to `last`, and how often they were queried without success."""

    first: int
    last: int
    tries: int = 0


class SequenceTracker:
    """Sequence tracker for one sender. At most `MAX_GAPS` gaps are kept; the oldest is dropped first.

    A sender that claims a distant epoch hides only its own gaps: its later numbers are lower, and old.
    """

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
            self._add_missing(number - 1)
            self.highest = number
        else:
            self._gaps = [part for gap in self._gaps for part in _without(gap, number)]

    def note_tail(self, last_number: int) -> None:
        """Add the last number in the sender's directory record."""
        if last_number > self.highest:
            self._add_missing(last_number)
            self.highest = last_number

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

    def _add_missing(self, last: int) -> None:
        """Add the gap from the highest number, or from the begin of a newer epoch, to `last`. None at first contact."""
        first = max(self.highest, epoch_base(epoch_of(last))) + 1
        if self.highest and first <= last:
            self._gaps.append(SequenceGap(first, last))
            del self._gaps[:-MAX_GAPS]


def _without(gap: SequenceGap, number: int) -> list[SequenceGap]:
    if not gap.first <= number <= gap.last:
        return [gap]
    parts = [gap._replace(last=number - 1), gap._replace(first=number + 1)]
    return [part for part in parts if part.first <= part.last]
