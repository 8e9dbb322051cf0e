"""When is a dead worker started again? A pure policy: how long it lived goes in, a decision comes out.

A worker that served for a while and then died is started again almost at once. One that keeps dying soon after its
start waits twice as long each time, and after a few such deaths in a row is given up: something is wrong that another
start does not mend, and a person should read its log.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after `delay_s`; remember `num_quick_deaths` for the next decision."""

    delay_s: float
    num_quick_deaths: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start again."""

    num_quick_deaths: int


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back-off in seconds, and the number of quick deaths in a row after which a worker is given up."""

    first_delay_s: float = 0.5
    delay_factor: float = 2.0
    max_delay_s: float = 60.0
    quick_death_s: float = 30.0
    max_quick_deaths: int = 5

    def after_death(self, *, served_s: float, num_quick_deaths: int) -> Restart | GiveUp:
        """Decide after a death.

        `served_s` is the time from readiness to death (0 where it never got ready), `num_quick_deaths` the number of
        quick deaths in a row before this one.
        """
        if served_s >= self.quick_death_s:
            return Restart(delay_s=self.first_delay_s, num_quick_deaths=0)
        num_quick_deaths += 1
        if num_quick_deaths >= self.max_quick_deaths:
            return GiveUp(num_quick_deaths=num_quick_deaths)
        delay_s = self.first_delay_s * self.delay_factor ** (num_quick_deaths - 1)
        return Restart(delay_s=min(delay_s, self.max_delay_s), num_quick_deaths=num_quick_deaths)
