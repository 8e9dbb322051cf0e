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


class Quota:
    """What one sender makes and takes, step by step: what the rounds say, until it `plan`s a step otherwise.

    One that `plans` each of its steps is waited for until it has.
    """

    def __init__(self, rounds: Rounds, *, plans: bool = False) -> None:
        self._rounds = rounds
        self._plans = plans
        self._own = {1: rounds.shares(1)[0]}

    def plan(self, step: int, own: int) -> None:
        """In `step` it makes `own` groups, and takes as many fewer or more of others."""
        self._own[step] = own

    def is_known(self, step: int) -> bool:
        """Whether what it makes in `step` is settled."""
        return not self._plans or step in self._own

    def shares(self, step: int) -> tuple[int, int]:
        """Own and foreign groups of this step."""
        own, foreign = self._rounds.shares(step)
        planned = self._own.get(step, own)
        return planned, own + foreign - planned

    def due(self, step: int) -> int:
        """Groups that it has made by the end of this step."""
        return sum(self.shares(each)[0] for each in range(1, step + 1))
