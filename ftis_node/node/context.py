"""Context that all components of a node share: settings, run manifest, identity, event log, state and failures.

The loops change the state: the node's position in the run, its counters, and its evaluations. A failure that lasts for
hours gives a few events and log lines. They come at the first failure in a row and at each doubling of their number.
The status shows each kind of work that fails again and again. A success ends the row.

A constructor takes all other dependencies as arguments. `wiring.py` passes them.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import fmean

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import first_line
from ftis_node.learner.messages import StepReport
from ftis_node.node.pausing import PauseGate
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import Releases
from ftis_node.swarm.topology import shard_of
from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.status import EvalStatus

log = logging.getLogger(__name__)
RECENT_STEPS = 20
ANSWER_STEPS = 10
MAX_UPDATES = 1024
MAX_EVALUATIONS = 1024  # in the status, which HTTP clients read every second; the event log has all evaluations
NUM_FAILING = 3  # failures in a row after which the status shows the work


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
    `GroupExchange`.
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


@dataclass(slots=True)
class FailureStreak:
    """Failures in a row of one kind of work."""

    num_failing: int = NUM_FAILING
    num_in_row: int = 0
    has_succeeded: bool = False  # since the start of the node
    error: str = ""

    @property
    def is_failing(self) -> bool:
        return self.num_in_row >= self.num_failing


@dataclass(slots=True)
class FailureStreaks:
    """Table of the streaks of one node, by kind of work."""

    _streaks: dict[str, FailureStreak] = field(default_factory=dict)

    def expect(self, work: str, *, num_failing: int) -> None:
        """Set after how many failures in a row the status shows `work`."""
        self.streak(work).num_failing = num_failing

    def failed(self, work: str, error: Exception) -> bool:
        """Count a failure. Return whether to write an event: for the 1st, 2nd, 4th, 8th, ... in a row.

        Log the first failure of work that has not succeeded yet, then from the point at which the status shows it.
        """
        streak = self.streak(work)
        streak.num_in_row += 1
        streak.error = first_line(error)
        is_due = streak.num_in_row & (streak.num_in_row - 1) == 0
        is_first_of_all = streak.num_in_row == 1 and not streak.has_succeeded
        if is_first_of_all or streak.num_in_row == streak.num_failing or (is_due and streak.is_failing):
            log.warning("%s; the node tries again", _sentence(work, streak))
        return is_due

    def succeeded(self, work: str) -> None:
        streak = self.streak(work)
        if streak.is_failing:
            log.info("%s works again after %d failures", work, streak.num_in_row)
        streak.num_in_row, streak.has_succeeded = 0, True

    def streak(self, work: str) -> FailureStreak:
        return self._streaks.setdefault(work, FailureStreak())

    @property
    def failing(self) -> list[str]:
        return [_sentence(work, streak) for work, streak in self._streaks.items() if streak.is_failing]


def _sentence(work: str, streak: FailureStreak) -> str:
    times = "" if streak.num_in_row == 1 else f" {streak.num_in_row} times in a row"
    return f"{work} failed{times}: {streak.error}"


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
