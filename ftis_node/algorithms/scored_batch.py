"""Advantages of other packages: functions of a `ScoredBatch` that return `[N]` float64.

Results of plug-ins are checked, because NaN would reach the weights, and a wrong shape would broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from ftis_node.algorithms.batch import group_index, group_sum, require_finite
from ftis_node.algorithms.settings import require_shape
from ftis_node.errors import ConfigError
from ftis_node.plugins import ADVANTAGE_GROUP, call_plugin, load_function


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The N completions of a step with their rewards. All tensors are `[N]`, on the CPU.

    rewards     float64, by this node
    group_ids   int64, equal for completions that are compared with each other
    sender_ids  int64, 0 for completions of this node's weights
    task_ids    int64, one id for each task of a mixture
    ratios      float64, s = exp(mean_t(lp - lg)) at the first pass over the batch
    """

    rewards: Tensor
    group_ids: Tensor
    sender_ids: Tensor
    task_ids: Tensor
    ratios: Tensor

    @property
    def is_own(self) -> Tensor:
        return self.sender_ids == 0

    def sum_by(self, ids: Tensor, values: Tensor) -> Tensor:
        """Return the sum of `values` over the completions of equal `ids`, at each of them: `[N]`."""
        index, number = group_index(ids)
        return group_sum(values, index, number)[index]

    def mean_by(self, ids: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """Return their mean over the completions of equal `ids`, `[N]`; NaN if their `weights` sum to 0."""
        return self.sum_by(ids, weights * values) / self.sum_by(ids, weights)


AdvantageRule: TypeAlias = Callable[[ScoredBatch], Tensor]


@lru_cache(maxsize=16)
def load_advantage(name: str) -> AdvantageRule:
    """Return the advantages of the plug-in `name`.

    Raises ValueError if no package has it, ConfigError for a faulty one.
    """
    plugin, rule = load_function(ADVANTAGE_GROUP, name, error=ConfigError)
    if plugin is None or rule is None:
        raise ValueError(f"no advantage {name!r} is installed")

    def advantages(batch: ScoredBatch) -> Tensor:
        values = call_plugin(plugin, lambda: rule(batch), error=ConfigError)
        checked = require_shape(plugin, values, (tuple(batch.rewards.shape),), torch.float64)
        call_plugin(plugin, lambda: require_finite("its result", checked), error=ConfigError)
        return checked

    return advantages
