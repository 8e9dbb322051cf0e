"""A node whose policy code is timed. Each assignment is computed by the policy itself and compared with the
simulation's shortcut.

The times exclude that comparison. They include some other bookkeeping of the simulation, so they are upper bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from swarm_simulation.announcement import AnnouncementEvent
from swarm_simulation.node import SimulatedNode


class ObservedNode(SimulatedNode):
    """`SimulatedNode` with timing."""

    def is_assigned(self, call: AnnouncementEvent) -> bool:
        """Compute it by the policy. Raises AssertionError if the simulation's shortcut differs."""
        if not self.world.settings.with_assignment:
            return False
        is_it = call.is_assigned_by_policy(self.peer_id, view=self.view)
        begun = time.thread_time()
        assert is_it == call.is_assigned(self.peer_id, view=self.view)
        self.policy_s -= time.thread_time() - begun  # `receive` counts it
        return is_it


def _timed(name: str) -> Callable[..., Any]:
    act = getattr(SimulatedNode, name)

    def timed(node: SimulatedNode, *arguments: Any, **options: Any) -> Any:
        begun = time.thread_time()
        result = act(node, *arguments, **options)
        node.policy_s += time.thread_time() - begun
        return result

    return timed


for _name in ("receive", "act", "accept", "step", "tick", "directory"):
    setattr(ObservedNode, _name, _timed(_name))
