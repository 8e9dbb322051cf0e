"""Peers that are left in peace for a while: longer with each failure in a row, so that slow ones take nobody's turn.

A peer that gives nothing for as long as we wait holds a place for that time; were it asked again at once, a few of
them would hold all places for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MAX_DOUBLINGS = 6
MAX_PEERS = 4096


class _Pause(NamedTuple):
    until: float
    num_failures: int


class PeerBackoff:
    """`now`: any clock that never goes back, s. Bounded: of too many peers the one paused first is forgotten."""

    def __init__(self, *, first_s: float) -> None:
        """`first_s`: after the first failure; each further one doubles it, up to 64 times."""
        self._first_s = first_s
        self._pauses: OrderedDict[str, _Pause] = OrderedDict()

    def may_ask(self, peer_id: str, *, now: float) -> bool:
        """Whether the peer's pause is over."""
        pause = self._pauses.get(peer_id)
        return pause is None or pause.until <= now

    def has_failed(self, peer_id: str) -> bool:
        """Whether its last answer was none."""
        pause = self._pauses.get(peer_id)
        return pause is not None and pause.num_failures > 0

    def rest(self, peer_id: str, seconds: float, *, now: float) -> None:
        """The peer asked for a pause itself; that is no failure."""
        known = self._pauses.pop(peer_id, _Pause(0.0, 0))
        self._put(peer_id, known._replace(until=max(known.until, now + seconds)))

    def failed(self, peer_id: str, *, now: float) -> None:
        """The peer gave nothing."""
        known = self._pauses.pop(peer_id, _Pause(0.0, 0))
        length_s = self._first_s * 2.0 ** min(known.num_failures, MAX_DOUBLINGS)
        self._put(peer_id, _Pause(now + length_s, known.num_failures + 1))

    def succeeded(self, peer_id: str) -> None:
        """The peer answered: its failures are forgotten."""
        self._pauses.pop(peer_id, None)

    def _put(self, peer_id: str, pause: _Pause) -> None:
        self._pauses[peer_id] = pause
        if len(self._pauses) > MAX_PEERS:
            self._pauses.popitem(last=False)
