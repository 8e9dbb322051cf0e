"""Looking at a node from outside: what it wrote, what it runs, what it says of itself. Judging is for `invariants/`.

    watch = Watch(node)
    before = watch.look()
    ...                             # a fault, and the node's recovery
    after = watch.look()            # waits a little for what is on its way to settle

A look glances at processes, files and status until nothing is wrong with them or `settle_s` are over, and half as many
times as it could on an idle machine, for on a busy one seconds say little: what is wrong then was so the whole time.
The buffer is read once, between two readings of the trail: what the trail says of a group before that, the buffer must
know.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ftis_node.config.home import Home
from ftis_node.errors import FtisError
from ftis_node.node.http_api.node_client import read_document
from ftis_node.workers.durable import is_complete
from tests.chaos.observing.buffer import read_buffer
from tests.chaos.observing.processes import family_of, leftovers_of, strays_of
from tests.chaos.observing.trail import EventLogMemory, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.chaos.observing.buffer import Buffer
    from tests.chaos.observing.processes import Identity, Process, Watched
    from tests.chaos.observing.trail import Event

SETTLE_S = 5.0  # the status is truthful, and what is dead gone, within so long
LOOK_S = 0.25
COMMAND_S = 60.0
CHECKPOINT_PREFIX = "step-"
DAMAGED_PREFIX = "damaged-"


@dataclass(frozen=True)
class Observation:
    """What was seen of one node. Of `events`, the first `num_settled` were there before the buffer was read.

    `saved`: steps of its complete checkpoints. `set_aside`: those that it found damaged, by name.
    `floor_step`: the step that the trail had come to when the look began; a status that has not, is late.
    """

    node: str
    is_running: bool = True
    events: tuple[Event, ...] = ()
    num_settled: int = 0
    damaged: tuple[str, ...] = ()
    is_torn: bool = False
    buffer: Buffer | None = None
    saved: tuple[int, ...] = (0,)
    set_aside: frozenset[str] = frozenset()
    processes: tuple[Process, ...] = ()
    strays: Mapping[Identity, str] = field(default_factory=dict)
    leftovers: Mapping[tuple[str, int], str] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    command: Mapping[str, Any] = field(default_factory=dict)
    floor_step: int = 0

    @property
    def newest_saved(self) -> int:
        """The step of the newest complete checkpoint, 0 where there is none."""
        return max(self.saved)

    @property
    def ended_in_order(self) -> bool:
        """Whether its last life said that it stopped."""
        return next((event.name for event in reversed(self.events) if event.name in ("start", "stop")), "") == "stop"

    @property
    def has_trail(self) -> bool:
        """Whether it is a node that was started; a meeting point keeps no trail."""
        return any(event.name == "start" for event in self.events)


class Watch:
    """Looks at one node again and again; remembers its trail, its processes and what it has seen."""

    def __init__(self, node: Watched) -> None:
        self.node = node
        self.seen: list[Observation] = []  # without their events and buffers, which the last one has
        self.last: Observation | None = None
        self._trail = EventLogMemory(Home(node.home).events)
        self._former: dict[Identity, Process] = {}

    def look(self, *, unsettled: Callable[[Observation], Sequence[object]], settle_s: float = SETTLE_S) -> Observation:
        """The node now, given `settle_s` for `unsettled` to find nothing wrong with what can be glanced at."""
        self.remember()
        floor, _ = counted(self._trail.events, saved=saved_steps(self.node.home)[-1]).steps
        deadline = time.monotonic() + settle_s
        found = self._glance(floor, None)
        num_glances = 1
        while unsettled(found) and (num_glances < settle_s / LOOK_S / 2 or time.monotonic() < deadline):
            time.sleep(LOOK_S)
            found = self._glance(floor, found)
            num_glances += 1
        found = self._settled(found)
        self.seen.append(replace(found, events=(), buffer=None))
        self.last = found
        return found

    def remember(self) -> None:
        """Reads the trail. For whoever is about to change that file by hand: what is read already is remembered."""
        self._trail.look()

    def _glance(self, floor: int, former: Observation | None) -> Observation:
        """What takes little time. Of what is left over, only what was so at the glance before, too."""
        node = self.node
        family = family_of(node)
        self._former |= {process.identity: process for process in family}
        strays, leftovers = strays_of(node, self._former.values(), family), leftovers_of(node)
        if former is not None:
            strays = {key: words for key, words in strays.items() if key in former.strays}
            leftovers = {key: words for key, words in leftovers.items() if key in former.leftovers}
        document = read_status(node) if self._trail.events else {}
        command = query_status(node.home) if self._trail.events else {}
        self._trail.look()
        return Observation(
            node.name,
            is_running=node.is_running,
            events=tuple(self._trail.events),
            damaged=tuple(self._trail.damaged),
            is_torn=self._trail.is_torn,
            saved=saved_steps(node.home),
            set_aside=frozenset(path.name for path in Home(node.home).checkpoints.glob(f"{DAMAGED_PREFIX}*")),
            processes=family,
            strays=strays,
            leftovers=leftovers,
            status=document,
            command=command,
            floor_step=floor,
        )

    def _settled(self, found: Observation) -> Observation:
        """With the buffer, read between two readings of the trail."""
        self._trail.look()
        num_settled = len(self._trail.events)
        saved, buffer = saved_steps(self.node.home), read_buffer(Home(self.node.home).replay)
        self._trail.look()
        return replace(found, events=tuple(self._trail.events), num_settled=num_settled, saved=saved, buffer=buffer)


_WATCHES: WeakKeyDictionary[Watched, Watch] = WeakKeyDictionary()


def watch_of(node: Watched) -> Watch:
    if node not in _WATCHES:
        _WATCHES[node] = Watch(node)
    return _WATCHES[node]


def saved_steps(home: Path) -> tuple[int, ...]:
    """The steps of the home's complete checkpoints, in order; 0, the model as it came, is always one."""
    folders = [path for path in Home(home).checkpoints.glob(f"{CHECKPOINT_PREFIX}*") if is_complete(path)]
    return (0, *sorted(int(path.name.removeprefix(CHECKPOINT_PREFIX)) for path in folders))


def read_status(node: Watched) -> Mapping[str, Any]:
    """What its HTTP port says, or, where it does not run, its home; `{"error": ...}` where nobody answers."""
    try:
        return dict(read_document(Home(node.home), "/status"))
    except (FtisError, OSError) as error:
        return {"error": str(error)}


def query_status(home: Path) -> Mapping[str, Any]:
    """What `ftis-node status --json` prints; `{"error": ...}` where it fails."""
    command = [sys.executable, "-m", "ftis_node", "status", "--json", "--home", str(home)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=COMMAND_S)
    if done.returncode:
        return {"error": done.stderr.decode(errors="replace").strip()}
    return dict(json.loads(done.stdout))
