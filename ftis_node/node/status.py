"""The status loop: gauges become a snapshot, once a second, for the local HTTP port and for the home's file.

consumes: the figures of all parts     produces: the snapshot, `status.json`
waits for: the clock                   unblocked by: time
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from ftis_node import __version__
from ftis_node.replay.reader import ReplayReader
from ftis_node.telemetry.status import (
    GenerationStatus,
    LearnerStatus,
    ModelStatus,
    NodeStatus,
    ReplayStatus,
    RunStatus,
    Status,
    SwarmStatus,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.node.parts import Parts
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

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._started_at = time.monotonic()
        self._num_members = 0
        self.latest = Status()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for _ in range(PERIODS_PER_SAVE):
                await self.refresh()
                await asyncio.sleep(PERIOD_S)
            await self._parts.disk(self.save)

    async def refresh(self, *, state: str = "running") -> Status:
        """Takes a new snapshot."""
        self._num_members = len(await self._parts.gossip.members())
        counts = await self._parts.disk(self._count)
        self.latest = self._snapshot(state, counts)
        return self.latest

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
        _replace_file(self._parts.home.status, json.dumps(document, indent=1).encode())

    def peers(self) -> list[dict[str, Any]]:
        """The rows of `peers --json`."""
        return [{"peer_id": peer_id, **peer.as_dict()} for peer_id, peer in self._parts.figures.peers.items()]

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
                policy_version=parts.figures.policy_version,
            ),
            generation=self._generation(counts),
            learner=self._learner(counts),
            swarm=swarm_status(parts, num_members=self._num_members),
            replay=ReplayStatus(
                waiting=parts.slots.waiting,
                ready=counts.ready,
                taken=counts.taken,
                released=counts.released,
                tokens=counts.tokens,
                disk_bytes=counts.disk_bytes,
            ),
            eval=list(parts.figures.evaluations),
        )

    def _generation(self, counts: BufferFigures) -> GenerationStatus:
        client = self._parts.generation
        return GenerationStatus(
            engine=client.engine,
            state=client.state,
            tokens_per_s=round(client.tokens_per_s, 1),
            groups_made=counts.groups_own,
            tokens_made=counts.tokens_own,
            restarts=client.restarts,
            policy_version=client.policy_version,
        )

    def _learner(self, counts: BufferFigures) -> LearnerStatus:
        client, figures = self._parts.learner, self._parts.figures
        fields: dict[str, Any] = {}
        if report := figures.last_report:
            fields |= {name: getattr(report, name) for name in (*STEP_FIGURES, *OPTIMIZER_FIGURES)}
        if measured := figures.mismatch_report:
            fields |= {name: getattr(measured, name) for name in MISMATCH_FIGURES}
        return LearnerStatus(
            state=str(client.worker_state),
            step=figures.step,
            own_groups=counts.trained_own,
            foreign_groups=counts.trained_foreign,
            restarts=client.restarts,
            **fields,
        )


def swarm_status(parts: Parts, *, num_members: int) -> SwarmStatus:
    """The swarm's section; `num_members`: connected members of the run."""
    figures, gossip = parts.figures, parts.gossip
    tokens = figures.tokens_received
    return SwarmStatus(
        state=str(gossip.state.state),
        reason=gossip.state.reason,
        peers_known=len(figures.peers),
        peers_connected=num_members,
        groups_sent=figures.groups_sent,
        groups_confirmed=figures.groups_confirmed,
        groups_received=figures.groups_received,
        groups_refused=dict(figures.refused),
        groups_repaired=figures.groups_repaired,
        bytes_in=gossip.counters.body_bytes_in,
        bytes_out=gossip.counters.body_bytes_out,
        tokens_in=tokens,
        bytes_per_token=round(figures.envelope_bytes_received / tokens, 3) if tokens else None,
    )


def load_saved(path: Path) -> tuple[Status, list[dict[str, Any]]]:
    """The snapshot and the peer table that a node left in its home. Raises msgspec.DecodeError for a damaged file."""
    data = path.read_bytes()
    return Status.from_json(data), msgspec.json.decode(data).get("peers", [])


def _replace_file(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)
