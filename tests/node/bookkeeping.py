"""State, counters and peer tables of a node that has done nothing yet, for tests of one component."""

from __future__ import annotations

from typing import Any

from ftis_node.node.peers.confirmations import Confirmations
from ftis_node.node.peers.registry import PeerRegistry
from ftis_node.node.state import NodeCounters, NodeState
from ftis_node.node.training.evaluation import EvaluationHistory


def bookkeeping(**state: Any) -> dict[str, Any]:
    """The fields by name; `state` sets those of the node's state."""
    registry = PeerRegistry()
    return {
        "state": NodeState(**state),
        "counters": NodeCounters(),
        "registry": registry,
        "confirmations": Confirmations(registry),
        "evaluations": EvaluationHistory(),
    }
