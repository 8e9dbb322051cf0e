"""What the loops count while they run, for the status: plain numbers with one writer each."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis_node.learner.messages import StepReport
    from ftis_node.records.envelope import PeerRecord
    from ftis_node.telemetry.status import EvalStatus

LARGEST_CONFIRMED = 1 << 16


@dataclass(slots=True)
class PeerFigures:
    """What this node knows of one peer."""

    record: PeerRecord | None = None
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed_pulls: int = 0
    confirmed: int = 0
    last_seen: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The row of `peers --json`, less the peer's id."""
        record = self.record
        return {
            "name": record.name if record else "",
            "model": record.model if record else "",
            "parameters": record.parameters if record else 0,
            "role": record.role if record else "",
            "policy_version": record.policy_version if record else None,
            "groups_accepted": self.accepted,
            "groups_refused": dict(self.refused),
            "failed_pulls": self.failed_pulls,
            "groups_confirmed": self.confirmed,
            "last_seen": self.last_seen,
        }


@dataclass(slots=True)
class Figures:
    """Counts since the node started, and what it knows of its peers."""

    groups_sent: int = 0
    groups_received: int = 0
    groups_repaired: int = 0
    tokens_received: int = 0
    envelope_bytes_received: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    peers: dict[str, PeerFigures] = field(default_factory=dict)
    confirmed_ids: dict[bytes, None] = field(default_factory=dict)
    groups_confirmed: int = 0
    evaluations: list[EvalStatus] = field(default_factory=list)
    skipped_prompts: int = 0
    step: int = 0
    policy_version: int = 0
    last_report: StepReport | None = None
    mismatch_report: StepReport | None = None  # the last one that measured it

    def peer(self, peer_id: str) -> PeerFigures:
        """The figures of a peer, made at first sight."""
        figures = self.peers.setdefault(peer_id, PeerFigures())
        figures.last_seen = time.time()
        return figures

    def confirm(self, peer_id: str, group_id: bytes) -> bool:
        """Counts that `peer_id` holds the group; True where it is the first peer that does."""
        self.peer(peer_id).confirmed += 1
        if group_id in self.confirmed_ids:
            return False
        self.confirmed_ids[group_id] = None
        self.groups_confirmed += 1
        if len(self.confirmed_ids) > LARGEST_CONFIRMED:
            del self.confirmed_ids[next(iter(self.confirmed_ids))]
        return True
