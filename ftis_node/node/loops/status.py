"""The status loop: gauges become a snapshot, once a second, for the local HTTP port and for the home's file.

consumes: the figures of all parts     produces: the snapshot, `status.json`
waits for: the clock                   unblocked by: time
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ftis_node import __version__
from ftis_node.config.disk_room import replace_file
from ftis_node.node.supervision.health import STILL_S, RunningLoops, not_ready, worker_problems
from ftis_node.node.supervision.last_change import LastChange
from ftis_node.node.supervision.process_limits import FileShortage, num_open_files, open_files
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.node.supervision.watchdog import Watchdog
from ftis_node.replay.reader import ReplayReader
from ftis_node.telemetry.status import (
    BudgetStatus,
    EndWord,
    GenerationStatus,
    HealthStatus,
    LearnerStatus,
    LimitsStatus,
    LoopStatus,
    ModelStatus,
    NodeStatus,
    ReplayStatus,
    RunStatus,
    Status,
    amount,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from ftis_node.config.home import Home
    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.context import NodeContext, NodeDescription
    from ftis_node.node.peers.swarm_status import SwarmReporter
    from ftis_node.node.peers.table import PeerTable
    from ftis_node.node.protocols import Generation, Learning
    from ftis_node.node.state import NodeCounters
    from ftis_node.node.storage.disk_space import DiskSpace
    from ftis_node.node.supervision.disk_thread import Disk
    from ftis_node.node.training.evaluation import EvaluationHistory
    from ftis_node.node.training.slots import SlotPool
    from ftis_node.replay.reader import BufferFigures

PERIOD_S = 1.0
PERIODS_PER_SAVE = 5
STEP_FIGURES = (
    *("loss", "reward_mean", "kept_fraction", "truncated_fraction", "mean_kl", "grad_norm", "tokens_per_s"),
    *("micro_batch_tokens", "out_of_memory"),
)
OPTIMIZER_FIGURES = ("learning_rate", "kl_to_start")
MISMATCH_FIGURES = ("mismatch_kl", "mismatch_share", "mismatch_version")


class StatusLoop:
    """Snapshots of the node; `latest` is what all views show, `first` the one of its start."""

    def __init__(
        self,
        *,
        context: NodeContext,
        about: NodeDescription,
        home: Home,
        generation: Generation,
        learner: Learning,
        gossip: Gossip,
        swarm: SwarmReporter,
        peer_table: PeerTable,
        slots: SlotPool,
        space: DiskSpace,
        reader: ReplayReader,
        disk: Disk,
        counters: NodeCounters,
        evaluations: EvaluationHistory,
        loops: RunningLoops | None = None,
        watchdog: Watchdog | None = None,
        http_refused: Counter[str] | None = None,
    ) -> None:
        """Build the loop. `loops` are those whose health the snapshot reports. `watchdog` checks that they turn.

        `http_refused` counts the requests that the HTTP ports refused, by reason.
        """
        self._context = context
        self._about = about
        self._home = home
        self._generation = generation
        self._learner = learner
        self._gossip = gossip
        self._swarm = swarm
        self._peer_table = peer_table
        self._slots = slots
        self._space = space
        self._reader = reader
        self._disk = disk
        self._counters = counters
        self._evaluations = evaluations
        self._loops = loops or RunningLoops()
        self._watchdog = watchdog or Watchdog(self._context.settings.observe)
        self._groups_made, self._step = LastChange(), LastChange()
        self._started_at = self._refreshed_at = time.monotonic()
        self._members: Collection[str] = ()
        self._shortage = FileShortage()
        self.http_refused: Counter[str] = Counter() if http_refused is None else http_refused
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

    async def refresh(self, *, state: str = "running", end: EndWord | None = None) -> Status:
        """Take a new snapshot. `end` says how the node ended; a fault outweighs the signal that it causes."""
        self._members = await self._gossip.members()
        counts = await self._disk(self._count)
        self._groups_made.note(counts.groups_own)
        self._step.note(self._context.state.step)
        before, now = self.latest.swarm, self._snapshot(state, counts)
        if state == "stopped":  # the network is down by now; what it was before says more
            swarm = msgspec.structs.replace(now.swarm, state=before.state, reason=before.reason)
            end = EndWord.FAILED if self._watchdog.has_fault else end
            node = msgspec.structs.replace(now.node, end="" if end is None else end.value)
            now = msgspec.structs.replace(now, swarm=swarm, node=node)
        self.latest = now
        self.first = self.first or now
        self._refreshed_at = time.monotonic()
        return self.latest

    @property
    def problems(self) -> list[str]:
        """Return a sentence for each problem that only a restart fixes, as of the latest snapshot unless too old."""
        still_s = time.monotonic() - self._refreshed_at
        still = [f"the status loop hangs: no snapshot for {still_s:.0f} s"] if still_s >= STILL_S else []
        return still + self.latest.health.problems

    def _count(self) -> BufferFigures:
        """Count over the whole buffer: it is slow, so it runs in the disk thread, on a separate connection."""
        reader = ReplayReader(self._home.replay)
        try:
            return reader.figures()
        finally:
            reader.close()

    def save(self) -> None:
        """Write the snapshot and the peer table into the home, for use after the node stops."""
        document = json.loads(self.latest.to_json()) | {"peers": self._peer_table.rows()}
        replace_file(self._home.status, json.dumps(document, indent=1).encode())

    def _snapshot(self, state: str, counts: BufferFigures) -> Status:
        learner = self._learner.state
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
            model=ModelStatus(
                name=self._about.model,
                parameters=learner.parameters if learner else 0,
                trainable_parameters=learner.trainable_parameters if learner else 0,
                tokenizer_fingerprint=self._about.tokenizer,
                policy_version=self._context.state.policy_version,
                training=self._about.training,
            ),
            generation=self._generation_status(counts),
            learner=self._learner_status(counts),
            swarm=self._swarm.status(members=self._members),
            replay=ReplayStatus(
                waiting=self._slots.waiting,
                ready=counts.ready,
                taken=counts.taken,
                released=counts.released,
                tokens=counts.tokens,
                disk_bytes=counts.disk_bytes,
            ),
            limits=self._limits(counts),
            budget=self._budget(counts),
            eval=list(self._evaluations.entries),
            health=self._health(),
        )

    def _health(self) -> HealthStatus:
        swarm = self._gossip.state
        states = {"generation": str(self._generation.state), "learner": str(self._learner.worker_state)}
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

    def _budget(self, counts: BufferFigures) -> BudgetStatus:
        limits = self._context.settings.budget
        return BudgetStatus(
            generate_tokens=amount(counts.tokens_own, limits.generate_tokens),
            learn_steps=amount(self._context.state.step, limits.learn_steps),
            learn_tokens=amount(self._reader.trained_tokens(), limits.learn_tokens),
        )

    def _generation_status(self, counts: BufferFigures) -> GenerationStatus:
        client = self._generation
        return GenerationStatus(
            engine=client.engine,
            state=str(client.state),
            tokens_per_s=round(client.tokens_per_s, 1),
            groups_made=counts.groups_own,
            tokens_made=counts.tokens_own,
            restarts=client.restarts,
            policy_version=client.policy_version,
            hand_over=client.hand_over,
            last_group_at=self._groups_made.at,
        )

    def _learner_status(self, counts: BufferFigures) -> LearnerStatus:
        client, counters = self._learner, self._counters
        fields: dict[str, Any] = {}
        if report := counters.last_report:
            fields |= {name: getattr(report, name) for name in (*STEP_FIGURES, *OPTIMIZER_FIGURES)}
        if measured := counters.mismatch_report:
            fields |= {name: getattr(measured, name) for name in MISMATCH_FIGURES}
        return LearnerStatus(
            state=str(client.worker_state),
            step=self._context.state.step,
            own_groups=counts.trained_own,
            foreign_groups=counts.trained_foreign,
            restarts=client.restarts,
            last_step_at=self._step.at,
            layout=client.state.layout if client.state else None,
            kernels=client.state.kernels if client.state else None,
            **fields,
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
