"""An announced group, shared by all its readers, and the member assigned to it at each announcement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ftis_node.swarm.demand import assignment_order, is_assigned
from ftis_node.swarm.pull_queue import PullItem
from swarm_simulation.settings import Role


class AnnouncementEvent:
    """One announcement of a group: its attempt, and the assigned member by each view of the shard.

    The policy's `is_assigned` costs one hash for each member and reader. Here the members are ranked once, and each
    view selects its own. The results are equal.
    """

    __slots__ = ("_chosen", "_group_id", "_sender", "_shard", "_views", "attempt", "num_bytes")

    def __init__(
        self,
        group_id: bytes,
        sender: str,
        views: Sequence[frozenset[str]],
        *,
        shard: int | None,
        attempt: int,
        num_bytes: float,
    ) -> None:
        """`shard` is the sender's; None in a swarm so small that groups are assigned among all members."""
        self.attempt = attempt
        self.num_bytes = num_bytes  # received by each reader
        self._group_id = group_id
        self._sender = sender
        self._shard = shard
        self._views = views
        self._chosen: list[str | None] | None = None

    def concerns(self, shard: int) -> bool:
        """Return whether the group is assigned among the members of that shard."""
        return self._shard is None or self._shard == shard

    def is_assigned(self, peer_id: str, *, view: int) -> bool:
        """Return whether the group is assigned to a member with that view."""
        members = self._views[view]
        if peer_id not in members:  # a new member
            return is_assigned(self._group_id, peer_id, members, sender=self._sender, attempt=self.attempt)
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen[view] == peer_id

    def is_assigned_by_policy(self, peer_id: str, *, view: int) -> bool:
        """Return the same, computed by the policy itself."""
        return is_assigned(self._group_id, peer_id, self._views[view], sender=self._sender, attempt=self.attempt)

    def _choose(self) -> list[str | None]:
        order = [
            peer for peer in assignment_order(self._group_id, frozenset().union(*self._views)) if peer != self._sender
        ]
        chosen: list[str | None] = []
        for members in self._views:
            num_members = len(members) - (self._sender in members)
            turn = self.attempt % num_members if num_members else -1
            present = (peer for peer in order if peer in members)
            chosen.append(next((peer for place, peer in enumerate(present) if place == turn), None))
        return chosen


class AnnouncedGroup:
    """A group and its pulls."""

    __slots__ = (
        "attempt_pulled", "call", "created_at", "assigned_item", "id", "is_valid", "number", "num_pulls",
        "pulled_at", "role", "sender", "shard", "want",
    )  # fmt: skip

    def __init__(
        self,
        group_id: bytes,
        sender: str,
        shard: int,
        role: Role,
        number: int,
        *,
        created_at: float,
        num_bytes: int,
        is_valid: bool,
    ) -> None:
        self.id = group_id
        self.sender = sender
        self.shard = shard
        self.role = role  # of the sender
        self.number = number
        self.created_at = created_at
        self.is_valid = is_valid
        self.want = PullItem(id=group_id, sender=self.sender, number=number, num_bytes=num_bytes, created_at=created_at)
        self.assigned_item = replace(self.want, is_assigned=True)
        self.call: AnnouncementEvent | None = None  # the last announcement
        self.pulled_at: float | None = None  # first pull by another honest node
        self.attempt_pulled = 0
        self.num_pulls = 0
