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
from ftis_node.node.http_api.health import STILL_S, RunningLoops, not_ready, worker_problems
from ftis_node.node.peers.operator_actions import PeerControl
from ftis_node.node.peers.registry import PeerActivity
from ftis_node.node.supervision.last_change import LastChange
from ftis_node.node.supervision.process_limits import FileShortage, num_open_files, open_files
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.node.supervision.watchdog import Watchdog
from ftis_node.replay.reader import ReplayReader
from ftis_node.swarm.peer_guard import Place
from ftis_node.telemetry.status import (
    BudgetStatus,
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
    SwarmStatus,
    amount,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from ftis_node.node.context import Parts
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
    """Makes the snapshot; `latest` is what everybody shows."""

    def __init__(
        self,
        parts: Parts,
        *,
        loops: RunningLoops | None = None,
        watchdog: Watchdog | None = None,
        http_refused: Counter[str] | None = None,
    ) -> None:
        """`loops` are those whose health the snapshot tells, `watchdog` sees whether they turn; `http_refused` counts
        the requests that the HTTP ports refused, by reason."""
        self._parts = parts
        self._loops = loops or RunningLoops()
        self._watchdog = watchdog or Watchdog(parts.settings.observe)
        self._groups_made, self._step = LastChange(), LastChange()
        self._started_at = self._refreshed_at = time.monotonic()
        self._members: Collection[str] = ()
        self._shortage = FileShortage()
        self.http_refused: Counter[str] = Counter() if http_refused is None else http_refused
        self.latest = Status()
        self.control = PeerControl(parts.peers, self.peers)
        self.token_file = parts.home.control_token

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for _ in range(PERIODS_PER_SAVE):
                await self._shortage.passed_over(self.refresh)
                with waiting_for("the clock"):
                    await asyncio.sleep(PERIOD_S)
            await self._shortage.passed_over(partial(self._parts.disk, self.save))

    async def refresh(self, *, state: str = "running") -> Status:
        """Takes a new snapshot."""
        self._members = await self._parts.gossip.members()
        counts = await self._parts.disk(self._count)
        self._groups_made.note(counts.groups_own)
        self._step.note(self._parts.state.step)
        before, now = self.latest.swarm, self._snapshot(state, counts)
        if state == "stopped":  # the network is down by now; what it was before says more
            swarm = msgspec.structs.replace(now.swarm, state=before.state, reason=before.reason)
            now = msgspec.structs.replace(now, swarm=swarm)
        self.latest = now
        self._refreshed_at = time.monotonic()
        return self.latest

    @property
    def problems(self) -> list[str]:
        """A sentence for each thing that only a new start mends; the latest snapshot's, unless that is too old."""
        still_s = time.monotonic() - self._refreshed_at
        still = [f"the status loop stands still: no snapshot for {still_s:.0f} s"] if still_s >= STILL_S else []
        return still + self.latest.health.problems

    def _count(self) -> BufferFigures:
        """Counts over the whole buffer take a while: in the disk's thread, on a connection of its own."""
        reader = ReplayReader(self._parts.home.replay)
        try:
            return reader.figures()
        finally:
            reader.close()

    def save(self) -> None:
        """Writes the snapshot and the peer table into the home, for when the node is stopped."""
        document = json.loads(self.latest.to_json()) | {"peers": self.peers()}
        replace_file(self._parts.home.status, json.dumps(document, indent=1).encode())

    def peers(self) -> list[dict[str, Any]]:
        """The rows of `peers --json`."""
        registry, book = dict(self._parts.registry.peers), self._parts.peers
        known = [*registry, *(peer_id for peer_id in book.known() if peer_id not in registry)]
        rows = []
        for peer_id in known:
            with self._parts.guard.work_for(peer_id, Place.STATUS):
                rows.append(
                    {"peer_id": peer_id, **registry.get(peer_id, PeerActivity()).as_dict(), **book.row(peer_id)}
                )
        return rows

    def _snapshot(self, state: str, counts: BufferFigures) -> Status:
        parts, learner = self._parts, self._parts.learner.state
        return Status(
            node=NodeStatus(
                peer_id=parts.identity.peer_id,
                name=parts.name,
                version=__version__,
                role=parts.settings.role,
                state=state,
                uptime_s=round(time.monotonic() - self._started_at, 1),
                addresses=parts.gossip.addresses,
                domain=parts.domain_name,
            ),
            run=RunStatus(
                id=parts.manifest.run_id,
                name=parts.manifest.name,
                method=parts.manifest.method.name,
                task=parts.manifest.task,
            ),
            model=ModelStatus(
                name=parts.source.name,
                parameters=learner.parameters if learner else 0,
                trainable_parameters=learner.trainable_parameters if learner else 0,
                tokenizer_fingerprint=parts.tokenizer.fingerprint,
                policy_version=parts.state.policy_version,
                training=parts.training,
            ),
            generation=self._generation(counts),
            learner=self._learner(counts),
            swarm=swarm_status(parts, members=self._members),
            replay=ReplayStatus(
                waiting=parts.slots.waiting,
                ready=counts.ready,
                taken=counts.taken,
                released=counts.released,
                tokens=counts.tokens,
                disk_bytes=counts.disk_bytes,
            ),
            limits=self._limits(counts),
            budget=self._budget(counts),
            eval=list(parts.evaluations.entries),
            health=self._health(),
        )

    def _health(self) -> HealthStatus:
        parts, swarm = self._parts, self._parts.gossip.state
        states = {"generation": str(parts.generation.state), "learner": str(parts.learner.worker_state)}
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
        room, buffer = self._parts.room, self._parts.settings.buffer
        return LimitsStatus(
            paused=room.why_full,
            home_bytes=room.use.used_bytes if room.use else None,
            home_limit_bytes=room.limit.limit_bytes,
            disk_free_bytes=room.use.free_bytes if room.use else None,
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
        limits = self._parts.settings.budget
        return BudgetStatus(
            generate_tokens=amount(counts.tokens_own, limits.generate_tokens),
            learn_steps=amount(self._parts.state.step, limits.learn_steps),
            learn_tokens=amount(self._parts.reader.trained_tokens(), limits.learn_tokens),
        )

    def _generation(self, counts: BufferFigures) -> GenerationStatus:
        client = self._parts.generation
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

    def _learner(self, counts: BufferFigures) -> LearnerStatus:
        client, counters = self._parts.learner, self._parts.counters
        fields: dict[str, Any] = {}
        if report := counters.last_report:
            fields |= {name: getattr(report, name) for name in (*STEP_FIGURES, *OPTIMIZER_FIGURES)}
        if measured := counters.mismatch_report:
            fields |= {name: getattr(measured, name) for name in MISMATCH_FIGURES}
        return LearnerStatus(
            state=str(client.worker_state),
            step=self._parts.state.step,
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


def swarm_status(parts: Parts, *, members: Collection[str]) -> SwarmStatus:
    """The swarm's section; `members`: the connected ones of the run."""
    counters, gossip = parts.counters, parts.gossip
    others = parts.registry.other_versions(members)
    tokens = counters.tokens_received
    return SwarmStatus(
        state=str(gossip.state.state),
        reason=gossip.state.reason,
        reachability=str(gossip.reachability),
        clock_skew_s=None if gossip.clock_skew_s is None else round(gossip.clock_skew_s, 3),
        peers_known=len(parts.registry.peers),
        peers_connected=len(members),
        groups_sent=counters.groups_sent,
        groups_confirmed=parts.confirmations.num_confirmed,
        groups_received=counters.groups_received,
        groups_refused=dict(counters.refused),
        groups_repaired=counters.groups_repaired,
        bytes_in=gossip.counters.body_bytes_in,
        bytes_out=gossip.counters.body_bytes_out,
        tokens_in=tokens,
        bytes_per_token=round(counters.envelope_bytes_received / tokens, 3) if tokens else None,
        fetch_errors=dict(gossip.counters.fetch_errors),
        serve_errors=dict(gossip.counters.serve_errors),
        announcements_refused=gossip.counters.announcements_refused,
        confirmations_unproven=counters.confirmations_unproven,
        non_ed25519=dict(gossip.counters.non_ed25519),
        weights_bytes_in=gossip.counters.weights_bytes_in,
        weights_bytes_out=gossip.counters.weights_bytes_out,
        weights_age_s=None
        if counters.weights_created_at is None
        else round(time.time() - counters.weights_created_at, 3),
        weights_refused=dict(counters.weights_refused),
        announcements_dropped=gossip.counters.announcements_dropped,
        records_refused=gossip.counters.records_refused,
        peers_newer=others.num_newer,
        peers_older=others.num_older,
        update=others.advice,
    )
