"""The estimator of peers' coefficients in the loss of a step: how much the groups of each peer weigh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftis_node.config.step import PeerWeighting
from ftis_node.swarm.lru import LruDict

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
        self.total = DECAY * self.total + (1 - DECAY) * value
        self.norm = DECAY * self.norm + (1 - DECAY)
        self.steps += 1

    @property
    def value(self) -> float:
        """Return the mean; 0 without a value."""
        return self.total / self.norm if self.norm else 0.0


class PeerCoefficients:
    """Table of the coefficients of peers' groups in the loss of a step: `method.peer_weights`.

    A peer's completions weigh as much as their gradients agree with the node's own:

        agreement   its agreement / the own halves' agreement
        shrinkage   v_o / max(v_o, its distance), v_o the variance of the own gradient

    limited to [MIN_WEIGHT, 1]. All are exponential means over the steps with a measurement
    (`learner/step/agreement.py`). The weight of a peer is 1 before its second measurement, and while the halves of the
    own groups do not agree with each other. The minimum is above 0, since a peer of weight 0 could not be measured
    again. A restart resets all weights to 1.

    Shrinkage minimizes the squared error of the mix (1 - x) g_o + x g_s of the own gradient and that of a peer with
    bias b. The best x is v_o / (v_o + v_s + |b|^2). A weight w in the sum over all completions gives
    x / (1 - x) = w n_s / n_o, so w = v_s / (v_s + |b|^2). The expected distance is v_o + |b|^2 n_s / n_o, which turns
    w into the formula above.

    Above `MAX_PEERS` the table drops the peers that were measured longest ago.
    """

    def __init__(self, weighting: PeerWeighting | None = "agreement") -> None:
        self._weighting = weighting
        self._own = RunningMean()
        self._peers = LruDict[str, RunningMean](MAX_PEERS)

    def note(self, agreement: Mapping[str, float], among_own: float | None) -> None:
        """Add the measurements of a step: agreement by peer id, and the agreement between the own halves."""
        if among_own is not None:
            self._own.add(among_own)
        for peer_id, value in agreement.items():
            self._peers.touched(peer_id, RunningMean).add(value)

    def weight(self, peer_id: str) -> float:
        mean, own = self._peers.get(peer_id), self._own.value
        if mean is None or mean.steps < MIN_STEPS:
            return 1.0
        if self._weighting == "shrinkage":
            return max(MIN_WEIGHT, own / max(own, mean.value)) if own > 0 else 1.0
        return max(MIN_WEIGHT, min(1.0, mean.value / own)) if own >= MIN_OWN_AGREEMENT else 1.0
