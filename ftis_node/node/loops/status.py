"""The status loop: takes a snapshot of all gauges once a second, for the local HTTP port and `status.json`.

`/healthz` reports only faults that a restart fixes: a worker that stays down and a status loop that hangs. It does not
report an engine that hangs, because the supervisor restarts it, nor peers that do not answer, nor a long step. If the
event loop is blocked, the daemon does not answer and the probe times out.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from ftis_node import __version__
from ftis_node.config.limits import MAX_READY_BYTES
from ftis_node.files import is_disk_full, replace_file
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.swarm_reporter import SwarmReporter
from ftis_node.node.supervision.process_limits import num_open_files, open_files, skip_without_files
from ftis_node.node.supervision.shutdown import stop_waits_for
from ftis_node.node.supervision.watchdog import Watchdog
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.worker_interfaces import Generation, Learning
from ftis_node.replay.reader import BufferFigures, ReplayReader
from ftis_node.telemetry.log import RateLimitedLog
from ftis_node.telemetry.status import (
    BudgetStatus,
    EndWord,
    GenerationStatus,
    HealthStatus,
    LearnerStatus,
    LimitsStatus,
    ModelStatus,
    NodeStatus,
    ReplayStatus,
    RunStatus,
    Status,
    StepFigures,
    amount,
)

PERIOD_S = 1.0
PERIODS_PER_SAVE = 5
STILL_S = 300.0  # pruning a full disk takes a while
DRIFT_FIGURES = ("kl_to_start", "kl_from_start")
SHARES = ("cut_fraction", "no_signal_fraction")
MISMATCH_FIGURES = ("mismatch_kl", "mismatch_share", "mismatch_version")


@dataclass(eq=False, repr=False)
class StatusLoop(NodePart):
    """Loop that takes the snapshots. All views show `latest`; `first` is the snapshot at the start.

    `watchdog` measures the lag of the event loop. `http_refused` counts the requests that the HTTP ports refused, by
    reason.
    """

    generation: Generation
    learner: Learning
    swarm: SwarmReporter
    slots: SlotPool
    watchdog: Watchdog
    http_refused: Counter[str]

    def __post_init__(self) -> None:
        self._started_at = self._refreshed_at = time.monotonic()
        self._members: Collection[str] = ()
        self._shortage = RateLimitedLog()
        self._counts: dict[str, int] = {}
        self._changed_at: dict[str, float] = {}  # Unix time (s) of a count's last change since the start
        self._is_stopping, self._stop_waits_for = asyncio.Event(), ""
        self.latest = Status()
        self.first: Status | None = None

    async def run(self) -> None:
        while True:
            for _ in range(PERIODS_PER_SAVE):
                await skip_without_files(self.refresh, self._shortage)
                await asyncio.sleep(PERIOD_S)
            await skip_without_files(self.save_if_space, self._shortage)

    async def begin_stop(self, waits_for: str = "") -> None:
        """Show the node as stopping from now on, waiting for `waits_for` unless the learner reports another reason."""
        self._stop_waits_for = waits_for
        self._is_stopping.set()

    async def show_stop(self) -> None:
        """Take snapshots of a stop until canceled. `run` ends with the other loops."""
        await self._is_stopping.wait()
        while True:
            await skip_without_files(self.refresh, self._shortage)
            await asyncio.sleep(PERIOD_S)

    async def refresh(self, *, end: EndWord | None = None) -> Status:
        """Take a new snapshot. `end` is how the node ended; a fault takes precedence over the signal that it causes."""
        self._members = await self.gossip.members()
        counts = await self.store.disk(self._count)
        for name, count in (("groups", counts.groups_own), ("step", self.context.state.step)):
            if self._counts.get(name, count) != count:
                self._changed_at[name] = round(time.time(), 3)
            self._counts[name] = count
        state = "stopped" if end is not None else "stopping" if self._is_stopping.is_set() else "running"
        before, now = self.latest.swarm, self._snapshot(state, counts)
        if state == "stopped":  # the network is already down, so keep its state from before
            swarm = msgspec.structs.replace(now.swarm, state=before.state, reason=before.reason)
            end = EndWord.FAILED if self.watchdog.has_fault else end
            node = msgspec.structs.replace(now.node, end="" if end is None else end.value)
            now = msgspec.structs.replace(now, swarm=swarm, node=node)
        elif state == "stopping":
            node = msgspec.structs.replace(now.node, waits_for=stop_waits_for() or self._stop_waits_for)
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
        hangs = [f"the status loop hangs: no snapshot for {still_s:.0f} s"] if still_s >= STILL_S else []
        return hangs + self.latest.health.problems

    async def save_if_space(self) -> None:
        """Call `save` in the disk thread, except on a full disk."""
        try:
            await self.store.disk.once(self.save)
        except OSError as error:
            if not is_disk_full(error, self.store.home.root):
                raise

    def save(self) -> None:
        """Write the snapshot and the peer table into the home, for use after the node stops."""
        document = json.loads(self.latest.to_json())
        document |= {"peers": self.swarm.rows(), "swarm_view": [self.swarm.view().as_dict()]}
        replace_file(self.store.home.status, json.dumps(document, indent=1).encode())

    def _count(self) -> BufferFigures:
        """Count over the whole buffer. This is slow, so it runs in the disk thread, on a separate connection."""
        with closing(ReplayReader(self.store.home.replay)) as reader:
            return reader.figures()

    def _snapshot(self, state: str, counts: BufferFigures) -> Status:
        learner, client, budget = self.learner.state, self.generation, self.context.settings.budget
        return Status(
            node=NodeStatus(
                peer_id=self.context.peer_id,
                name=self.context.about.name,
                version=__version__,
                role=self.context.settings.role,
                state=state,
                uptime_s=round(time.monotonic() - self._started_at, 1),
                addresses=self.gossip.addresses,
                domain=self.context.about.domain,
            ),
            run=RunStatus(
                id=self.context.manifest.run_id,
                name=self.context.manifest.name,
                method=self.context.manifest.method.name,
                task=self.context.manifest.task,
            ),
            model=ModelStatus(
                name=self.context.about.model,
                parameters=learner.parameters if learner else 0,
                trainable_parameters=learner.trainable_parameters if learner else 0,
                tokenizer_fingerprint=self.context.about.tokenizer,
                policy_version=self.context.state.policy_version,
                training=self.context.about.training,
            ),
            generation=GenerationStatus(
                engine=client.engine,
                state=str(client.worker_state),
                tokens_per_s=round(client.tokens_per_s, 1),
                groups_made=counts.groups_own,
                tokens_made=counts.tokens_own,
                restarts=client.restarts,
                policy_version=client.policy_version,
                weight_transfer=client.weight_transfer,
                max_completion_tokens=self.context.manifest.sampling.max_completion_tokens,
                groups_without_reward=self.context.state.groups_without_reward,
                sample=self.context.state.sample,
                last_group_at=self._changed_at.get("groups"),
                turns_made=self.context.counters.turns_made["num_turns"],
                observations_made=self.context.counters.turns_made["num_observations"],
            ),
            learner=self._learner_status(counts),
            swarm=self.swarm.status(members=self._members),
            replay=ReplayStatus(
                waiting=self.slots.in_generation,
                ready=counts.ready,
                taken=counts.taken,
                released=counts.released,
                tokens=counts.tokens,
                disk_bytes=counts.disk_bytes,
            ),
            limits=self._limits(counts),
            budget=BudgetStatus(
                generate_tokens=amount(counts.tokens_own, budget.generate_tokens),
                learn_steps=amount(self.context.state.step, budget.learn_steps),
                learn_tokens=amount(counts.trained_tokens, budget.learn_tokens),
            ),
            eval=list(self.context.evaluations.entries),
            health=self._health(),
            pause=self.context.pause.status(),
        )

    def _learner_status(self, counts: BufferFigures) -> LearnerStatus:
        client, counters = self.learner, self.context.counters
        fields: dict[str, Any] = {}
        if report := counters.last_report:
            fields |= {name: getattr(report, name) for name in StepFigures.__struct_fields__}
            fields |= {name: counters.recent_mean(name) for name in SHARES}  # one step has few groups
        for measured, names in ((counters.mismatch_report, MISMATCH_FIGURES), (counters.drift_report, DRIFT_FIGURES)):
            fields |= {name: getattr(measured, name) for name in names if measured is not None}
        return LearnerStatus(
            state=str(client.worker_state),
            step=self.context.state.step,
            own_groups=counts.trained_own,
            foreign_groups=counts.trained_foreign,
            restarts=client.restarts,
            last_step_at=self._changed_at.get("step"),
            layout=client.state.layout if client.state else None,
            kernels=client.state.kernels if client.state else None,
            **fields,
        )

    def _health(self) -> HealthStatus:
        states = {"generation": str(self.generation.worker_state), "learner": str(self.learner.worker_state)}
        swarm, lag_s, problems = self.gossip.state, self.watchdog.lag_s, worker_problems(states)
        waits_for = not_ready(states, swarm_state=str(swarm.state), swarm_reason=swarm.reason)
        return HealthStatus(
            healthy=not problems,
            ready=not waits_for,
            problems=problems,
            failing=self.context.failures.failing,
            waits_for=waits_for,
            taken_at=time.time(),
            event_loop_lag_s=round(sum(lag_s) / len(lag_s), 4) if lag_s else None,
            event_loop_lag_longest_s=round(max(lag_s), 4) if lag_s else None,
        )

    def _limits(self, counts: BufferFigures) -> LimitsStatus:
        space, buffer = self.store.space, self.context.settings.buffer
        return LimitsStatus(
            paused=space.why_full,
            home_bytes=space.use.used_bytes if space.use else None,
            home_limit_bytes=space.limit.limit_bytes,
            disk_free_bytes=space.use.free_bytes if space.use else None,
            buffer_bytes=counts.envelope_bytes,
            buffer_limit_bytes=buffer.max_disk_bytes,
            ready_bytes=counts.ready_foreign_bytes,
            ready_limit_bytes=MAX_READY_BYTES,
            open_files=num_open_files(),
            open_files_limit=open_files().soft,
            out_of_files=self._shortage.count,
            http_refused=dict(self.http_refused),
        )


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
