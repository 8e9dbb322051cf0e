"""Context that all components of a node share: settings, run manifest, identity, event log and state.

A constructor takes all other dependencies as arguments. `loop_wiring.py` passes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.node.pausing.policy import PauseGate
from ftis_node.node.state import EvaluationHistory, NodeState
from ftis_node.node.supervision.failure_streaks import FailureStreaks
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import Releases
from ftis_node.swarm.topology import shard_of
from ftis_node.telemetry.events import EventLog


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """Description of the node for peers and users.

    `tokenizer` is the tokenizer's fingerprint (hex). `domain` is the canonical task SPEC that the node generates for,
    "" for the whole task of the run. `training` is one line: full weights or LoRA, with the reason. `releases` names
    the packages with which the node judges groups.
    """

    name: str
    model: str
    tokenizer: str
    domain: str = ""
    training: str = ""
    releases: Releases = Releases()

    @property
    def tokenizer_prefix(self) -> bytes:
        """Return the first 8 bytes of the tokenizer's fingerprint, as announcements carry them."""
        return bytes.fromhex(self.tokenizer)[:8]


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The objects that every component may use.

    `failures` has the failures in a row of each kind of work, `evaluations` those of this and of earlier starts.
    """

    settings: NodeSettings
    manifest: RunManifest
    identity: Identity
    events: EventLog
    state: NodeState
    about: NodeDescription
    failures: FailureStreaks = field(default_factory=FailureStreaks)
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    pause: PauseGate = field(default_factory=PauseGate)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def shard(self) -> int:
        """Return the gossip shard in which this node announces its groups."""
        return shard_of(self.peer_id, self.manifest.wire.announcement_shards)
