"""The advantages `learner`: a peer's answer is compared with what this node would get, not with the peer's mean.

    b = (K p + sum_j min(s_j, 1) r_j) / (K + sum_j min(s_j, 1))        over the group
    A = (r - b) / max(std of the group, 0.25)                          so |A| <= 4 for rewards in [0, 1]

p is the mean reward of own completions of the same task in the step. A strong peer's group that is all right then has a
signal, if this node is often wrong. Own completions, and tasks without own ones, keep (r - mean) / std.
"""

import torch
from torch import Tensor

from ftis_node.algorithms.advantages import group_advantages
from ftis_node.algorithms.scored_batch import ScoredBatch

K, LEAST_STD = 4.0, 0.25


def learner(batch: ScoredBatch) -> Tensor:
    rewards, trust = batch.rewards, batch.ratios.clamp(max=1.0)
    one = torch.ones_like(rewards)
    size, weight = (batch.sum_by(batch.group_ids, each) for each in (one, trust))
    own_rate = batch.mean_by(batch.task_ids, rewards, batch.is_own.double())
    baseline = (K * own_rate + batch.sum_by(batch.group_ids, trust * rewards)) / (K + weight)
    variance = batch.sum_by(batch.group_ids, (rewards - batch.mean_by(batch.group_ids, rewards, one)).square())
    std = (variance / (size - 1).clamp(min=1)).sqrt()
    advantages = (rewards - baseline) / std.clamp(min=LEAST_STD)
    return torch.where(batch.is_own | own_rate.isnan(), group_advantages(rewards, batch.group_ids), advantages)
