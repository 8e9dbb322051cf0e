"""How many requests are served at the same time, in all and for each peer. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter


class Slots:
    """Slots taken and free."""

    def __init__(self, *, max_total: int, max_per_peer: int) -> None:
        self._max_total = max_total
        self._max_per_peer = max_per_peer
        self._taken: Counter[str] = Counter()

    def take(self, peer_id: str) -> bool:
        """Takes a slot for a peer; whether there was one."""
        if self._taken.total() >= self._max_total or self._taken[peer_id] >= self._max_per_peer:
            return False
        self._taken[peer_id] += 1
        return True

    def give_back(self, peer_id: str) -> None:
        """Gives a taken slot back."""
        self._taken[peer_id] -= 1
        if not self._taken[peer_id]:
            del self._taken[peer_id]
