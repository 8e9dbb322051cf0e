"""To whom this node sent which bodies: only such a peer's confirmation shows that a group was delivered.

Every member receives an announcement, so a confirmation by itself shows nothing.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_SENT_BODIES = 1 << 14


class SentBodies:
    """The last bodies sent, by peer. Bounded: of too many, the oldest of the peer with the most is forgotten."""

    def __init__(self, *, capacity: int = MAX_SENT_BODIES) -> None:
        self._capacity = capacity
        self._sent: dict[str, OrderedDict[bytes, None]] = {}
        self._num_sent = 0

    def __len__(self) -> int:
        return self._num_sent

    def note(self, peer_id: str, body_id: bytes) -> None:
        """A body was sent to a peer whole."""
        sent = self._sent.setdefault(peer_id, OrderedDict())
        if body_id in sent:
            sent.move_to_end(body_id)
            return
        sent[body_id] = None
        self._num_sent += 1
        if self._num_sent > self._capacity:
            self._forget_one()

    def has(self, peer_id: str, body_id: bytes) -> bool:
        """Whether a peer was sent this body."""
        return body_id in self._sent.get(peer_id, ())

    def _forget_one(self) -> None:
        largest = max(self._sent, key=lambda peer_id: len(self._sent[peer_id]))
        self._sent[largest].popitem(last=False)
        self._num_sent -= 1
        if not self._sent[largest]:
            del self._sent[largest]
