"""The status loop: takes a snapshot of all gauges once a second, for the local HTTP port and `status.json`.

The sections on the workers and the health of the node are here. `/healthz` reports only faults that a restart fixes.
They are a worker that stays down and a task that is stuck (`task_monitor.py`). It does not report an engine that hangs,
because the supervisor restarts it, nor peers that do not answer. If the event loop is blocked, the daemon does not
answer and the probe times out.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ftis_node import __version__
from ftis_node.files import replace_file
from ftis_node.node.supervision.process_limits import FileShortage, num_open_files, open_files
from ftis_node.node.supervision.task_monitor import pause
from ftis_node.telemetry.status import (
    EndWord,
    GenerationStatus,
    HealthStatus,
    LearnerStatus,
    LimitsStatus,
    LoopStatus,
    ModelStatus,
    NodeStatus,
    RunStatus,
    Status,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Collection, Mapping

    from ftis_node.config.home import Home
    from ftis_node.gossip import Gossip
    from ftis_node.node.context import NodeContext, NodeCounters, NodeDescription
    from ftis_node.node.peers.swarm_status import PeerTable, SwarmReporter
    from ftis_node.node.protocols import Generation, Learning
    from ftis_node.node.storage.disk_space import DiskSpace
    from ftis_node.node.supervision.background import DiskThread
    from ftis_node.node.supervision.watchdog import Watchdog
    from ftis_node.node.training.evaluation import EvaluationHistory
    from ftis_node.node.training.group_limits import BufferReporter
    from ftis_node.replay.reader import BufferFigures

PERIOD_S = 1.0
PERIODS_PER_SAVE = 5
STILL_S = 300.0  # pruning a full disk takes a while
STEP_FIGURES = (
    *("loss", "reward_mean", "kept_fraction", "truncated_fraction", "mean_kl", "grad_norm", "tokens_per_s"),
    *("micro_batch_tokens", "out_of_memory", "learning_rate", "kl_to_start"),
)
MISMATCH_FIGURES = ("mismatch_kl", "mismatch_share", "mismatch_version")


@dataclass(slots=True)
class LastChange:
    """Time of a count's last change in Unix seconds; None before a change. The first value is no change."""

    at: float | None = None
    _value: int | None = None

    def note(self, value: int) -> None:
        if self._value is not None and value != self._value:
            self.at = round(time.time(), 3)
        self._value = value


@dataclass(kw_only=True, eq=False, repr=False)
class WorkerReporter:
    """Builds the sections from the workers' clients and the report of the newest step."""

    context: NodeContext
    about: NodeDescription
    generation: Generation
    learner: Learning
    counters: NodeCounters
    _groups_made: LastChange = field(default_factory=LastChange, init=False)
    _step: LastChange = field(default_factory=LastChange, init=False)

    @property
    def states(self) -> dict[str, str]:
        return {"generation": str(self.generation.state), "learner": str(self.learner.worker_state)}

    def note(self, counts: BufferFigures) -> None:
        """Note the times of the last group and the last step, when their counts change."""
        self._groups_made.note(counts.groups_own)
        self._step.note(self.context.state.step)

    def model_status(self) -> ModelStatus:
        learner = self.learner.state
        return ModelStatus(
            name=self.about.model,
            parameters=learner.parameters if learner else 0,
            trainable_parameters=learner.trainable_parameters if learner else 0,
            tokenizer_fingerprint=self.about.tokenizer,
            policy_version=self.context.state.policy_version,
            training=self.about.training,
        )

    def generation_status(self, counts: BufferFigures) -> GenerationStatus:
        client = self.generation
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

    def learner_status(self, counts: BufferFigures) -> LearnerStatus:
        """Return the learner's section, with the report of its newest step."""
        client, counters = self.learner, self.counters
        fields: dict[str, Any] = {}
        if report := counters.last_report:
            fields |= {name: getattr(report, name) for name in STEP_FIGURES}
        if measured := counters.mismatch_report:
            fields |= {name: getattr(measured, name) for name in MISMATCH_FIGURES}
        return LearnerStatus(
            state=str(client.worker_state),
            step=self.context.state.step,
            own_groups=counts.trained_own,
            foreign_groups=counts.trained_foreign,
            restarts=client.restarts,
            last_step_at=self._step.at,
            layout=client.state.layout if client.state else None,
            kernels=client.state.kernels if client.state else None,
            **fields,
        )


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


