"""Commands that rank 0 broadcasts to the other ranks, besides the daemon's own step and audit requests.

All ranks execute a command together, each for its part. Rank 0 broadcasts it before the work begins.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ftis_node.learner.messages import AuditRequest, TrainRequest
from ftis_node.workers.wire import Message


class CheckCommand(Message, frozen=True):
    """Compute log-probs of the check group, if any. Rank 0 then broadcasts the group."""


class ProveCommand(Message, frozen=True):
    """Compute the log-probs that check published weights."""


class GatherCommand(Message, frozen=True):
    """Send rank 0 the full tensors of a publication, a checkpoint or an export."""

    what: Literal["publication", "checkpoint", "merged model", "adapter"]


class EndCommand(Message, frozen=True):
    """The last command: the rank ends."""


RankCommand: TypeAlias = TrainRequest | AuditRequest | CheckCommand | ProveCommand | GatherCommand | EndCommand
