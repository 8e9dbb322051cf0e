"""How often each peer may announce: what is said beyond it is passed over before anything is made of it."""

from __future__ import annotations

from collections import OrderedDict

from ftis_node.swarm.token_bucket import Allowance

MINUTE_S = 60.0


class Voices:
    """An allowance for each of the peers heard last; a minute's worth may be said at once."""

    def __init__(self, *, max_per_minute: float, max_peers: int = 4096) -> None:
        self._max_per_minute = max_per_minute
        self._max_peers = max_peers
        self._heard: OrderedDict[str, Allowance] = OrderedDict()

    def may_speak(self, peer_id: str, *, now: float) -> bool:
        """Whether one more announcement of the peer is heard; it is charged for it. `now`: a clock in seconds."""
        allowance = self._heard.pop(peer_id, None) or Allowance(
            rate_per_s=self._max_per_minute / MINUTE_S, burst=self._max_per_minute
        )
        self._heard[peer_id] = allowance
        if len(self._heard) > self._max_peers:
            self._heard.popitem(last=False)
        return allowance.take(1.0, now=now)
