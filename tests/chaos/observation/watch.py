"""Observes a node from outside: its files, its processes and its status. `invariants/` checks the observations.

An observation polls processes, files and status until they have no problem or `settle_s` are over. On a busy machine it
takes longer, for at least half the polls of an idle one. An orphan or a leftover counts only if every poll found it.
The buffer is read once, between two reads of the event log. It must contain all groups of the first read.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ftis_node.config.home import Home
from ftis_node.errors import FtisError
from ftis_node.node.http_api.node_client import read_document
from ftis_node.workers.durable import is_complete
from tests.chaos.observation.processes import Identity, Process, family_of, leftovers_of, orphans_of
from tests.chaos.observation.records import Buffer, Event, EventLogMemory, effective_history, read_bans, read_buffer
from tests.chaos.swarm import SwarmNode

SETTLE_S = 5.0  # within this time the status is up to date and ended processes are gone
POLL_S = 0.25
CHECKPOINT_PREFIX = "step-"
DAMAGED_PREFIX = "damaged-"


@dataclass(frozen=True)
class Observation:
    """The observed state of one node. The first `num_settled` of `events` were logged before the buffer was read.

    `saved`: steps of the complete checkpoints. `set_aside`: names of the damaged checkpoints that the node set aside.
    `floor_step`: the last logged step at the beginning; a status with a lower step is out of date.
    """

    node: str
    is_running: bool = True
    events: tuple[Event, ...] = ()
    num_settled: int = 0
    damaged: tuple[str, ...] = ()
    is_torn: bool = False
    buffer: Buffer | None = None
    bans: Mapping[str, float] = field(default_factory=dict)  # by peer: the end
    saved: tuple[int, ...] = (0,)
    set_aside: frozenset[str] = frozenset()
    processes: tuple[Process, ...] = ()
    orphans: Mapping[Identity, str] = field(default_factory=dict)
    leftovers: Mapping[tuple[str, int], str] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    floor_step: int = 0

    @property
    def newest_saved(self) -> int:
        """The step of the newest complete checkpoint, or 0."""
        return max(self.saved)

    @property
    def ended_in_order(self) -> bool:
        """Whether the last process of the daemon logged its stop."""
        return next((event.name for event in reversed(self.events) if event.name in ("start", "stop")), "") == "stop"

    @property
    def has_event_log(self) -> bool:
        """Whether the node has started and keeps an event log; a bootstrap node keeps none."""
        return any(event.name == "start" for event in self.events)


class Watch:
    """Observes one node repeatedly; keeps its events, its former processes and all observations."""

    def __init__(self, node: SwarmNode) -> None:
        self.node = node
        self.seen: list[Observation] = []  # without events and buffers, to save memory
        self._event_log = EventLogMemory(Home(node.home).events)
        self._former: dict[Identity, Process] = {}

    def observe(
        self, *, unsettled: Callable[[Observation], Sequence[object]], settle_s: float = SETTLE_S
    ) -> Observation:
        """Observe the node; wait up to `settle_s` until `unsettled` finds no problem."""
        self.read_event_log()
        floor, _ = effective_history(self._event_log.events, saved=saved_steps(self.node.home)[-1]).steps
        deadline = time.monotonic() + settle_s
        found = self._poll(floor, None)
        num_polls = 1
        while unsettled(found) and (num_polls < settle_s / POLL_S / 2 or time.monotonic() < deadline):
            time.sleep(POLL_S)
            found = self._poll(floor, found)
            num_polls += 1
        found = self._with_buffer(found)
        self.seen.append(replace(found, events=(), buffer=None))
        return found

    def read_event_log(self) -> None:
        """Read the event log now. A fault calls it before it changes that file, so that no event is missed."""
        self._event_log.read()

    def _poll(self, floor: int, former: Observation | None) -> Observation:
        """Observe all but the buffer. Leftovers and orphans count only if the former poll found them too."""
        node = self.node
        family = family_of(node)
        self._former |= {process.identity: process for process in family}
        orphans, leftovers = orphans_of(node, self._former.values(), family), leftovers_of(node)
        if former is not None:
            orphans = {key: text for key, text in orphans.items() if key in former.orphans}
            leftovers = {key: text for key, text in leftovers.items() if key in former.leftovers}
        document = read_status(node) if self._event_log.events else {}
        self._event_log.read()
        return Observation(
            node.name,
            is_running=node.is_running,
            events=tuple(self._event_log.events),
            damaged=tuple(self._event_log.damaged),
            is_torn=self._event_log.is_torn,
            saved=saved_steps(node.home),
            set_aside=frozenset(path.name for path in Home(node.home).checkpoints.glob(f"{DAMAGED_PREFIX}*")),
            processes=family,
            orphans=orphans,
            leftovers=leftovers,
            status=document,
            floor_step=floor,
        )

    def _with_buffer(self, found: Observation) -> Observation:
        """Add the buffer, read between two reads of the event log."""
        self._event_log.read()
        num_settled = len(self._event_log.events)
        saved, buffer = saved_steps(self.node.home), read_buffer(Home(self.node.home).replay)
        self._event_log.read()
        events, bans = tuple(self._event_log.events), read_bans(Home(self.node.home).peers)
        return replace(found, events=events, num_settled=num_settled, saved=saved, buffer=buffer, bans=bans)


@cache
def watch_of(node: SwarmNode) -> Watch:
    """Return the only watch of this node."""
    return Watch(node)


def saved_steps(home: Path) -> tuple[int, ...]:
    """Return the steps of the complete checkpoints in order, with 0 for the initial model."""
    folders = [path for path in Home(home).checkpoints.glob(f"{CHECKPOINT_PREFIX}*") if is_complete(path)]
    return (0, *sorted(int(path.name.removeprefix(CHECKPOINT_PREFIX)) for path in folders))


def read_status(node: SwarmNode) -> Mapping[str, Any]:
    """Return `/status`, from the home if the node does not run; `{"error": ...}` if there is no answer."""
    try:
        return dict(read_document(Home(node.home), "/status"))
    except (FtisError, OSError) as error:
        return {"error": str(error)}
