"""Context that all components of a node share: settings, run manifest, identity, event log, state and failures.

The loops change the state: the node's position in the run, its counters, and its evaluations.

A constructor takes all other dependencies as arguments. `wiring.py` passes them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import fmean

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.learner.messages import StepReport
from ftis_node.node.pausing import PauseGate
from ftis_node.node.supervision.failure_streaks import FailureStreaks
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import Releases
from ftis_node.swarm.topology import shard_of
from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.status import EvalStatus

RECENT_STEPS = 20
ANSWER_STEPS = 10
MAX_UPDATES = 1024
MAX_EVALUATIONS = 1024  # in the status, which HTTP clients read every second; the event log has all evaluations


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


@dataclass(slots=True)
class NodeState:
    """Position of the node in its run.

    Each field has one writer. The shards loop writes `read_shards`, the generate loop `groups_without_reward` and
    `sample`. The train loop writes all other fields. In a generator the follow loop does, in an exchange node the
    `TrainerExchange`.
    """

    step: int = 0
    policy_version: int = 0
    last_reused_version: int = 0  # up to this version a learner restart may have reused version numbers
    saved_step: int | None = 0  # step of the newest checkpoint; a restart needs the groups of later steps again
    read_shards: frozenset[int] = frozenset()
    groups_without_reward: int = 0  # the newest own groups in a row; `sample` is a completion of the last one
    sample: str = ""
    updates: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_UPDATES))  # the learner's last versions

    def go_to(self, version: int) -> None:
        """Set the policy version of the learner, after a step, or after it went back."""
        while self.updates and self.updates[-1] >= version:
            self.updates.pop()
        self.updates.append(version)
        self.policy_version = version

    def version_lag(self, num_updates: int) -> int:
        """Return by how much a version of `num_updates` updates ago is lower than the present one of the learner.

        Steps without an update have numbers, too. Before the first known version each step counts as an update.
        """
        if not self.updates:
            return num_updates
        num_known = min(num_updates, len(self.updates) - 1)
        return self.updates[-1] - self.updates[-1 - num_known] + num_updates - num_known


@dataclass(slots=True)
class NodeCounters:
    """Counts and reports since the node started. No loop bases a decision on them."""

    groups_sent: int = 0
    groups_received: int = 0
    groups_repaired: int = 0
    tokens_received: int = 0
    envelope_bytes_received: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    turns_made: Counter[str] = field(default_factory=Counter)  # `num_turns` and `num_observations` of own episodes
    confirmations_unproven: int = 0  # by peers that did not get the group from here and could not return it
    groups_trained_own: int = 0
    groups_trained_foreign: int = 0
    recent_sources: deque[dict[str, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Groups that each of the last steps used, by the sender's peer id; "" is the sum over the smallest senders."""
    last_reports: deque[StepReport] = field(default_factory=lambda: deque(maxlen=ANSWER_STEPS))
    mismatch_report: StepReport | None = None  # the last report with a measured mismatch
    drift_report: StepReport | None = None  # the last report with a measured distance from the starting model
    weights_refused: Counter[str] = field(default_factory=Counter)
    weights_created_at: float | None = None  # Unix time at which the learner offered the served weights, by its clock

    @property
    def last_report(self) -> StepReport | None:
        return self.last_reports[-1] if self.last_reports else None

    def recent_mean(self, name: str) -> float | None:
        """Return the mean of a figure over the last reports that have it; None if none has."""
        found = [value for report in self.last_reports if (value := getattr(report, name)) is not None]
        return fmean(found) if found else None


class EvaluationHistory:
    """Bounded list of evaluations, oldest first."""

    def __init__(self) -> None:
        self.entries: list[EvalStatus] = []

    def add(self, evaluation: EvalStatus) -> None:
        """Add an evaluation. Beyond the bound, drop the oldest after the first step, which is the baseline."""
        known = [*self.entries, evaluation]
        first = [entry for entry in known if entry.step == known[0].step]
        num_later = max(1, MAX_EVALUATIONS - len(first))
        self.entries = first + known[len(first) :][-num_later:]

    def go_back(self, step: int) -> None:
        """Drop the evaluations after `step`: the learner lost those weights."""
        self.entries = [entry for entry in self.entries if entry.step <= step]


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
    counters: NodeCounters = field(default_factory=NodeCounters)
    failures: FailureStreaks = field(default_factory=FailureStreaks)
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    pause: PauseGate = field(default_factory=PauseGate)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def policy_name(self) -> str:
        """Return the model's name in own groups. Quantized weights are another policy, compared by no audit."""
        is_quantized = self.settings.is_quantized or "quantization" in self.settings.generation.engine_options
        return f"quantized {self.about.model}" if is_quantized else self.about.model

    @property
    def shard(self) -> int:
        """Return the gossip shard in which this node announces its groups."""
        return shard_of(self.peer_id, self.manifest.wire.announcement_shards)
