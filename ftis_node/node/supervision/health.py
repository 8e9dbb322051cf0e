"""Health of a node: the answers of `/healthz` and `/readyz`, for probes that restart or wait.

`/healthz` reports only what a restart fixes: a worker given up, a loop that ended, or one that has work and makes no
progress. It does not report an engine that hangs, because the supervisors restart it, nor a swarm without answers. A
daemon whose event loop is blocked does not answer, and the time limit of the probe covers that.

Facts in, findings out; the caller gives the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

STILL_S = 300.0  # scoring one hostile group, or pruning a full disk, takes a while
WORKER = " worker"  # ends the names of tasks that only watch over one, and end at once where the role has none


class LoopProgress(NamedTuple):
    """How a loop fares: `done` changes with every piece of work, `waiting` pieces lie in front of it."""

    done: int
    waiting: int


@dataclass(slots=True)
class LoopWatch:
    """Detector of stalled loops: loops that have work and did none of it for `still_s` seconds."""

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
    """The node's loops as health checks see them: their tasks, and the progress of loops that report it."""

    turns: Mapping[str, Callable[[], LoopProgress]] = field(default_factory=dict)
    tasks: Sequence[asyncio.Task[None]] = ()
    watch: LoopWatch = field(default_factory=LoopWatch)

    def problems(self, *, now: float) -> list[str]:
        """Return a sentence for each loop that ended by itself or is stalled at `now` (s, a steady clock)."""
        names = [task.get_name() for task in self.tasks if task.done()]
        ended = [f"the {name} loop ended" for name in names if not name.endswith(WORKER)]
        return ended + self.watch.note({name: turn() for name, turn in self.turns.items()}, now=now)


def worker_problems(states: Mapping[str, str]) -> list[str]:
    """Return a sentence for each worker that will not come back."""
    given_up = [name for name, state in states.items() if state == "failed"]
    return [f"the {name} worker was given up: look into logs/{name}.log" for name in given_up]


def not_ready(states: Mapping[str, str], *, swarm_state: str, swarm_reason: str) -> str:
    """Return why the node cannot contribute yet; "" if it can. The first node of a swarm is ready without any peer."""
    for name, state in states.items():
        if state not in ("ready", "off"):
            return f"the {name} worker is {state}"
    return f"the network is starting: {swarm_reason}" if swarm_state == "starting" else ""
