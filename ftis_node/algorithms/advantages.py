"""`group_advantages`: rewards in, advantages out.

    scale       A
    std         (r - mean) / (std + eps)                 GRPO, arXiv 2402.03300; F-TIS, arXiv 2605.22537
    mean        r - mean                                 Dr.GRPO, arXiv 2503.20783; the F-TIS authors' code in effect
    success     (r - mean) / (mean + eps)                MaxRL, arXiv 2602.02710: a rare success weighs 1 / mean
    capability  (r - baseline) / (std + eps) / omega     HACPO, arXiv 2603.02604, eq. 5 and 6

mean and std are those of a group, std with n - 1. *Vertical*, the default: one generator makes all completions of a
prompt. *Horizontal*: several generators answer one prompt and share one id. GEPO's loss then needs other ids than the
advantages; see `importance_weights.group_expectation_ratio`.

`shift` is added to r - mean of completions by other senders. A baseline below their mean trusts their successes more
than their failures (AsymRE, arXiv 2506.20520, which writes -shift as delta V). Departure: the shift raises no
completion above 0 that is not above its baseline. The paper would reward all failures of a group with a mean below it.

HACPO compares *capabilities*: P_s is the share of positive rewards among the completions of sender s. The ratio
omega_s = P_own / P_s, within [0.1, 10], is 1 for this node's own. The baseline of a group is the mean of omega_s r; if
it exceeds 1, it is the mean of the own rewards. The factor 1 / omega is the paper's coefficient of its objective, which
is linear in A. Read: the authors' code (zzx-peter/HACRL-code, recipe/hacpo/hacpo_core_algos.py), which cites the
equations. Departures: P_s is measured in this batch; the code averages five steps. A group without own completions,
which the code does not have, falls back on its own mean.

Departure: |A| omega is at most sqrt(n) with a deviation, n with `success`, in a group of n. A shift or another baseline
is not small where the rewards are nearly equal, so the quotient alone could have any size. Without them |A| is below
the bound. Rewards of 0 and 1 do not exceed it either, with any baseline between them.

Departure: equal rewards, and groups of one, give exactly 0, whatever the shift. The formulas alone do not: in float32
the mean of equal rewards has a rounding error. Divided by eps = 1e-8, that error becomes an advantage of order 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ftis_node.algorithms.batch import (
    FLOATING,
    INTEGERS,
    group_extremes,
    group_index,
    group_sum,
    require_finite,
    require_tensor,
)
from ftis_node.config.method_table import SCALES

LOWEST_CAPABILITY, LARGEST_OMEGA = 1e-8, 10.0


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale: str = "std",
    eps: float = 1e-8,
    *,
    sender_ids: Tensor | None = None,
    shift: float = 0.0,
) -> Tensor:
    """Return advantages `[N]` in the dtype of `rewards`.

    `rewards` is `[N]` float32 or float64, `group_ids` `[N]` integers in any order. `sender_ids` are integers `[N]`, 0
    for this node's own completions; None: all are its own. Computes in float64.

    Raises ValueError for a wrong shape or dtype, a non-finite reward, an unknown `scale`, or an `eps` or `shift` that
    is not a finite number >= 0. `success` also refuses a negative reward.
    """
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, not {scale!r}")
    for name, value in (("eps", eps), ("shift", shift)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number >= 0, not {value!r}")
    num_completions = rewards.shape[0] if isinstance(rewards, Tensor) and rewards.dim() == 1 else 0
    require_tensor("rewards", rewards, dtypes=FLOATING, shape=(num_completions,))
    require_tensor("group_ids", group_ids, dtypes=INTEGERS, shape=(num_completions,))
    senders = torch.zeros_like(group_ids) if sender_ids is None else sender_ids
    require_tensor("sender_ids", senders, dtypes=INTEGERS, shape=(num_completions,))
    require_finite("rewards", rewards)
    if scale == "success" and bool((rewards < 0).any()):
        raise ValueError("the scale success divides by the mean reward: rewards must be >= 0")

    exact = rewards.detach().double()
    index, num_groups = group_index(group_ids)
    sizes = group_sum(torch.ones_like(exact), index, num_groups)
    mean = (group_sum(exact, index, num_groups) / sizes)[index]
    smallest, largest = group_extremes(exact, index, num_groups)
    is_equal = (smallest == largest)[index]
    baseline, omega = mean, torch.ones_like(exact)
    if scale == "capability":
        omega = capability_ratio(exact, senders)
        baseline = _capability_baseline(exact, omega, mean, senders == 0, index, num_groups)
    above = torch.where(is_equal, 0.0, exact - baseline)
    shifted = above + shift * (senders != 0).double()
    above = torch.where(above > 0, shifted, shifted.clamp(max=0.0)).masked_fill(is_equal, 0.0)
    if scale == "mean":
        return above.to(rewards.dtype)
    squares = torch.where(is_equal, 0.0, exact - mean).square()
    variance = group_sum(squares, index, num_groups) / (sizes - 1).clamp(min=1)
    unit = mean if scale == "success" else variance.sqrt()[index]
    largest_advantage = (sizes if scale == "success" else sizes.sqrt())[index]
    # An advantage of 0 stays 0 even with eps = 0: the formula would compute 0 / 0 for an all-equal group.
    bounded = torch.where(above == 0, 0.0, above / (unit + eps)).clamp(-largest_advantage, largest_advantage)
    return (bounded / omega).to(rewards.dtype)


def capability_ratio(rewards: Tensor, sender_ids: Tensor) -> Tensor:
    """Return omega = P_own / P_sender of each completion, `[N]` float64; 1 if the batch has no own completion."""
    index, num_senders = group_index(sender_ids)
    is_own, is_right = sender_ids == 0, (rewards > 0).double()
    sizes = group_sum(torch.ones_like(is_right), index, num_senders)
    capability = (group_sum(is_right, index, num_senders) / sizes).clamp(min=LOWEST_CAPABILITY)[index]
    own = ((is_right * is_own).sum() / is_own.sum().clamp(min=1)).clamp(min=LOWEST_CAPABILITY)
    omega = (own / capability).clamp(1 / LARGEST_OMEGA, LARGEST_OMEGA)
    return torch.where(is_own | ~is_own.any(), 1.0, omega)


def _capability_baseline(
    rewards: Tensor, omega: Tensor, mean: Tensor, is_own: Tensor, index: Tensor, num_groups: int
) -> Tensor:
    sizes = group_sum(torch.ones_like(rewards), index, num_groups)
    num_own = group_sum(is_own.double(), index, num_groups)
    baseline = (group_sum(omega * rewards, index, num_groups) / sizes)[index]
    own_mean = (group_sum(rewards * is_own, index, num_groups) / num_own.clamp(min=1))[index]
    return torch.where(baseline > 1, torch.where(num_own[index] > 0, own_mean, mean), baseline)
