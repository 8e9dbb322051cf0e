"""Reconnect schedule for lost members: redialed soon, then less often, finally dropped.

Most return, because the machine slept or the connection was interrupted. The rounds of `membership.py` would find them
too, but only after a minute and by chance. After a network partition both halves should reconnect as soon as the
network works again. Pure: takes facts and time, returns decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

    from ftis_node.backoff import ExponentialBackoff


@dataclass(slots=True)
class _Absence:
    since: float
    next_at: float
    num_dials: int = 0


class ReconnectSchedule:
    """Reconnect schedule with exponential back-off for at most `capacity` members. Times: monotonic, in seconds."""

    def __init__(self, retry: ExponentialBackoff, *, forget_after_s: float, capacity: int, rng: random.Random) -> None:
        """A member that stays away for `forget_after_s` is forgotten."""
        self._retry = retry
        self._forget_after_s = forget_after_s
        self._capacity = capacity
        self._rng = rng
        self._met: dict[str, None] = {}  # current and former members, least recently met first
        self._absent: dict[str, _Absence] = {}

    def update(self, *, members: Collection[str], connected: Collection[str], now: float) -> None:
        """Update the schedule with the current members and connected peers."""
        for peer_id in members:
            self._met.pop(peer_id, None)
            self._met[peer_id] = None
        for peer_id in list(self._met)[: -self._capacity]:
            self._forget(peer_id)
        for peer_id in [*self._met]:
            if peer_id in connected:
                self._absent.pop(peer_id, None)
            elif peer_id not in self._absent:
                self._absent[peer_id] = _Absence(since=now, next_at=now + self._delay_s(1))
            elif now - self._absent[peer_id].since > self._forget_after_s:
                self._forget(peer_id)

    def due(self, now: float) -> list[str]:
        """Return the peers to dial now, and schedule the next dial of each."""
        due = [(peer_id, absence) for peer_id, absence in self._absent.items() if absence.next_at <= now]
        for _, absence in due:
            absence.num_dials += 1
            absence.next_at = now + self._delay_s(absence.num_dials + 1)
        return [peer_id for peer_id, _ in due]

    def _delay_s(self, num_tries: int) -> float:
        return self._retry.delay_s(num_tries, draw=self._rng.random())

    def _forget(self, peer_id: str) -> None:
        self._met.pop(peer_id, None)
        self._absent.pop(peer_id, None)
