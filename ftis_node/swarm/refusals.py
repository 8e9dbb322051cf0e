"""Senders whose groups are refused: the state of each, and what to log. Pure; `now` is Unix time in seconds.

    the last 16 groups of a sender:    3 or more refused, and more than half    -> it is a refused sender
                                       half or fewer refused                    -> it is none

One line is due when a sender becomes refused and when the most frequent reason changes. All senders together have at
most 12 lines an hour, because a peer can create many identities.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ftis_node.swarm.lru import LruDict

MAX_SENDERS = 4096
WINDOW = 16
LEAST_REFUSED = 3
FORGET_S = 3600.0  # after the last refused group
LINES_PER_HOUR, HOUR_S = 12, 3600.0


class RefusedSender(NamedTuple):
    """A sender whose groups are refused since `since`, `num_groups` so far, mostly for `reason`."""

    peer_id: str
    reason: str
    num_groups: int
    since: float


@dataclass(slots=True)
class _Sender:
    last: deque[str] = field(default_factory=lambda: deque(maxlen=WINDOW))  # reasons; "" for an accepted group
    num_groups: int = 0
    since: float | None = None  # None: not refused
    refused_at: float = 0.0

    @property
    def reason(self) -> str:
        return Counter(filter(None, self.last)).most_common(1)[0][0]


class RefusalLog:
    """Decision which refused senders to log now, for a table that changes with time."""

    def __init__(self) -> None:
        self._logged = LruDict[str, str](MAX_SENDERS)  # the reason of the last line
        self._lines: deque[float] = deque(maxlen=LINES_PER_HOUR)

    def news(self, refused: list[RefusedSender], *, now: float) -> tuple[list[RefusedSender], list[str]]:
        """Return what to log: senders that became refused or have another reason, and those no longer refused."""
        present = {sender.peer_id for sender in refused}
        ended = [peer_id for peer_id in self._logged if peer_id not in present]
        for peer_id in ended:
            del self._logged[peer_id]
        begun = [sender for sender in refused if self._is_due(sender, now)]
        return begun, ended

    def _is_due(self, sender: RefusedSender, now: float) -> bool:
        is_flood = len(self._lines) == LINES_PER_HOUR and now - self._lines[0] < HOUR_S
        if is_flood or self._logged.get(sender.peer_id) == sender.reason:
            return False
        self._lines.append(now)
        self._logged[sender.peer_id] = sender.reason
        return True


class RefusedSenders:
    """Table of the outcomes of each sender's last groups."""

    def __init__(self) -> None:
        self._senders = LruDict[str, _Sender](MAX_SENDERS)

    def accepted(self, peer_id: str) -> None:
        sender = self._senders.touched(peer_id, _Sender)
        sender.last.append("")
        if not self._is_refused(sender):
            sender.since, sender.num_groups = None, 0

    def refused(self, peer_id: str, reason: str, *, now: float) -> None:
        """Note a refused group, or an announcement that is not followed."""
        sender = self._senders.touched(peer_id, _Sender)
        sender.last.append(reason)
        sender.num_groups += 1
        sender.refused_at = now
        if sender.since is None and self._is_refused(sender):
            sender.since = now

    def forget(self) -> None:
        """Forget all outcomes: the groups were too old only because this machine was suspended."""
        self._senders.clear()

    def present(self, *, now: float) -> list[RefusedSender]:
        """Return the refused senders of the last hour, those with most groups first."""
        found = [
            RefusedSender(peer_id, sender.reason, sender.num_groups, sender.since)
            for peer_id, sender in self._senders.items()
            if sender.since is not None and now - sender.refused_at < FORGET_S
        ]
        return sorted(found, key=lambda sender: -sender.num_groups)

    def _is_refused(self, sender: _Sender) -> bool:
        num_refused = sum(map(bool, sender.last))
        return num_refused >= LEAST_REFUSED and 2 * num_refused > len(sender.last)
