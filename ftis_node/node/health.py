"""Health and readiness of a node, as its probes see them.

`/healthz` reports only faults that a restart fixes: a worker that stays down and a status loop that hangs. It does not
report an engine that hangs, because the supervisor restarts it, nor peers that do not answer, nor a long step. If the
event loop is blocked, the daemon does not answer and the probe times out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from ftis_node.gossip import SwarmState
from ftis_node.node.supervision.watchdog import Watchdog
from ftis_node.telemetry.status import HealthStatus

STILL_S = 300.0  # pruning a full disk takes a while


def worker_problems(states: Mapping[str, str]) -> list[str]:
    """Return a sentence for each worker that its supervisor no longer restarts."""
    given_up = [name for name, state in states.items() if state == "failed"]
    return [f"the {name} worker was given up: look into logs/{name}.log" for name in given_up]


def not_ready(states: Mapping[str, str], *, swarm_state: str, swarm_reason: str) -> str:
    """Return why the node cannot contribute yet; "" if it can. The first node of a swarm is ready without peers."""
    for name, state in states.items():
        if state == "paused":
            return "the node is paused"
        if state not in ("ready", "off"):
            return f"the {name} worker is {state}"
    return f"the network is starting: {swarm_reason}" if swarm_state == "starting" else ""


def hang_problems(still_s: float) -> list[str]:
    """Return a sentence if the status loop hangs: its last snapshot is `still_s` seconds old."""
    return [f"the status loop hangs: no snapshot for {still_s:.0f} s"] if still_s >= STILL_S else []


def health_of(states: Mapping[str, str], *, swarm: SwarmState, failing: list[str], watchdog: Watchdog) -> HealthStatus:
    """Return the health of a node with these states of its workers. `failing` has a sentence for each failing work."""
    lag_s = watchdog.lag_s
    problems = worker_problems(states)
    waits_for = not_ready(states, swarm_state=str(swarm.state), swarm_reason=swarm.reason)
    return HealthStatus(
        healthy=not problems,
        ready=not waits_for,
        problems=problems,
        failing=failing,
        waits_for=waits_for,
        taken_at=time.time(),
        event_loop_lag_s=round(sum(lag_s) / len(lag_s), 4) if lag_s else None,
        event_loop_lag_longest_s=round(max(lag_s), 4) if lag_s else None,
    )
