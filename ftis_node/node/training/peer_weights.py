"""How much each peer's completions count in this node's steps, by how far they agreed with its own.

    weight of a peer = clamp(its agreement / the own halves' agreement, MIN_WEIGHT, 1)

Both are exponential means over the steps in which they were measured (`learner/step/agreement.py`). A peer that was not
measured yet, or at a time when the own halves do not agree among themselves, counts fully. The least weight is not 0,
or a peer could not be measured again. Kept in memory: after a start every peer counts fully.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DECAY = 0.8  # of an exponential mean, a step
MIN_STEPS = 2  # measured, before a peer counts less
MIN_WEIGHT = 0.02
MIN_OWN_AGREEMENT = 0.05
MAX_PEERS = 4096


@dataclass(slots=True)
class RunningMean:
    """An exponential mean, corrected for its start at 0."""

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
        """0 before the first."""
        return self.total / self.norm if self.norm else 0.0


class PeerWeights:
    """The weights of all peers that a step took groups of; of too many the ones measured longest ago are forgotten."""

    def __init__(self) -> None:
        self._own = RunningMean()
        self._peers: dict[str, RunningMean] = {}

    def note(self, agreement: Mapping[str, float], among_own: float | None) -> None:
        """Note a step's figures."""
        if among_own is not None:
            self._own.add(among_own)
        for peer_id, value in agreement.items():
            mean = self._peers.pop(peer_id, None) or RunningMean()
            mean.add(value)
            self._peers[peer_id] = mean
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def weight(self, peer_id: str) -> float:
        """In [MIN_WEIGHT, 1]."""
        mean = self._peers.get(peer_id)
        if mean is None or mean.steps < MIN_STEPS or self._own.value < MIN_OWN_AGREEMENT:
            return 1.0
        return max(MIN_WEIGHT, min(1.0, mean.value / self._own.value))
