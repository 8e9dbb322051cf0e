"""Detects another node with the same identity by directory entries that this node did not create.

Entries of an earlier process of this node do not count: they expire before the first entry of this process.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 64


class OwnEntries:
    """The entries that this process registered, by their expiry (Unix time)."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._made: OrderedDict[float, None] = OrderedDict()

    def note(self, expires_at: float) -> None:
        """Add an entry of this node."""
        self._first = expires_at if self._first is None else min(self._first, expires_at)
        self._made[expires_at] = None
        if len(self._made) > MAX_REMEMBERED:
            self._made.popitem(last=False)

    @property
    def has_any(self) -> bool:
        return self._first is not None

    def is_of_another(self, expires_at: float) -> bool:
        """Return whether another node created the entry under this identity with this expiry."""
        return self._first is not None and expires_at > self._first and expires_at not in self._made
