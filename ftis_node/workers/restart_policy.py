"""When is a dead worker started again? A pure policy: how long it lived goes in, a decision comes out.

A worker that served for a while and then died is started again almost at once. One that keeps dying soon after its
start waits twice as long each time, and after a few such deaths in a row is given up: something is wrong that another
start does not mend, and a person should read its log. A worker that lacks memory waits in the same way, and is given
up later: another process may give memory back, and one that never does is a fault, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.backoff import ExponentialBackoff


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after `delay_s`; remember `num_quick_deaths`, or shortages, for the next decision."""

    delay_s: float
    num_quick_deaths: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start again."""

    num_quick_deaths: int


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back-off between restarts, and the number of quick deaths or memory shortages in a row that ends them."""

    backoff: ExponentialBackoff = ExponentialBackoff(first_s=0.5, ceiling_s=60.0)
    quick_death_s: float = 30.0
    max_quick_deaths: int = 5
    max_shortages: int = 20

    def after_death(self, *, served_s: float, num_quick_deaths: int) -> Restart | GiveUp:
        """Decide after a death.

        `served_s` is the time from readiness to death (0 where it never got ready), `num_quick_deaths` the number of
        quick deaths in a row before this one.
        """
        if served_s >= self.quick_death_s:
            return Restart(delay_s=self.backoff.delay_s(1), num_quick_deaths=0)
        return self._after(num_quick_deaths + 1, at_most=self.max_quick_deaths)

    def after_shortage(self, *, num_shortages: int) -> Restart | GiveUp:
        """Decide after a death for lack of memory; `num_shortages` is the number of those in a row before this one."""
        return self._after(num_shortages + 1, at_most=self.max_shortages)

    def _after(self, number: int, *, at_most: int) -> Restart | GiveUp:
        if number >= at_most:
            return GiveUp(num_quick_deaths=number)
        return Restart(delay_s=self.backoff.delay_s(number), num_quick_deaths=number)
