"""What rank 0 has the other ranks do, beside a step and an audit (as they came from the daemon).

An order names a piece of work that all ranks do together, each its part; it is broadcast before the piece begins.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ftis_node.learner.messages import AuditRequest, TrainRequest
from ftis_node.workers.wire import Message


class CheckOrder(Message, frozen=True):
    """Compute log-probs of the check group, if there is one: rank 0 then tells which."""


class ProveOrder(Message, frozen=True):
    """Compute the log-probs of the proof."""


class GatherOrder(Message, frozen=True):
    """Give rank 0 the whole of every tensor: what is published, what is saved, or one of the two exports."""

    what: Literal["publication", "checkpoint", "merged model", "adapter"]


class EndOrder(Message, frozen=True):
    """There will be no other order."""


Order: TypeAlias = TrainRequest | AuditRequest | CheckOrder | ProveOrder | GatherOrder | EndOrder
