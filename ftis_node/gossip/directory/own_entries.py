"""Whether another node uses this node's identity: it shows in entries of the directory that this node did not make.

An entry of a former life of this node is no sign: it holds for less long than the first entry of this life.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 64


class OwnEntries:
    """The entries that this node registered in this life, by the Unix time until which each holds."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._made: OrderedDict[float, None] = OrderedDict()

    def note(self, expires_at: float) -> None:
        """This node makes an entry."""
        self._first = expires_at if self._first is None else min(self._first, expires_at)
        self._made[expires_at] = None
        if len(self._made) > MAX_REMEMBERED:
            self._made.popitem(last=False)

    @property
    def has_any(self) -> bool:
        """Whether this life made an entry yet."""
        return self._first is not None

    def is_of_another(self, expires_at: float) -> bool:
        """Whether another node made an entry under this identity that holds until `expires_at`."""
        return self._first is not None and expires_at > self._first and expires_at not in self._made
