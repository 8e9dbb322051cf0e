"""Confirmations to send: gathered ones, and those to repeat, for groups that their senders announced again.

A sender repeats an announcement if a confirmation was lost or if the sender restarted. All groups of one sender are
confirmed in one call. Senders take turns, so an unresponsive one delays the others by one call, not by one call for
each group.
"""

from __future__ import annotations


class ReconfirmQueue:
    """Round-robin queue of confirmations, by sender.

    Above `max_senders` the oldest sender is dropped. Groups above `max_groups` are not added. Dropped groups are
    announced again.
    """

    def __init__(self, *, max_senders: int = 256, max_groups: int = 64) -> None:
        """`max_groups` is per sender."""
        self._max_senders = max_senders
        self._max_groups = max_groups
        self._due: dict[str, dict[bytes, None]] = {}  # in the order of sending

    def add(self, sender: str, group_id: bytes) -> bool:
        """Add a group of `sender` that this node has; return False if the sender's groups are too many."""
        groups = self._due.setdefault(sender, {})
        is_added = len(groups) < self._max_groups
        if is_added:
            groups[group_id] = None
        if len(self._due) > self._max_senders:
            del self._due[next(iter(self._due))]
        return is_added

    def take(self) -> tuple[str, list[bytes]] | None:
        """Return the next sender and its groups, None if the queue is empty."""
        sender = next(iter(self._due), None)
        return None if sender is None else (sender, list(self._due.pop(sender)))
