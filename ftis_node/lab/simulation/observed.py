"""A node whose policy code is timed, with every duty decided by the policy itself and held against the short cut.

The times hold some of the simulation's own book-keeping too: they are upper bounds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ftis_node.lab.simulation.node import Node

if TYPE_CHECKING:
    from ftis_node.lab.simulation.news import Call, News
    from ftis_node.lab.simulation.peer import Peer


class ObservedNode(Node):
    """As `Node`."""

    def hear(self, news: News, call: Call, now: float) -> None:
        """Timed."""
        begun = time.thread_time()
        super().hear(news, call, now)
        self.policy_s += time.thread_time() - begun

    def is_on_duty(self, call: Call) -> bool:
        """By the policy. Raises AssertionError where the simulation's short cut differs."""
        if not self.world.settings.with_duties:
            return False
        is_it = call.is_on_duty_by_policy(self.peer_id, view=self.view)
        assert is_it == call.is_on_duty(self.peer_id, view=self.view)
        return is_it

    def act(self) -> None:
        """Timed."""
        begun = time.thread_time()
        super().act()
        self.policy_s += time.thread_time() - begun

    def accept(self, news: News, *, handed_over_by: Peer) -> bool:
        """Timed."""
        begun = time.thread_time()
        accepted = super().accept(news, handed_over_by=handed_over_by)
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
