"""State on which the node's loops base decisions, and counters that only the status and the metrics read."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.learner.messages import StepReport


RECENT_STEPS = 20


@dataclass(slots=True)
class NodeState:
    """Position of the node in its run.

    Each field has one writer. The shards loop writes `read_shards`. The train loop writes all other fields. In a
    generator the follow loop does, in an exchange node the `GroupExchange`.
    """

    step: int = 0
    policy_version: int = 0
    last_reused_version: int = 0  # up to this version a learner restart may have reused version numbers
    saved_step: int | None = 0  # step of the newest checkpoint; a restart needs the groups of later steps again
    read_shards: frozenset[int] = frozenset()


@dataclass(slots=True)
class NodeCounters:
    """Counts and reports since the node started. No loop bases a decision on them."""

    groups_sent: int = 0
    groups_received: int = 0
    groups_repaired: int = 0
    tokens_received: int = 0
    envelope_bytes_received: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    confirmations_unproven: int = 0  # by peers that did not get the group from here and could not return it
    groups_trained_own: int = 0
    groups_trained_foreign: int = 0
    recent_sources: deque[dict[str, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Groups that each of the last steps used, by the sender's peer id; "" is the sum over the smallest senders."""
    last_report: StepReport | None = None
    mismatch_report: StepReport | None = None  # the last report with a measured mismatch
    weights_refused: Counter[str] = field(default_factory=Counter)
    weights_created_at: float | None = None  # Unix time at which the learner offered the served weights, by its clock
