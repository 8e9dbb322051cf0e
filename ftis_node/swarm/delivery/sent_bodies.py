"""Log of the bodies sent to each peer. Only a peer that received the body can confirm a delivery.

Every member sees the announcement with the id, so a confirmation alone proves nothing.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_SENT_BODIES = 1 << 14


class SentBodies:
    """Bounded log of bodies sent, by peer. Above `capacity` the oldest entry of the peer with the most is dropped."""

    def __init__(self, *, capacity: int = MAX_SENT_BODIES) -> None:
        self._capacity = capacity
        self._sent: dict[str, OrderedDict[bytes, None]] = {}
        self._num_sent = 0

    def __len__(self) -> int:
        return self._num_sent

    def note(self, peer_id: str, body_id: bytes) -> None:
        """Add a body that was sent to a peer completely."""
        sent = self._sent.setdefault(peer_id, OrderedDict())
        if body_id in sent:
            sent.move_to_end(body_id)
            return
        sent[body_id] = None
        self._num_sent += 1
        if self._num_sent > self._capacity:
            self._forget_one()

    def has(self, peer_id: str, body_id: bytes) -> bool:
        """Return whether this body was sent to the peer completely."""
        return body_id in self._sent.get(peer_id, ())

    def _forget_one(self) -> None:
        largest = max(self._sent, key=lambda peer_id: len(self._sent[peer_id]))
        self._sent[largest].popitem(last=False)
        self._num_sent -= 1
        if not self._sent[largest]:
            del self._sent[largest]
