"""Registry of the peers that this node has met, by peer id: their records, what each sent, and what each confirmed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ftis_node import __version__
from ftis_node.errors import RecordError, SchemaRecordError
from ftis_node.learner.senders import SenderStats, add_up
from ftis_node.node.peers.version_advice import OtherVersions, newer_release, other_versions, version_words
from ftis_node.records.envelope import PeerRecord
from ftis_node.records.parsing import SCHEMA
from ftis_node.records.peer_messages import Receipt, Releases
from ftis_node.swarm.lru import LruDict
from ftis_node.telemetry.terminal_text import clipped, printable

MAX_PEERS = 4096
MAX_KEPT_RECEIPTS = 256  # of one peer
RECENT_STEPS = 20  # number of steps with groups of a peer over which `training` averages
NAME_WIDTH, ID_TAIL = 24, 8  # characters


@dataclass(slots=True)
class PeerActivity:
    """What a peer did: its counts, its newest record, and the statistics of its groups in training."""

    record: PeerRecord | None = None
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed_pulls: int = 0
    confirmed: int = 0
    last_seen: float = 0.0
    wire_schema: int | None = None  # wire version of its last message; None before the first message
    recent_steps: deque[SenderStats] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    training: dict[str, float | None] | None = None  # mean of `recent_steps`; None before a step used its groups
    receipts: LruDict[bytes, Receipt] = field(default_factory=lambda: LruDict(MAX_KEPT_RECEIPTS))  # of all its records

    def note_record(self, record: PeerRecord) -> None:
        """Keep the peer's record, and its receipts beside those of earlier records.

        A peer that begins again with its key and another home also begins its receipts again.
        """
        before = self.record.stats if self.record else None
        if before is not None and record.stats is not None and record.stats.step < before.step:
            self.receipts.clear()
        self.record, self.wire_schema = record, SCHEMA
        for receipt in record.stats.receipts if record.stats else ():
            self.receipts[receipt.key] = receipt

    def note_training(self, figures: SenderStats) -> None:
        """Add the statistics of the peer's completions in one more step."""
        self.recent_steps.append(figures)
        recent = add_up(self.recent_steps)
        shares = {name: None if value is None else round(value, 6) for name, value in recent.shares().items()}
        counts = {"steps": len(self.recent_steps), "groups": recent.groups, "completions": recent.completions}
        self.training = {**counts, **shares}

    def as_dict(self) -> dict[str, Any]:
        """Return the row of `peers --json`, without the peer's id."""
        record = self.record
        return {
            "name": record.name if record else "",
            "model": record.model if record else "",
            "parameters": record.parameters if record else 0,
            "role": record.role if record else "",
            "domain": record.domain if record else "",
            "releases": asdict(record.releases) if record else None,
            "policy_version": record.policy_version if record else None,
            "groups_accepted": self.accepted,
            "groups_refused": dict(self.refused),
            "failed_pulls": self.failed_pulls,
            "groups_confirmed": self.confirmed,
            "last_seen": self.last_seen,
            "wire_schema": self.wire_schema,
            "wire_words": version_words(self.wire_schema),
            "training": self.training,
        }


class PeerRegistry:
    """Table of `PeerActivity`; above `MAX_PEERS` it drops the peer that was added or seen longest ago."""

    def __init__(self) -> None:
        self.peers = LruDict[str, PeerActivity](MAX_PEERS)
        self.own_record: PeerRecord | None = None  # of the last second; None before the first

    def seen(self, peer_id: str) -> PeerActivity:
        """Return the entry of a peer that is present now, and update its time."""
        activity = self.peers[peer_id] = self.entry(peer_id)
        activity.last_seen = time.time()
        return activity

    def entry(self, peer_id: str) -> PeerActivity:
        """Return the entry of a peer; create it at first use."""
        if peer_id not in self.peers:
            self.peers[peer_id] = PeerActivity()
        return self.peers[peer_id]

    def record_of(self, peer_id: str) -> PeerRecord | None:
        return activity.record if (activity := self.peers.get(peer_id)) else None

    def name_of(self, peer_id: str) -> str:
        """Return the name in a peer's record, fit for a screen; "" if there is none."""
        record = self.record_of(peer_id)
        return clipped(record.name, NAME_WIDTH) if record is not None else ""

    def label(self, peer_id: str) -> str:
        """Return a peer's name and the end of its id, for a line of text."""
        name, tail = self.name_of(peer_id), f"..{printable(peer_id)[-ID_TAIL:]}"
        return f"peer {name} ({tail})" if name else f"peer {tail}"

    def grades_alike(self, peer_id: str, releases: Releases) -> bool:
        """Return whether a peer's record names these releases of the packages that decode and grade texts."""
        record = self.record_of(peer_id)
        if record is None:
            return False
        return (record.releases.grader, record.releases.transformers) == (releases.grader, releases.transformers)

    def has_sent_groups(self, peer_id: str) -> bool:
        return (activity := self.peers.get(peer_id)) is not None and activity.accepted > 0

    def note_refusal(self, peer_id: str, what: str, error: RecordError) -> None:
        """Count a malformed message of a peer by `what`; store the wire version if it differs from this node's."""
        activity = self.seen(peer_id)
        activity.refused[f"{what}_{error.reason}"] += 1
        if isinstance(error, SchemaRecordError):
            activity.wire_schema = error.schema

    def other_versions(self, members: Iterable[str]) -> OtherVersions:
        """Count the connected members with another wire version. Advise an update if most members are newer."""
        known = [self.peers.get(peer_id) for peer_id in members]
        return other_versions([None if peer is None else peer.wire_schema for peer in known])

    def newer_release(self, members: Iterable[str]) -> str:
        """Return a clause if most connected members run a newer release than this node."""
        records = map(self.record_of, members)
        return newer_release((record.software if record else None for record in records), ours=__version__)
