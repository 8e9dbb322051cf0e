"""Delivery of groups: confirmations that are pending, unverified or to be sent, and the bodies sent to each peer.

An announcement may get lost, or the member assigned to pull the group may have left. The repeated announcement reaches
other members, and the next member in order is assigned (`demand.py`). Every member sees the announcement with the id,
so a confirmation alone proves nothing. A query verifies each confirmation of a peer to which the body was not sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from ftis_node.backoff import ExponentialBackoff
from ftis_node.swarm.lru import LruDict

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SENT_BODIES = 1 << 14  # in an `IdsByPeer`: bodies sent to a peer completely
MAX_UNVERIFIED = 256  # in another one: claims of peers to hold a group
MAX_CONFIRMED_AT_ONCE = 64  # ids in one message


@dataclass(frozen=True, slots=True)
class Reannouncement:
    """A group to announce again; `attempt` counts its earlier announcements."""

    group_id: bytes
    attempt: int


@dataclass(slots=True)
class _Waiting:
    attempt: int
    next_at: float


class PendingConfirmations:
    """Retry queue of unconfirmed groups; above `capacity` the oldest is dropped. `now`: monotonic, in seconds."""

    def __init__(self, *, first_wait_s: float, max_attempts: int = 4, capacity: int = 1024) -> None:
        """Announce again after `first_wait_s`, then after twice as long each time, at most `max_attempts` times."""
        self._backoff = ExponentialBackoff(first_s=first_wait_s, ceiling_s=inf)
        self._max_attempts = max_attempts
        self._waiting = LruDict[bytes, _Waiting](capacity)  # in the order of their first announcement

    def __len__(self) -> int:
        return len(self._waiting)

    def announced(self, group_id: bytes, *, now: float) -> None:
        """Add a group that was announced for the first time."""
        self._waiting[group_id] = _Waiting(attempt=0, next_at=now + self._backoff.delay_s(1))

    def confirmed(self, group_id: bytes) -> None:
        self._waiting.pop(group_id, None)

    def due(self, *, now: float) -> list[Reannouncement]:
        """Return the groups to announce again now; schedules the next attempt of each."""
        due = []
        for group_id, waiting in list(self._waiting.items()):
            if waiting.next_at > now:
                continue
            waiting.attempt += 1
            due.append(Reannouncement(group_id, waiting.attempt))
            waiting.next_at = now + self._backoff.delay_s(waiting.attempt + 1)
            if waiting.attempt >= self._max_attempts:
                del self._waiting[group_id]
        return due


class IdsByPeer:
    """Group ids by peer, which take turns. Above `capacity` the oldest id of the peer with the most is dropped."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._ids: dict[str, dict[bytes, None]] = {}
        self._num_ids = 0

    def __len__(self) -> int:
        return self._num_ids

    def add(self, peer_id: str, group_id: bytes) -> None:
        ids = self._ids.setdefault(peer_id, {})
        self._num_ids += group_id not in ids
        ids.pop(group_id, None)
        ids[group_id] = None
        if self._num_ids > self._capacity:
            self._pop_of(max(self._ids, key=lambda known: len(self._ids[known])))

    def has(self, peer_id: str, group_id: bytes) -> bool:
        return group_id in self._ids.get(peer_id, ())

    def take(self, most: int) -> list[tuple[str, bytes]]:
        """Remove and return up to `most` ids, one of each peer; these peers move to the end."""
        taken = []
        for peer_id in list(self._ids)[:most]:
            taken.append((peer_id, self._pop_of(peer_id)))
            if (rest := self._ids.pop(peer_id, None)) is not None:
                self._ids[peer_id] = rest
        return taken

    def _pop_of(self, peer_id: str) -> bytes:
        ids = self._ids[peer_id]
        group_id = next(iter(ids))
        del ids[group_id]
        if not ids:
            del self._ids[peer_id]
        self._num_ids -= 1
        return group_id


class ConfirmationQueue:
    """Round-robin queue of confirmations to send, by the groups' sender.

    Above `max_senders` the oldest sender is dropped. Groups above `max_groups` are not added. Their senders announce
    them again, and then the node confirms them.
    """

    def __init__(self, *, max_senders: int = 256, max_groups: int = 256) -> None:
        """`max_groups` is per sender."""
        self._max_senders = max_senders
        self._max_groups = max_groups
        self._due: dict[str, dict[bytes, None]] = {}  # in the order of sending

    def __len__(self) -> int:
        """Return the number of senders with a confirmation to send."""
        return len(self._due)

    def add(self, sender: str, group_id: bytes) -> None:
        """Add a group of `sender` that this node stores."""
        groups = self._due.setdefault(sender, {})
        if len(groups) < self._max_groups:
            groups[group_id] = None
        if len(self._due) > self._max_senders:
            del self._due[next(iter(self._due))]

    def take(self, may_send: Callable[[str], bool] = lambda _: True) -> tuple[str, list[bytes]] | None:
        """Return the next sender for which `may_send` is true, and groups for one message; None if there is none."""
        sender = next(filter(may_send, self._due), None)
        if sender is None:
            return None
        groups = list(self._due.pop(sender))
        if rest := groups[MAX_CONFIRMED_AT_ONCE:]:
            self._due[sender] = dict.fromkeys(rest)
        return sender, groups[:MAX_CONFIRMED_AT_ONCE]
