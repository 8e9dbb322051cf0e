"""Confirmations that are checked before they count: a peer says that it holds a group which was not sent to it."""

from __future__ import annotations

MAX_UNVERIFIED = 256


class UnverifiedConfirmations:
    """Pairs of peer and group. Bounded: of too many, the oldest of the peer with the most is dropped."""

    def __init__(self, *, capacity: int = MAX_UNVERIFIED) -> None:
        self._capacity = capacity
        self._waiting: dict[str, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, peer_id: str, group_id: bytes) -> None:
        """A peer claims to hold a group."""
        self._waiting.setdefault(peer_id, {})[group_id] = None
        if len(self) > self._capacity:
            self._pop_of(max(self._waiting, key=lambda known: len(self._waiting[known])))

    def take(self, most: int) -> list[tuple[str, bytes]]:
        """The next claims to check, one of each peer; those who were taken from wait behind the others."""
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