@dataclass(kw_only=True, eq=False, repr=False)
class HealthReporter:
    """Builds the section from the states of workers, network and tasks.

    `watchdog` checks that the loops make progress.
    """

    workers: WorkerReporter
    gossip: Gossip
    watchdog: Watchdog

    @property
    def has_fault(self) -> bool:
        return self.watchdog.has_fault

    def status(self) -> HealthStatus:
        swarm, states = self.gossip.state, self.workers.states
        problems = [*worker_problems(states), *map(str, self.watchdog.board.stuck())]
        waits_for = not_ready(states, swarm_state=str(swarm.state), swarm_reason=swarm.reason)
        return HealthStatus(
            healthy=not problems,
            ready=not waits_for,
            problems=problems,
            waits_for=waits_for,
            taken_at=time.time(),
            event_loop_lag_s=_rounded(self.watchdog.lag.mean_s),
            event_loop_lag_longest_s=_rounded(self.watchdog.lag.longest_s),
            loops=[
                LoopStatus(name=name, waits_for=state.waits_for, for_s=round(for_s, 1))
                for name, state, for_s in self.watchdog.board.states()
            ],
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


@dataclass(kw_only=True, eq=False, repr=False)
class StatusLoop:
    """Loop that takes the snapshots. All views show `latest`; `first` is the snapshot at the start.

    `http_refused` counts the requests that the HTTP ports refused, by reason.
    """

    context: NodeContext
    about: NodeDescription
    home: Home
    workers: WorkerReporter
    health: HealthReporter
    gossip: Gossip
    swarm: SwarmReporter
    peer_table: PeerTable
    buffer: BufferReporter
    space: DiskSpace
    disk: DiskThread
    evaluations: EvaluationHistory
    http_refused: Counter[str]

    def __post_init__(self) -> None:
        self._started_at = self._refreshed_at = time.monotonic()
        self._members: Collection[str] = ()
        self._shortage = FileShortage()
        self._stop_waits_for: Callable[[], str] | None = None  # None: the node is not stopping
        self.latest = Status()
        self.first: Status | None = None

    async def run(self) -> None:
        while True:
            for _ in range(PERIODS_PER_SAVE):
                await self._shortage.passed_over(self.refresh)
                await pause(PERIOD_S)
            await self._shortage.passed_over(partial(self.disk, self.save))

    async def show_stop(self, waits_for: Callable[[], str]) -> None:
        """Show the node as stopping, with what it waits for, until canceled. `run` may have ended."""
        self._stop_waits_for = waits_for
        while True:
            await self._shortage.passed_over(self.refresh)
            await pause(PERIOD_S)

    async def refresh(self, *, end: EndWord | None = None) -> Status:
        """Take a new snapshot. `end` is how the node ended; a fault takes precedence over the signal that it causes."""
        self._members = await self.gossip.members()
        counts = await self.buffer.counts()
        self.workers.note(counts)
        state = "stopped" if end is not None else "running" if self._stop_waits_for is None else "stopping"
        before, now = self.latest.swarm, self._snapshot(state, counts)
        if state == "stopped":  # the network is already down, so keep its state from before
            swarm = msgspec.structs.replace(now.swarm, state=before.state, reason=before.reason)
            end = EndWord.FAILED if self.health.has_fault else end
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
        document |= {"peers": self.peer_table.rows(), "swarm_view": [self.peer_table.swarm().as_dict()]}
        replace_file(self.home.status, json.dumps(document, indent=1).encode())

    def _snapshot(self, state: str, counts: BufferFigures) -> Status:
        return Status(
            node=NodeStatus(
                peer_id=self.context.peer_id,
                name=self.about.name,
                version=__version__,
                role=self.context.settings.role,
                state=state,
                uptime_s=round(time.monotonic() - self._started_at, 1),
                addresses=self.gossip.addresses,
                domain=self.about.domain,
            ),
            run=RunStatus(
                id=self.context.manifest.run_id,
                name=self.context.manifest.name,
                method=self.context.manifest.method.name,
                task=self.context.manifest.task,
            ),
            model=self.workers.model_status(),
            generation=self.workers.generation_status(counts),
            learner=self.workers.learner_status(counts),
            swarm=self.swarm.status(members=self._members),
            replay=self.buffer.status(counts),
            limits=self._limits(counts),
            budget=self.buffer.budget(counts),
            eval=list(self.evaluations.entries),
            health=self.health.status(),
        )

    def _limits(self, counts: BufferFigures) -> LimitsStatus:
        space, buffer = self.space, self.context.settings.buffer
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
