"""Members that were connected and are no longer: each is dialled again, soon at first, then less often, then no more.

Most come back: their machine slept, a line was cut. The rounds of `membership.py` would find them, too, but only after
a minute and by chance; after a partition both halves should see each other as soon as the line is there. Facts and the
time come in, a decision goes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

    from ftis_node.swarm.backoff import ExponentialBackoff


@dataclass(slots=True)
class _Absence:
    since: float
    next_at: float
    num_dials: int = 0


class ReconnectSchedule:
    """Who is missed by one node, at most `capacity` peers. Times are in seconds, of any clock that does not jump."""

    def __init__(self, retry: ExponentialBackoff, *, patience_s: float, capacity: int, rng: random.Random) -> None:
        """A member that stays away for `patience_s` is forgotten."""
        self._retry = retry
        self._patience_s = patience_s
        self._capacity = capacity
        self._rng = rng
        self._met: dict[str, None] = {}  # members of now or once, those met longest ago first
        self._absent: dict[str, _Absence] = {}

    def update(self, *, members: Collection[str], connected: Collection[str], now: float) -> None:
        """Takes in who is there."""
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
            elif now - self._absent[peer_id].since > self._patience_s:
                self._forget(peer_id)

    def due(self, now: float) -> list[str]:
        """Whom to dial now; each has its next turn later."""
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
