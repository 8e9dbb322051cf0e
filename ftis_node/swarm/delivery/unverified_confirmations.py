"""Confirmations from peers to which this node did not send the body. A query verifies each before it counts."""

from __future__ import annotations

MAX_UNVERIFIED = 256


class UnverifiedConfirmations:
    """Round-robin queue of (peer, group). Above `capacity` the oldest pair of the peer with the most is dropped."""

    def __init__(self, *, capacity: int = MAX_UNVERIFIED) -> None:
        self._capacity = capacity
        self._waiting: dict[str, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, peer_id: str, group_id: bytes) -> None:
        """Add the claim of a peer to hold a group."""
        self._waiting.setdefault(peer_id, {})[group_id] = None
        if len(self) > self._capacity:
            self._pop_of(max(self._waiting, key=lambda known: len(self._waiting[known])))

    def take(self, most: int) -> list[tuple[str, bytes]]:
        """Return up to `most` claims to check, one for each peer; the peers of these claims move to the end."""
        taken = []
        for peer_id in list(self._waiting)[:most]:
            taken.append((peer_id, self._pop_of(peer_id)))
            if (rest := self._waiting.pop(peer_id, None)) is not None:
                self._waiting[peer_id] = rest
        return taken

    def _pop_of(self, peer_id: str) -> bytes:
        waiting = self._waiting[peer_id]
        group_id = next(iter(waiting))
        del waiting[group_id]
        if not waiting:
            del self._waiting[peer_id]
        return group_id
