"""Health of a node: the responses of `/healthz` (liveness probe) and `/readyz` (readiness probe); the status section.

`/healthz` reports only faults that a restart fixes. They are a worker that stays down and a task that is stuck
(`task_monitor.py`). It does not report an engine that hangs, because the supervisor restarts it, nor peers that do not
answer. If the event loop is blocked, the daemon does not answer and the probe times out.

The functions are pure: the caller passes the states.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ftis_node.telemetry.status import HealthStatus, LoopStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.supervision.watchdog import Watchdog
    from ftis_node.node.supervision.worker_status import WorkerReporter


def worker_problems(states: Mapping[str, str]) -> list[str]:
    """Return a sentence for each worker that its supervisor no longer restarts."""
    given_up = [name for name, state in states.items() if state == "failed"]
    return [f"the {name} worker was given up: look into logs/{name}.log" for name in given_up]


def not_ready(states: Mapping[str, str], *, swarm_state: str, swarm_reason: str) -> str:
    """Return why the node cannot contribute yet; "" if it can. The first node of a swarm is ready without peers."""
    for name, state in states.items():
        if state not in ("ready", "off"):
            return f"the {name} worker is {state}"
    return f"the network is starting: {swarm_reason}" if swarm_state == "starting" else ""


class HealthReporter:
    """Builds the section from the states of workers, network and tasks."""

    def __init__(self, *, workers: WorkerReporter, gossip: Gossip, watchdog: Watchdog) -> None:
        """`watchdog` checks that the loops make progress."""
        self._workers = workers
        self._gossip = gossip
        self._watchdog = watchdog

    @property
    def has_fault(self) -> bool:
        """Return whether the watchdog has found a fault."""
        return self._watchdog.has_fault

    def status(self) -> HealthStatus:
        """Return the section."""
        swarm, states = self._gossip.state, self._workers.states
        problems = [*worker_problems(states), *map(str, self._watchdog.board.stuck())]
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
