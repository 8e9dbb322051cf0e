"""How many groups each member of an experiment's swarm makes and takes, step by step, when some end before others.

As long as all are there a step takes what the manifest says. Once somebody has left, those who stay make up for it: an
update keeps its size, and each generates an even share of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounds:
    """`own` and `foreign` groups of an update while all senders are there; `last_steps` says when each of them ends."""

    own: int
    foreign: int
    last_steps: tuple[int, ...]

    def shares(self, step: int) -> tuple[int, int]:
        """Own and foreign groups of this step, for everyone who is still there; nobody makes any after the end."""
        num_there = sum(last >= step for last in self.last_steps)
        if num_there == len(self.last_steps):
            return self.own, self.foreign
        total = self.own + self.foreign
        own = total // num_there if num_there else 0
        return own, total - own if num_there else 0

    def due(self, step: int) -> int:
        """Groups that a sender who is there until `step` has made by then."""
        return sum(self.shares(each)[0] for each in range(1, step + 1))

    @property
    def is_even(self) -> bool:
        """Whether every number of senders that is ever there can share an update evenly."""
        steps = {1, *(last + 1 for last in self.last_steps)}
        counts = {sum(last >= step for last in self.last_steps) for step in steps} - {0, len(self.last_steps)}
        return all((self.own + self.foreign) % count == 0 for count in counts)
