"""A node whose policy code is timed, with every duty decided by the policy itself and held against the short cut.

The times hold some of the simulation's own book-keeping too: they are upper bounds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ftis_node.lab.simulation.node import SimulatedNode

if TYPE_CHECKING:
    from ftis_node.lab.simulation.announcement import AnnouncedGroup, AnnouncementEvent
    from ftis_node.lab.simulation.peer import Peer


class ObservedNode(SimulatedNode):
    """As `SimulatedNode`."""

    def receive(self, group: AnnouncedGroup, call: AnnouncementEvent, now: float) -> None:
        """Timed."""
        begun = time.thread_time()
        super().receive(group, call, now)
        self.policy_s += time.thread_time() - begun

    def is_assigned(self, call: AnnouncementEvent) -> bool:
        """By the policy. Raises AssertionError where the simulation's short cut differs."""
        if not self.world.settings.with_assignment:
            return False
        is_it = call.is_assigned_by_policy(self.peer_id, view=self.view)
        assert is_it == call.is_assigned(self.peer_id, view=self.view)
        return is_it

    def act(self) -> None:
        """Timed."""
        begun = time.thread_time()
        super().act()
        self.policy_s += time.thread_time() - begun

    def accept(self, group: AnnouncedGroup, *, handed_over_by: Peer) -> bool:
        """Timed."""
        begun = time.thread_time()
        accepted = super().accept(group, handed_over_by=handed_over_by)
        self.policy_s += time.thread_time() - begun
        return accepted

    def step(self) -> None:
        """Timed."""
        begun = time.thread_time()
        super().step()
        self.policy_s += time.thread_time() - begun

    def tick(self) -> None:
        """Timed."""
        begun = time.thread_time()
        super().tick()
        self.policy_s += time.thread_time() - begun

    def directory(self) -> None:
        """Timed."""
        begun = time.thread_time()
        super().directory()
        self.policy_s += time.thread_time() - begun
