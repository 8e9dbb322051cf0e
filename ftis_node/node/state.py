"""What the loops count while they run, for the status: plain numbers with one writer each."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ftis_node.errors import SchemaRecordError
from ftis_node.learner.senders import add_up
from ftis_node.records.parsing import SCHEMA
from ftis_node.swarm.delivery.pending_confirmations import PendingConfirmations
from ftis_node.swarm.delivery.unverified_confirmations import UnverifiedConfirmations
from ftis_node.swarm.wire_versions import count_other_versions, describe_peer_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftis_node.errors import RecordError
    from ftis_node.learner.messages import StepReport
    from ftis_node.learner.senders import SenderFigures
    from ftis_node.records.envelope import PeerRecord
    from ftis_node.swarm.wire_versions import OtherVersions
    from ftis_node.telemetry.status import EvalStatus

LARGEST_CONFIRMED = 1 << 16
REANNOUNCE_S = 10.0  # a group that nobody confirmed for so long is announced again
MAX_PEERS = 4096
RECENT_STEPS = 20  # of those that took a peer's groups: what `teaching` is over
MAX_EVALUATIONS = 1024  # in the status, which is told every second; all are in the event trail


@dataclass(slots=True)
class PeerFigures:
    """What this node knows of one peer."""

    record: PeerRecord | None = None
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed_pulls: int = 0
    confirmed: int = 0
    last_seen: float = 0.0
    wire_schema: int | None = None  # of what it said last; None before it said anything
    taught: deque[SenderFigures] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    teaching: dict[str, float | None] | None = None  # over `taught`; None before a step took a group of it

    def note_taught(self, figures: SenderFigures) -> None:
        """What its completions were worth in one more step."""
        self.taught.append(msgspec.structs.replace(figures, positive_log_ratios=(), negative_log_ratios=()))
        recent = add_up(self.taught)
        shares = {name: None if value is None else round(value, 6) for name, value in recent.shares().items()}
        counts = {"steps": len(self.taught), "groups": recent.groups, "completions": recent.completions}
        self.teaching = {**counts, **shares}

    def as_dict(self) -> dict[str, Any]:
        """The row of `peers --json`, less the peer's id."""
        record = self.record
        return {
            "name": record.name if record else "",
            "model": record.model if record else "",
            "parameters": record.parameters if record else 0,
            "role": record.role if record else "",
            "domain": record.domain if record else "",
            "policy_version": record.policy_version if record else None,
            "groups_accepted": self.accepted,
            "groups_refused": dict(self.refused),
            "failed_pulls": self.failed_pulls,
            "groups_confirmed": self.confirmed,
            "last_seen": self.last_seen,
            "wire_schema": self.wire_schema,
            "wire_words": describe_peer_version(self.wire_schema, ours=SCHEMA),
            "teaching": self.teaching,
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
    claims: UnverifiedConfirmations = field(default_factory=UnverifiedConfirmations)
    confirmations_unproven: int = 0  # of peers to which the group was not sent, and that did not show it
    evaluations: list[EvalStatus] = field(default_factory=list)
    unconfirmed: PendingConfirmations = field(default_factory=lambda: PendingConfirmations(first_wait_s=REANNOUNCE_S))
    read_shards: frozenset[int] = frozenset()
    skipped_prompts: int = 0
    step: int = 0
    policy_version: int = 0
    last_reused_version: int = 0  # up to it a number may mean two sets of weights: the learner went back and on
    saved_step: int | None = 0  # of the newest checkpoint; the groups of later steps may be needed again
    last_report: StepReport | None = None
    mismatch_report: StepReport | None = None  # the last one that measured it
    weights_refused: Counter[str] = field(default_factory=Counter)
    weights_created_at: float | None = None  # when the followed learner offered what is served, by its clock

    def evaluated(self, evaluation: EvalStatus) -> None:
        """Adds one; of too many the oldest go, but for those of the very first step, to which people compare."""
        known = [*self.evaluations, evaluation]
        first = [entry for entry in known if entry.step == known[0].step]
        num_later = max(1, MAX_EVALUATIONS - len(first))
        self.evaluations = first + known[len(first) :][-num_later:]

    def peer(self, peer_id: str) -> PeerFigures:
        """The figures of a peer that is seen now."""
        figures = self.known(peer_id)
        figures.last_seen = time.time()
        return figures

    def known(self, peer_id: str) -> PeerFigures:
        """The figures of a peer, made at first sight; of too many, those of the peer seen longest ago are dropped."""
        figures = self.peers.setdefault(peer_id, PeerFigures())
        if len(self.peers) > MAX_PEERS:
            del self.peers[min(self.peers, key=lambda known: (known == peer_id, self.peers[known].last_seen))]
        return figures

    def note_refusal(self, peer_id: str, what: str, error: RecordError) -> None:
        """Counts something of a peer's that was no record; of another version of the wire, also which."""
        reason, figures = f"{what}_{error.reason}", self.peer(peer_id)
        figures.refused[reason] += 1
        if isinstance(error, SchemaRecordError):
            figures.wire_schema = error.schema

    def other_versions(self, members: Iterable[str]) -> OtherVersions:
        """What the connected members speak, where it is not what this node does."""
        known = (self.peers.get(peer_id) for peer_id in members)
        return count_other_versions((figures.wire_schema if figures else None for figures in known), ours=SCHEMA)

    def confirm(self, peer_id: str, group_id: bytes) -> bool:
        """Counts that `peer_id` holds the group; True where it is the first peer that does."""
        self.peer(peer_id).confirmed += 1
        if group_id in self.confirmed_ids:
            return False
        self.confirmed_ids[group_id] = None
        self.unconfirmed.confirmed(group_id)
        self.groups_confirmed += 1
        if len(self.confirmed_ids) > LARGEST_CONFIRMED:
            del self.confirmed_ids[next(iter(self.confirmed_ids))]
        return True
