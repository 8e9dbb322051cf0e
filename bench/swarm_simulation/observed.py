"""A node whose policy code is timed. Each assignment is computed by the policy itself and compared with the
simulation's shortcut.

The times exclude that comparison. They include some other bookkeeping of the simulation, so they are upper bounds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from swarm_simulation.node import SimulatedNode

if TYPE_CHECKING:
    from swarm_simulation.announcement import AnnouncedGroup, AnnouncementEvent
    from swarm_simulation.peer import Peer


class ObservedNode(SimulatedNode):
    """`SimulatedNode` with timing."""

    def receive(self, group: AnnouncedGroup, call: AnnouncementEvent, now: float) -> None:
        begun = time.thread_time()
        super().receive(group, call, now)
        self.policy_s += time.thread_time() - begun

    def is_assigned(self, call: AnnouncementEvent) -> bool:
        """Compute it by the policy. Raises AssertionError if the simulation's shortcut differs."""
        if not self.world.settings.with_assignment:
            return False
        is_it = call.is_assigned_by_policy(self.peer_id, view=self.view)
        begun = time.thread_time()
        assert is_it == call.is_assigned(self.peer_id, view=self.view)
        self.policy_s -= time.thread_time() - begun  # `receive` counts it
        return is_it

    def act(self) -> None:
        begun = time.thread_time()
        super().act()
        self.policy_s += time.thread_time() - begun

    def accept(self, group: AnnouncedGroup, *, handed_over_by: Peer) -> bool:
        begun = time.thread_time()
        accepted = super().accept(group, handed_over_by=handed_over_by)
        self.policy_s += time.thread_time() - begun
        return accepted

    def step(self) -> None:
        begun = time.thread_time()
        super().step()
        self.policy_s += time.thread_time() - begun

    def tick(self) -> None:
        begun = time.thread_time()
        super().tick()
        self.policy_s += time.thread_time() - begun

    def directory(self) -> None:
        begun = time.thread_time()
        super().directory()
        self.policy_s += time.thread_time() - begun
