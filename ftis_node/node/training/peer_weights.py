"""Weights of peers' completions in this node's steps, by the agreement of their gradients with the node's own.

    weight of a peer = clamp(its agreement / the own halves' agreement, MIN_WEIGHT, 1)

Both are exponential means over the steps with a measurement (`learner/step/agreement.py`). The weight of a peer is 1
before its second measurement, and while the halves of the own groups do not agree with each other. The minimum is
above 0, since a peer of weight 0 could not be measured again. A restart resets all weights to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DECAY = 0.8  # of an exponential mean, per step
MIN_STEPS = 2  # measurements of a peer before its weight may fall below 1
MIN_WEIGHT = 0.02
MIN_OWN_AGREEMENT = 0.05
MAX_PEERS = 4096


@dataclass(slots=True)
class RunningMean:
    """Exponential mean with bias correction for the start at 0."""

    total: float = 0.0
    norm: float = 0.0
    steps: int = 0

    def add(self, value: float) -> None:
        """Add a step's value."""
        self.total = DECAY * self.total + (1 - DECAY) * value
        self.norm = DECAY * self.norm + (1 - DECAY)
        self.steps += 1

    @property
    def value(self) -> float:
        """Return the mean; 0 without a value."""
        return self.total / self.norm if self.norm else 0.0


class PeerWeights:
    """Bounded table of peer weights; beyond the bound it drops the peers that were measured longest ago."""

    def __init__(self) -> None:
        self._own = RunningMean()
        self._peers: dict[str, RunningMean] = {}

    def note(self, agreement: Mapping[str, float], among_own: float | None) -> None:
        """Add the measurements of a step: agreement by peer id, and the agreement between the own halves."""
        if among_own is not None:
            self._own.add(among_own)
        for peer_id, value in agreement.items():
            mean = self._peers.pop(peer_id, None) or RunningMean()
            mean.add(value)
            self._peers[peer_id] = mean
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def weight(self, peer_id: str) -> float:
        """Return the weight of a peer, in [MIN_WEIGHT, 1]."""
        mean = self._peers.get(peer_id)
        if mean is None or mean.steps < MIN_STEPS or self._own.value < MIN_OWN_AGREEMENT:
            return 1.0
        return max(MIN_WEIGHT, min(1.0, mean.value / self._own.value))
