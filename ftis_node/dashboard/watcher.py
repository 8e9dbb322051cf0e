"""Repeated snapshot of a node, from its local port or from the files in its home. Blocking; runs in one thread.

    lock file names a running process --no--> STOPPED        values of status.json
                  | yes
    it has published its port ---------no--> STARTING
                  | yes
    the port answers ------------------no--> SILENT          its last values
                  | yes
                  `------------------------> RUNNING

Each snapshot starts from the lock file, so it also finds a node that was restarted. Only the last values are kept.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ftis_node.config.resume import start_command
from ftis_node.dashboard.machine_usage import MachineMeter, running_process
from ftis_node.dashboard.snapshot import NodePhase, NodeSnapshot
from ftis_node.dashboard.view.events import is_notable
from ftis_node.errors import FtisError
from ftis_node.telemetry.history import HistoryFollower
from ftis_node.telemetry.status import Status

if TYPE_CHECKING:
    from ftis_node.config.home import Home

NUM_EVENTS = 1000  # of all events, and as many notable ones


class ReadDocument(Protocol):
    """Function that reads `/status` or `/peers` of a running or stopped node. Raises FtisError if the home has none."""

    def __call__(self, home: Home, path: str) -> Any: ...


class Watcher:
    """Poller of one node. `poll` takes about as long as the node's port needs to reply."""

    def __init__(self, home: Home, read: ReadDocument) -> None:
        self._home = home
        self._read = read
        self._follower = HistoryFollower(home.events, num_last_events=NUM_EVENTS, is_notable=is_notable)
        self._meter = MachineMeter()
        self._last: tuple[Status, tuple[dict[str, Any], ...], float] = (Status(), (), 0.0)

    def poll(self, *, with_history: bool = True) -> NodeSnapshot:
        """Return the current state.

        The first snapshot of a long event log takes seconds; `with_history=False` skips it.
        """
        process = running_process(self._home)
        phase, problem = NodePhase.STOPPED, ""
        if process is not None:
            phase = NodePhase.RUNNING if self._home.running_url() else NodePhase.STARTING
        if phase is not NodePhase.STARTING:
            phase, problem = self._ask(phase)
        if with_history:
            self._follower.poll()
        status, peers, reported_at = self._last
        return NodeSnapshot(
            taken_at=time.time(),
            phase=phase,
            status=status,
            reported_at=reported_at,
            peers=peers,
            history=self._follower.history,
            machine=self._meter.read(self._home, process),
            start_command=status.node.resume or start_command(self._home),
            logs=str(self._home.logs),
            problem=problem,
        )

    def _ask(self, phase: NodePhase) -> tuple[NodePhase, str]:
        """Read the documents and return the phase and the problem. If reading fails, the last documents remain."""
        try:
            status = msgspec.convert(self._read(self._home, "/status"), Status)
            peers = tuple(self._read(self._home, "/peers"))
        except (FtisError, OSError, ValueError) as error:  # ValueError: a half-written or damaged document
            return (NodePhase.SILENT if phase is NodePhase.RUNNING else phase), str(error)
        reported_at = time.time() if phase is NodePhase.RUNNING else self._home.status.stat().st_mtime
        self._last = (status, peers, reported_at)
        return phase, ""
