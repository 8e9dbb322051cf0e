"""What was heard of a sender, by its running numbers: where something is missing, it was lost on the way.

A sender numbers its groups 1, 2, 3, ... and announces each. Gossipsub drops messages without an error; a gap between
numbers, or a directory record that names a higher one than was heard, shows it. What came before a node first heard of
a sender is no gap: it asks for what is fresh of that by time.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_GAPS = 64
MAX_TRIES = 4


class SequenceGap(NamedTuple):
    """Running numbers `first` to `last`, both missing, and how often they were asked for in vain."""

    first: int
    last: int
    tries: int = 0


class SequenceTracker:
    """The numbers of one sender. Bounded: of many gaps the oldest are given up."""

    __slots__ = ("_gaps", "at", "highest")  # there is one for each sender heard: a third of the bytes

    def __init__(self, *, at: float) -> None:
        """`at`: when the peer was first seen, by the caller's clock."""
        self.highest = 0
        self.at = at  # when it was last heard of
        self._gaps: list[SequenceGap] = []  # in rising order

    @property
    def gaps(self) -> tuple[SequenceGap, ...]:
        """What is missing, newest first."""
        return tuple(reversed(self._gaps))

    def note(self, number: int, *, at: float) -> None:
        """The sender announced, or gave us, this number."""
        self.at = max(self.at, at)
        if number > self.highest:
            if self.highest and number > self.highest + 1:
                self._add(SequenceGap(self.highest + 1, number - 1))
            self.highest = number
        else:
            self._gaps = [part for gap in self._gaps for part in _without(gap, number)]

    def note_tail(self, last_number: int) -> None:
        """The sender's directory record says that it has announced up to this number."""
        if self.highest and last_number > self.highest:
            self._add(SequenceGap(self.highest + 1, last_number))
        self.highest = max(self.highest, last_number)

    def asked(self, gap: SequenceGap, *, is_final: bool) -> None:
        """`gap` was asked for and answered; what is still missing of it is tried again, unless that was final.

        The sender's own complete answer is final: it holds all of its groups that are fresh.
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
    """What is left of a gap when a number of it has come."""
    if not gap.first <= number <= gap.last:
        return [gap]
    parts = [gap._replace(last=number - 1), gap._replace(first=number + 1)]
    return [part for part in parts if part.first <= part.last]
