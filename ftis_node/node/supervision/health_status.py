"""The status section `health`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ftis_node.node.supervision.health import RunningLoops, not_ready, worker_problems
from ftis_node.telemetry.status import HealthStatus, LoopStatus

if TYPE_CHECKING:
    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.supervision.watchdog import Watchdog
    from ftis_node.node.supervision.worker_status import WorkerReporter


class HealthReporter:
    """Builds the section from the states of workers, network and loops."""

    def __init__(
        self, *, workers: WorkerReporter, gossip: Gossip, watchdog: Watchdog, loops: RunningLoops | None = None
    ) -> None:
        """`loops` are the loops whose health the section reports. `watchdog` checks that they make progress."""
        self._workers = workers
        self._gossip = gossip
        self._watchdog = watchdog
        self._loops = loops or RunningLoops()

    @property
    def has_fault(self) -> bool:
        """Return whether the watchdog has found a fault."""
        return self._watchdog.has_fault

    def status(self) -> HealthStatus:
        """Return the section."""
        swarm, states = self._gossip.state, self._workers.states
        problems = worker_problems(states) + self._loops.problems(now=time.monotonic())
        problems += map(str, self._watchdog.board.stuck())
        waits_for = not_ready(states, swarm_state=str(swarm.state), swarm_reason=swarm.reason)
        return HealthStatus(
            healthy=not problems,
            ready=not waits_for,
            problems=problems,
            waits_for=waits_for,
            taken_at=time.time(),
            event_loop_lag_s=_rounded(self._watchdog.lag.mean_s),
            event_loop_lag_longest_s=_rounded(self._watchdog.lag.longest_s),
            loops=[
                LoopStatus(name=name, waits_for=strand.waits_for, for_s=round(for_s, 1))
                for name, strand, for_s in self._watchdog.board.strands()
            ],
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
