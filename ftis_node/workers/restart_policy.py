"""The restart policy of a worker: exponential back-off, as a pure function of its time in service.

A worker that served for a while and then died is restarted almost at once. After each death soon after its start the
delay doubles. After a few such deaths in a row no restart follows: another start does not remove the cause, which the
worker's log shows. A worker that lacks memory has more attempts, because another process may free memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.backoff import ExponentialBackoff


@dataclass(frozen=True, slots=True)
class Restart:
    """A decision: restart after `delay_s`. `num_quick_deaths` is the count of quick deaths (or shortages) for the next
    decision.
    """

    delay_s: float
    num_quick_deaths: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A decision: do not restart."""

    num_quick_deaths: int


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The back-off between restarts, and the limits of quick deaths and of memory shortages in a row."""

    backoff: ExponentialBackoff = ExponentialBackoff(first_s=0.5, ceiling_s=60.0)
    quick_death_s: float = 30.0
    max_quick_deaths: int = 5
    max_shortages: int = 20

    def after_death(self, *, served_s: float, num_quick_deaths: int) -> Restart | GiveUp:
        """Return the decision after a death.

        `served_s` is the time from readiness to death, 0 if the worker never was ready. `num_quick_deaths` counts the
        quick deaths in a row before this one.
        """
        if served_s >= self.quick_death_s:
            return Restart(delay_s=self.backoff.delay_s(1), num_quick_deaths=0)
        return self._after(num_quick_deaths + 1, at_most=self.max_quick_deaths)

    def after_shortage(self, *, num_shortages: int) -> Restart | GiveUp:
        """Return the decision after a lack of memory; `num_shortages` counts those in a row before this one."""
        return self._after(num_shortages + 1, at_most=self.max_shortages)

    def _after(self, number: int, *, at_most: int) -> Restart | GiveUp:
        if number >= at_most:
            return GiveUp(num_quick_deaths=number)
        return Restart(delay_s=self.backoff.delay_s(number), num_quick_deaths=number)
