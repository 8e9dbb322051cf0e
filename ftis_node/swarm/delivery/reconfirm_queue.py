"""Groups that their senders announce again though they are here: who is to be told so, and of what.

A sender does that where a confirmation was lost, or where it was started anew. All that one sender waits for is told at
once, and senders take turns: one that does not answer keeps the others waiting for one call, not for one a group.
"""

from __future__ import annotations


class ReconfirmQueue:
    """Bounded: of too many senders the one longest here is forgotten, of too many groups of one the newest; they are
    announced once more."""

    def __init__(self, *, max_senders: int = 256, max_groups: int = 64) -> None:
        """`max_groups` of each sender."""
        self._max_senders = max_senders
        self._max_groups = max_groups
        self._due: dict[str, dict[bytes, None]] = {}  # in the order in which senders are told

    def add(self, sender: str, group_id: bytes) -> None:
        """`sender` announced this group again, and it is here."""
        groups = self._due.setdefault(sender, {})
        if len(groups) < self._max_groups:
            groups[group_id] = None
        if len(self._due) > self._max_senders:
            del self._due[next(iter(self._due))]

    def take(self) -> tuple[str, list[bytes]] | None:
        """The next sender and its groups; None where nobody waits."""
        sender = next(iter(self._due), None)
        return None if sender is None else (sender, list(self._due.pop(sender)))
