"""The status loop: takes a snapshot of all gauges once a second, for the local HTTP port and `status.json`.

consumes: gauges of all components     produces: the snapshot, `status.json`
waits for: the clock                   unblocked by: time
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ftis_node import __version__
from ftis_node.config.disk_room import replace_file
from ftis_node.node.supervision.process_limits import FileShortage, num_open_files, open_files
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.telemetry.status import EndWord, LimitsStatus, NodeStatus, RunStatus, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ftis_node.config.home import Home
    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.context import NodeContext, NodeDescription
    from ftis_node.node.peers.swarm_status import PeerTable, SwarmReporter
    from ftis_node.node.storage.usage import DiskSpace
    from ftis_node.node.supervision.background import DiskThread
    from ftis_node.node.supervision.worker_status import HealthReporter, WorkerReporter
    from ftis_node.node.training.evaluation import EvaluationHistory
    from ftis_node.node.training.group_limits import BufferReporter
    from ftis_node.replay.reader import BufferFigures

PERIOD_S = 1.0
PERIODS_PER_SAVE = 5
STILL_S = 300.0  # pruning a full disk takes a while


class StatusLoop:
    """Loop that takes the snapshots. All views show `latest`; `first` is the snapshot at the start."""

    def __init__(
        self,
        *,
        context: NodeContext,
        about: NodeDescription,
        home: Home,
        workers: WorkerReporter,
        health: HealthReporter,
        gossip: Gossip,
        swarm: SwarmReporter,
        peer_table: PeerTable,
        buffer: BufferReporter,
        space: DiskSpace,
        disk: DiskThread,
        evaluations: EvaluationHistory,
        http_refused: Counter[str] | None = None,
    ) -> None:
        """`http_refused` counts the requests that the HTTP ports refused, by reason."""
        self._context = context
        self._about = about
        self._home = home
        self._workers = workers
        self._health = health
        self._gossip = gossip
        self._swarm = swarm
        self._peer_table = peer_table
        self._buffer = buffer
        self._space = space
        self._disk = disk
        self._evaluations = evaluations
        self._started_at = self._refreshed_at = time.monotonic()
        self._members: Collection[str] = ()
        self._shortage = FileShortage()
        self.http_refused: Counter[str] = Counter() if http_refused is None else http_refused
        self._stop_waits_for: Callable[[], str] | None = None  # None: the node is not stopping
        self.latest = Status()
        self.first: Status | None = None

    async def run(self) -> None:
        """Run until canceled."""
        while True:
            for _ in range(PERIODS_PER_SAVE):
                await self._shortage.passed_over(self.refresh)
                with waiting_for("the clock"):
                    await asyncio.sleep(PERIOD_S)
            await self._shortage.passed_over(partial(self._disk, self.save))

    async def show_stop(self, waits_for: Callable[[], str]) -> None:
        """Show the node as stopping, with what it waits for, until canceled. `run` may have ended."""
        self._stop_waits_for = waits_for
        while True:
            await self._shortage.passed_over(self.refresh)
            await asyncio.sleep(PERIOD_S)

    async def refresh(self, *, end: EndWord | None = None) -> Status:
        """Take a new snapshot. `end` is how the node ended; a fault takes precedence over the signal that it causes."""
        self._members = await self._gossip.members()
        counts = await self._buffer.counts()
        self._workers.note(counts)
        state = "stopped" if end is not None else "running" if self._stop_waits_for is None else "stopping"
        before, now = self.latest.swarm, self._snapshot(state, counts)
        if state == "stopped":  # the network is already down, so keep its state from before
            swarm = msgspec.structs.replace(now.swarm, state=before.state, reason=before.reason)
            end = EndWord.FAILED if self._health.has_fault else end
            node = msgspec.structs.replace(now.node, end="" if end is None else end.value)
            now = msgspec.structs.replace(now, swarm=swarm, node=node)
        elif self._stop_waits_for is not None:
            node = msgspec.structs.replace(now.node, waits_for=self._stop_waits_for())
            health = msgspec.structs.replace(now.health, ready=False, waits_for="the node is stopping")
            now = msgspec.structs.replace(now, node=node, health=health)
        self.latest = now
        self.first = self.first or now
        self._refreshed_at = time.monotonic()
        return self.latest

    @property
    def problems(self) -> list[str]:
        """Return a sentence for each problem that only a restart fixes, from the latest snapshot unless too old."""
        still_s = time.monotonic() - self._refreshed_at
        still = [f"the status loop hangs: no snapshot for {still_s:.0f} s"] if still_s >= STILL_S else []
        return still + self.latest.health.problems

    def save(self) -> None:
        """Write the snapshot and the peer table into the home, for use after the node stops."""
        document = json.loads(self.latest.to_json())
        document |= {"peers": self._peer_table.rows(), "swarm_view": [self._peer_table.swarm().as_dict()]}
        replace_file(self._home.status, json.dumps(document, indent=1).encode())

    def _snapshot(self, state: str, counts: BufferFigures) -> Status:
        return Status(
            node=NodeStatus(
                peer_id=self._context.identity.peer_id,
                name=self._about.name,
                version=__version__,
                role=self._context.settings.role,
                state=state,
                uptime_s=round(time.monotonic() - self._started_at, 1),
                addresses=self._gossip.addresses,
                domain=self._about.domain,
            ),
            run=RunStatus(
                id=self._context.manifest.run_id,
                name=self._context.manifest.name,
                method=self._context.manifest.method.name,
                task=self._context.manifest.task,
            ),
            model=self._workers.model(),
            generation=self._workers.generation(counts),
            learner=self._workers.learner(counts),
            swarm=self._swarm.status(members=self._members),
            replay=self._buffer.status(counts),
            limits=self._limits(counts),
            budget=self._buffer.budget(counts),
            eval=list(self._evaluations.entries),
            health=self._health.status(),
        )

    def _limits(self, counts: BufferFigures) -> LimitsStatus:
        space, buffer = self._space, self._context.settings.buffer
        return LimitsStatus(
            paused=space.why_full,
            home_bytes=space.use.used_bytes if space.use else None,
            home_limit_bytes=space.limit.limit_bytes,
            disk_free_bytes=space.use.free_bytes if space.use else None,
            buffer_bytes=counts.envelope_bytes,
            buffer_limit_bytes=buffer.max_disk_bytes,
            ready_bytes=counts.ready_foreign_bytes,
            ready_limit_bytes=buffer.max_ready_bytes,
            open_files=num_open_files(),
            open_files_limit=open_files().soft,
            out_of_files=self._shortage.count,
            http_refused=dict(self.http_refused),
        )
