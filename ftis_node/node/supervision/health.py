"""Does the node turn, and can it contribute? What `/healthz` and `/readyz` answer, for probes that restart or wait.

`/healthz` is about what only a new start mends: a worker given up, a loop that ended, or one that has work and gets
nowhere. An engine that hangs is not its business, for the supervisors restart it; nor is a swarm that nobody answers
in. A daemon whose event loop is blocked answers nothing at all, and a probe's own time limit says the rest.

Facts in, findings out; the clock is the caller's.
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
    """Finds loops that stand still: work in front of them, and nothing done for `still_s` seconds."""

    still_s: float = STILL_S
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def note(self, turns: Mapping[str, LoopProgress], *, now: float) -> list[str]:
        """Takes in how the loops fare at `now` (seconds of any steady clock); a sentence for each that stands still."""
        problems = []
        for name, turn in turns.items():
            done, since = self._seen.get(name, (turn.done, now))
            if turn.done != done or not turn.waiting:
                since = now
            self._seen[name] = (turn.done, since)
            if now - since >= self.still_s:
                still = f"{turn.waiting} waiting, nothing done for {now - since:.0f} s"
                problems.append(f"the {name} loop stands still: {still}")
        return problems


@dataclass(slots=True)
class RunningLoops:
    """The node's loops as their health is seen: their tasks, and the turns of those that tell."""

    turns: Mapping[str, Callable[[], LoopProgress]] = field(default_factory=dict)
    tasks: Sequence[asyncio.Task[None]] = ()
    watch: LoopWatch = field(default_factory=LoopWatch)

    def problems(self, *, now: float) -> list[str]:
        """A sentence for each loop that ended by itself, or stands still at `now` (seconds of a steady clock)."""
        names = [task.get_name() for task in self.tasks if task.done()]
        ended = [f"the {name} loop ended" for name in names if not name.endswith(WORKER)]
        return ended + self.watch.note({name: turn() for name, turn in self.turns.items()}, now=now)


def worker_problems(states: Mapping[str, str]) -> list[str]:
    """A sentence for each worker that will not come back."""
    given_up = [name for name, state in states.items() if state == "failed"]
    return [f"the {name} worker was given up: look into logs/{name}.log" for name in given_up]


def not_ready(states: Mapping[str, str], *, swarm_state: str, swarm_reason: str) -> str:
    """Why the node cannot contribute yet; "" where it can. The first node of a swarm is ready without any peer."""
    for name, state in states.items():
        if state not in ("ready", "off"):
            return f"the {name} worker is {state}"
    return f"the network is starting: {swarm_reason}" if swarm_state == "starting" else ""
