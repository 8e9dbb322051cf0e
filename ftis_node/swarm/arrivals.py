"""Which senders a step waits for: those whose groups come. Pure: it reads no clock; times are seconds, monotonic.

A step that has its own groups waits for foreign ones, up to the run's patience (`step.foreign_wait_s`). Each second of
that wait counts against every awaited sender. A sender is awaited until it has used its budget; its next usable group
renews the budget:

    budget = 1.5 x the longest of its recent gaps between groups, at least 1 and at most 4 patiences

So the wait follows the measured rate. A sender of a group per hour delays the node by 4 patiences per hour, and one
that falls silent by one patience in all. A member without any usable group has a budget of one patience. All such
members together delay the node by at most 2 % of its time, however many of them come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.swarm.lru import LruDict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

MAX_SENDERS = 4096
GAPS, MAX_PATIENCES = 1.5, 4.0
RECENT_PATIENCES = 10.0  # half-life of a gap
TRIAL_SHARE = 0.02  # of the time, for members that have sent nothing usable
LEAST_TRIAL = 0.1  # patiences: a shorter wait finds nothing


@dataclass(slots=True)
class SenderArrivals:
    """Arrivals of one sender. `waited_s` is the wait for it since its last usable group."""

    waited_s: float = 0.0
    last_at: float | None = None  # None: no usable group yet
    gap_s: float = 0.0  # the longest recent one
    gap_at: float = 0.0


class AwaitedSenders:
    """Table of the arrivals by sender, and the decision whom to wait for. It drops the least recently used sender."""

    def __init__(self, *, patience_s: float, now: float) -> None:
        self._patience_s = patience_s
        self._senders = LruDict[str, SenderArrivals](MAX_SENDERS)
        self._trial_s, self._trial_at = 0.0, now
        self._is_trying = False

    def arrived(self, sender: str, *, now: float) -> None:
        """Note a usable group of a sender."""
        record = self._record_of(sender)
        if record.last_at is not None and (gap_s := now - record.last_at) >= self._recent_gap_s(record, now):
            record.gap_s, record.gap_at = gap_s, now
        record.last_at, record.waited_s = now, 0.0

    def awaited(self, members: Iterable[str], *, now: float, is_idle: bool = False) -> list[str]:
        """Return the senders to wait for: those of earlier groups, and of `members` those without a group.

        A wait costs nothing if the node `is_idle`: it has nothing else to do.
        """
        proven = [sender for sender, record in self._senders.items() if self._is_awaited(record, now)]
        trial_left_s = self._trial_left_s(now)
        self._is_trying = trial_left_s > (0.0 if self._is_trying else LEAST_TRIAL * self._patience_s)
        if not self._is_trying and not is_idle:
            return proven
        return proven + [peer for peer in members if self._is_on_trial(peer)]

    def waited(self, senders: Collection[str], seconds: float, *, now: float) -> None:
        """Charge a wait to the senders for which a step waited."""
        trial_left_s = self._trial_left_s(now)
        is_trial = all(self._record_of(sender).last_at is None for sender in senders)
        if senders and is_trial:
            self._trial_s = trial_left_s - seconds
        for sender in senders:
            self._record_of(sender).waited_s += seconds

    def _is_awaited(self, record: SenderArrivals, now: float) -> bool:
        budget_s = min(max(GAPS * self._recent_gap_s(record, now), self._patience_s), MAX_PATIENCES * self._patience_s)
        return record.last_at is not None and record.waited_s < budget_s

    def _is_on_trial(self, peer: str) -> bool:
        record = self._senders.get(peer)
        return record is None or (record.last_at is None and record.waited_s < self._patience_s)

    def _recent_gap_s(self, record: SenderArrivals, now: float) -> float:
        """Return the longest recent gap. It decays by time, since the groups of a sender often come in bursts."""
        half_life_s = RECENT_PATIENCES * self._patience_s
        return record.gap_s * 0.5 ** ((now - record.gap_at) / half_life_s) if half_life_s else 0.0

    def _trial_left_s(self, now: float) -> float:
        """Return the time that the node may still wait for members without a usable group."""
        self._trial_s = min(self._trial_s + TRIAL_SHARE * (now - self._trial_at), self._patience_s)
        self._trial_at = now
        return self._trial_s

    def _record_of(self, sender: str) -> SenderArrivals:
        record = self._senders[sender] = self._senders.get(sender) or SenderArrivals()
        return record
