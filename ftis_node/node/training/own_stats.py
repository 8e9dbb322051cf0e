"""The statistics that this node publishes about itself in its directory record."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from ftis_node.records.peer_messages import PeerStats

if TYPE_CHECKING:
    from ftis_node.node.context import NodeContext, NodeCounters
    from ftis_node.node.training.evaluation import EvaluationHistory

NUM_SAMPLES = 10  # number of directory periods over which the rate of groups averages
MINUTE_S = 60.0


class OwnStats:
    """Maker of the measurements. `sample` is called once for each directory period, `make` at any time."""

    def __init__(self, *, context: NodeContext, counters: NodeCounters, evaluations: EvaluationHistory) -> None:
        self._context = context
        self._counters = counters
        self._evaluations = evaluations
        self._samples: deque[tuple[float, int]] = deque(maxlen=NUM_SAMPLES)

    def sample(self, *, last_number: int) -> None:
        """Note how many groups have been sent; the rate is an average since the oldest of the noted numbers."""
        self._samples.append((time.monotonic(), last_number))

    def make(self, *, last_number: int) -> PeerStats | None:
        """Return the measurements; None if `swarm.publish_stats` is false. `last_number` counts the groups sent."""
        if not self._context.settings.swarm.publish_stats:
            return None
        sources: Counter[str] = Counter()
        for groups in self._counters.recent_sources:
            sources.update(groups)
        return PeerStats(
            step=self._context.state.step,
            groups_per_minute=self._groups_per_minute(last_number),
            rejected_groups=sum(self._counters.refused.values()),
            pass_rates=self._pass_rates(),
            sources=tuple((peer_id, groups) for peer_id, groups in sources.most_common() if peer_id and groups > 0),
            trained_groups=sum(sources.values()),
        )

    def _groups_per_minute(self, last_number: int) -> float:
        if not self._samples:
            return 0.0
        (first_s, first), now_s = self._samples[0], time.monotonic()
        return MINUTE_S * (last_number - first) / (now_s - first_s) if now_s > first_s else 0.0

    def _pass_rates(self) -> tuple[tuple[int, float], ...]:
        entries = self._evaluations.entries
        return tuple((entry.step, entry.pass_at_1) for entry in entries if entry.task == entries[0].task)
