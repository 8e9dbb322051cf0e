"""Per-peer back-off: a peer gets no requests for a while after a failure, longer after each consecutive one.

A peer that never answers occupies a request slot until the time-out. Without back-off a few such peers would occupy
all slots.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from ftis_node.backoff import ExponentialBackoff

if TYPE_CHECKING:
    from collections.abc import Container

MAX_FACTOR = 64
MAX_PEERS = 4096


class _Pause(NamedTuple):
    until: float
    num_failures: int


class PeerBackoff:
    """Exponential back-off for each peer, at most 4096 peers. `now` is a monotonic clock in seconds."""

    def __init__(self, *, first_s: float) -> None:
        """`first_s` is the pause after the first failure; each further failure doubles it, up to 64 times."""
        self._backoff = ExponentialBackoff(first_s=first_s, ceiling_s=MAX_FACTOR * first_s)
        self._pauses: OrderedDict[str, _Pause] = OrderedDict()

    def may_ask(self, peer_id: str, *, now: float) -> bool:
        """Return whether the peer may get a request, because its pause is over."""
        pause = self._pauses.get(peer_id)
        return pause is None or pause.until <= now

    def has_failed(self, peer_id: str) -> bool:
        """Return whether the peer's last request failed."""
        pause = self._pauses.get(peer_id)
        return pause is not None and pause.num_failures > 0

    def rest(self, peer_id: str, seconds: float, *, now: float) -> None:
        """Pause the peer because it answered BUSY. This does not count as a failure."""
        known = self._pauses.pop(peer_id, _Pause(0.0, 0))
        self._put(peer_id, known._replace(until=max(known.until, now + seconds)))

    def failed(self, peer_id: str, *, now: float) -> None:
        """Count a failed request and pause the peer."""
        known = self._pauses.pop(peer_id, _Pause(0.0, 0))
        num_failures = known.num_failures + 1
        self._put(peer_id, _Pause(now + self._backoff.delay_s(num_failures), num_failures))

    def succeeded(self, peer_id: str) -> None:
        """Forget the peer's failures."""
        self._pauses.pop(peer_id, None)

    def keep(self, peer_ids: Container[str]) -> None:
        """Forget the failures of all peers that are not in `peer_ids`."""
        for peer_id in [peer_id for peer_id in self._pauses if peer_id not in peer_ids]:
            del self._pauses[peer_id]

    def _put(self, peer_id: str, pause: _Pause) -> None:
        self._pauses[peer_id] = pause
        if len(self._pauses) > MAX_PEERS:
            self._pauses.popitem(last=False)
