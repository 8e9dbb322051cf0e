"""Confirmations to repeat, for groups that their senders announced again although this node has them.

A sender repeats an announcement if a confirmation was lost or if the sender restarted. All groups of one sender are
confirmed in one call. Senders take turns, so an unresponsive one delays the others by one call, not by one call for
each group.
"""

from __future__ import annotations


class ReconfirmQueue:
    """Round-robin queue of confirmations to repeat, by sender.

    Above `max_senders` the oldest sender is dropped. Groups above `max_groups` are not added. Dropped groups are
    announced again.
    """

    def __init__(self, *, max_senders: int = 256, max_groups: int = 64) -> None:
        """`max_groups` is per sender."""
        self._max_senders = max_senders
        self._max_groups = max_groups
        self._due: dict[str, dict[bytes, None]] = {}  # in the order of sending

    def add(self, sender: str, group_id: bytes) -> None:
        """Add a group that `sender` announced again and that this node has."""
        groups = self._due.setdefault(sender, {})
        if len(groups) < self._max_groups:
            groups[group_id] = None
        if len(self._due) > self._max_senders:
            del self._due[next(iter(self._due))]

    def take(self) -> tuple[str, list[bytes]] | None:
        """Return the next sender and its groups, None if the queue is empty."""
        sender = next(iter(self._due), None)
        return None if sender is None else (sender, list(self._due.pop(sender)))
