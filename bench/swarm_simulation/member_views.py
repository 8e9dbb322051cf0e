"""Members of a shard as listed in the directory."""

from __future__ import annotations

from swarm_simulation.settings import NUM_VIEWS


class MemberViews:
    """Members of a shard, and the views of the last few periods, newest first.

    The directory shows new members late, and departed ones until their records expire.
    """

    def __init__(self, *, record_lives_s: float) -> None:
        self._record_lives_s = record_lives_s
        self._left_at: dict[str, float | None] = {}
        self.views: tuple[frozenset[str], ...] = (frozenset(),) * NUM_VIEWS

    def join(self, peer_id: str) -> None:
        self._left_at[peer_id] = None

    def leave(self, peer_id: str, *, now: float) -> None:
        """Remove a member; it stays in the views until its record expires."""
        self._left_at[peer_id] = now

    def begin(self) -> None:
        """Start with views that contain all members."""
        self.views = (frozenset(self._left_at),) * NUM_VIEWS

    def start_period(self, *, now: float) -> None:
        """Start a new period."""
        lapsed = [
            peer for peer, left_at in self._left_at.items() if left_at is not None and self._is_over(left_at, now)
        ]
        for peer in lapsed:
            del self._left_at[peer]
        self.views = (frozenset(self._left_at), *self.views[:-1])

    def _is_over(self, left_at: float, now: float) -> bool:
        return now - left_at > self._record_lives_s
