"""Health of a node: the responses of `/healthz` (liveness probe) and `/readyz` (readiness probe); the status section.

`/healthz` reports only faults that a restart fixes. They are a worker that stays down, a loop that ended, and a loop
with queued work and no progress. It does not report an engine that hangs, because the supervisor restarts it, nor peers
that do not answer. If the event loop is blocked, the daemon does not answer and the probe times out.

The functions are pure: the caller passes states and the time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ftis_node.telemetry.status import HealthStatus, LoopStatus

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.supervision.watchdog import Watchdog
    from ftis_node.node.supervision.worker_status import WorkerReporter

STILL_S = 300.0  # scoring one hostile group, or pruning a full disk, takes a while
WORKER = " worker"  # suffix of supervisor tasks, which end at once if the role has no such worker


class LoopProgress(NamedTuple):
    """Progress of a loop: `done` changes with every item of work, `waiting` is the number of queued items."""

    done: int
    waiting: int


@dataclass(slots=True)
class LoopWatch:
    """Detector of stalled loops: loops with queued work that completed none of it for `still_s` seconds."""

    still_s: float = STILL_S
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def note(self, turns: Mapping[str, LoopProgress], *, now: float) -> list[str]:
        """Note the loops' progress at `now` (s, any steady clock); return a sentence for each stalled loop."""
        problems = []
        for name, turn in turns.items():
            done, since = self._seen.get(name, (turn.done, now))
            if turn.done != done or not turn.waiting:
                since = now
            self._seen[name] = (turn.done, since)
            if now - since >= self.still_s:
                still = f"{turn.waiting} waiting, nothing done for {now - since:.0f} s"
                problems.append(f"the {name} loop hangs: {still}")
        return problems


@dataclass(slots=True)
class RunningLoops:
    """The node's loops for health checks: their tasks, and the progress of loops that report it."""

    turns: Mapping[str, Callable[[], LoopProgress]] = field(default_factory=dict)
    tasks: Sequence[asyncio.Task[None]] = ()
    watch: LoopWatch = field(default_factory=LoopWatch)

    def problems(self, *, now: float) -> list[str]:
        """Return a sentence for each loop that ended by itself or is stalled at `now` (s, a steady clock)."""
        names = [task.get_name() for task in self.tasks if task.done()]
        ended = [f"the {name} loop ended" for name in names if not name.endswith(WORKER)]
        return ended + self.watch.note({name: turn() for name, turn in self.turns.items()}, now=now)


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
