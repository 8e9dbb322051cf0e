"""Who is in a shard, and who is known to be: the directory shows newcomers late, and the gone for a while longer."""

from __future__ import annotations

NUM_VIEWS = 3  # kinds of node by how late they look: 0, 1 or 2 periods


class MemberViews:
    """The members of one shard by id, and what was known of them in the last few periods, newest first."""

    def __init__(self, *, record_lives_s: float) -> None:
        self._record_lives_s = record_lives_s
        self._left_at: dict[str, float | None] = {}
        self.views: tuple[frozenset[str], ...] = (frozenset(),) * NUM_VIEWS

    def join(self, peer_id: str) -> None:
        """A member came."""
        self._left_at[peer_id] = None

    def leave(self, peer_id: str, *, now: float) -> None:
        """A member went, without a word."""
        self._left_at[peer_id] = now

    def begin(self) -> None:
        """Everybody has known everybody for long."""
        self.views = (frozenset(self._left_at),) * NUM_VIEWS

    def look(self, *, now: float) -> None:
        """A period is over."""
        lapsed = [
            peer for peer, left_at in self._left_at.items() if left_at is not None and self._is_over(left_at, now)
        ]
        for peer in lapsed:
            del self._left_at[peer]
        self.views = (frozenset(self._left_at), *self.views[:-1])

    def _is_over(self, left_at: float, now: float) -> bool:
        return now - left_at > self._record_lives_s
