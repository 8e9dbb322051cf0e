"""Scheduler of requests by peer: bounds those in flight in all, of each kind of peer, and of each peer."""

from __future__ import annotations

from collections import Counter


class PeerSlots:
    """Concurrency limiter. Kinds of peers, such as slow ones, have separate slots, so they delay only one another."""

    def __init__(self) -> None:
        self._held = Counter[tuple[str, str]]()  # slots by peer and kind; at most a few dozen

    def __contains__(self, peer_id: str) -> bool:
        return self.num_held(peer_id) > 0

    def num_held(self, peer_id: str | None = None, *, kind: str | None = None) -> int:
        """Return the number of slots that are held: by one peer or all, of one kind or all."""
        held = self._held.items()
        return sum(num for (peer, of_kind), num in held if peer_id in (None, peer) and kind in (None, of_kind))

    def has_free(self, peer_id: str, *, kind: str = "", most: int, per_peer: int = 1) -> bool:
        """Return whether fewer than `most` slots of this kind are held, and fewer than `per_peer` by this peer."""
        return self.num_held(kind=kind) < most and self.num_held(peer_id) < per_peer

    def take(self, peer_id: str, *, kind: str = "", most: int, per_peer: int = 1) -> bool:
        """Take a slot if one is free, and return whether it was."""
        is_free = self.has_free(peer_id, kind=kind, most=most, per_peer=per_peer)
        if is_free:
            self._held[peer_id, kind] += 1
        return is_free

    def release(self, peer_id: str) -> None:
        """Free a slot of a peer."""
        key = next(key for key in self._held if key[0] == peer_id)
        self._held -= Counter([key])  # subtraction drops entries of 0
