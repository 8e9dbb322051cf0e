"""Filters of a learner's batch: whole completions that are far and bad (F-TIS), and single outlier tokens (M2PO).

F-TIS (arXiv 2605.22537) keeps a completion if A > 0 or KL < g. To push down a completion that the learner would hardly
sample moves its probability to arbitrary others. To pull up a good answer helps at any distance.

The KL is estimated from the tokens that the generator sampled. With x = log rho = lp - lg:

    author_k3   1/rho + log rho - 1     chi2(gen||learner) - KL(gen||learner), heavy tailed; what the F-TIS authors'
                                        code computes, and so the scale of the paper's thresholds (5 to 100)
    k1_fwd      lg - lp                 KL(gen||learner); a single value may be negative
    k3_fwd      rho - log rho - 1       KL(gen||learner); never negative, small variance
    rkl_iw      rho log rho - rho + 1   KL(learner||gen), the quantity that the paper names

A threshold has a meaning only with its estimator: set both together.

Two more rules, beyond the paper, need no threshold. Each keeps a share of every sender's negatives, the nearest by the
same estimator. So one setting fits any pair of models and any length:

    quantile    the share is `keep_share`
    ess         the share is measured: the sender's effective sample size (`effective_share`)

The share is of the completions with A < 0 in one batch. Those with A = 0 train nothing: they are kept and not counted.
Otherwise the near ones of groups that are all right would take the places. A quantile over several steps would need
state, and these functions have none. This node's own completions (sender id 0) are kept, whatever their distance. With
`rank_own` they count as one more sender: completions of old weights are as far from the learner as a peer's.

M2PO (arXiv 2510.01161) masks the tokens of largest (lp - lg)^2 until the mean of the rest is below tau. Departure: all
tokens take part. The paper's second version counts only those where PPO's clip could act: A > 0 with rho > 1, or A < 0
with rho < 1. If even the smallest square is not below tau, no token is left; some implementations keep one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftis_node.algorithms.groups import group_extremes, group_sum
from ftis_node.algorithms.importance_weights import SEQUENCE_LOG_RATIO_LIMIT, token_log_ratio

if TYPE_CHECKING:
    from ftis_node.algorithms.batch import Batch
    from ftis_node.algorithms.settings import Settings


def author_k3(log_ratio: Tensor) -> Tensor:
    """1/rho + log rho - 1, which is also k3 with the two policies exchanged."""
    return torch.exp(-log_ratio) + log_ratio - 1


def k3_fwd(log_ratio: Tensor) -> Tensor:
    """rho - log rho - 1."""
    return torch.exp(log_ratio) - log_ratio - 1


def rkl_iw(log_ratio: Tensor) -> Tensor:
    """rho log rho - rho + 1: k3 of the reverse divergence, weighted to be an expectation over the learner."""
    ratio = torch.exp(log_ratio)
    return ratio * log_ratio - ratio + 1


def sequence_kl(batch: Batch, estimator: str) -> Tensor:
    """KL_i, the chosen estimator's mean over the tokens of each completion, `[N]`, no gradient; 0 without tokens."""
    if estimator == "k1_fwd":
        per_token = batch.behaviour_logprobs - batch.learner_logprobs.detach()
    else:
        formula = {"author_k3": author_k3, "k3_fwd": k3_fwd, "rkl_iw": rkl_iw}[estimator]
        per_token = formula(token_log_ratio(batch).detach())
    return batch.sequence_mean(per_token)


def keep_near_or_good(advantages: Tensor, kl: Tensor, threshold: float) -> Tensor:
    """The F-TIS filter: bool `[N]`, true where A > 0 or KL < threshold."""
    return (advantages > 0) | (kl < threshold)


def keep_nearest(batch: Batch, kl: Tensor, share: Tensor, *, rank_own: bool = False) -> Tensor:
    """Bool `[N]`: of each sender's completions with A < 0 the `share` `[num_senders]` of least KL; all others, too.

    Without `rank_own` this node's own completions are kept.
    Their number is rounded to the nearest whole one, halves up. Those with the KL of the last one are kept with it, so
    that the order of rows decides nothing.
    """
    sender = batch.sender_index
    is_ranked = (batch.advantages < 0) & (~batch.is_own | rank_own)
    num_wanted = share * group_sum(is_ranked.long(), sender, batch.num_senders)
    by_kl = torch.where(is_ranked, kl, math.inf).argsort(stable=True)
    order = by_kl[sender[by_kl].argsort(stable=True)]  # sender by sender, the ranked ones of each first
    num_rows = group_sum(torch.ones_like(sender), sender, batch.num_senders)
    begins = num_rows.cumsum(0) - num_rows
    ranks = torch.zeros_like(sender).scatter(0, order, torch.arange(len(order), device=order.device)) - begins[sender]
    is_near = is_ranked & (ranks + 0.5 <= num_wanted[sender])
    _, farthest = group_extremes(torch.where(is_near, kl, -math.inf), sender, batch.num_senders)
    return ~is_ranked | (kl <= farthest[sender])


def effective_share(batch: Batch) -> Tensor:
    """ESS / n times the mean weight of each sender's completions, `[num_senders]` in (0, 1], no gradient.

    The weight is w = min(1, s), s = exp(mean_t(lp - lg)) the sequence ratio, over all completions, good and bad:

        share = (sum w)^2 / (n sum w^2) * sum w / n

    The first factor is Kish's effective sample size. Alone it is 1 for completions that are all equally unlikely, as
    only their ratios to each other count in it; the second sees those. Above 1 w is cut: the learner would sample such
    a completion itself, and one of them must not make all others look unlikely. So a peer of the same model has
    exactly 1. With w = e^-d each factor falls, or stays, as all d grow by one scale, towards 0 if all are moved.
    """
    log_ratio = batch.sequence_mean(batch.learner_logprobs.detach() - batch.behaviour_logprobs)
    weight = torch.exp(log_ratio.clamp(-SEQUENCE_LOG_RATIO_LIMIT, 0.0))
    total, squares, num_rows = (
        group_sum(values, batch.sender_index, batch.num_senders)
        for values in (weight, weight.square(), torch.ones_like(weight))
    )
    return total**3 / (num_rows**2 * squares)


def second_moment_mask(batch: Batch, threshold: float) -> Tensor:
    """M2PO's tokens: bool `[N, T]`, true at the largest set of smallest (lp - lg)^2 whose mean is below `threshold`.

    The running mean of ascending values never falls, so the set is a prefix of the sorted tokens.
    """
    squares = (batch.learner_logprobs.detach() - batch.behaviour_logprobs).square()
    ascending, order = torch.where(batch.mask, squares, math.inf).flatten().sort(stable=True)
    counts = torch.arange(1, len(ascending) + 1, device=ascending.device)
    is_trusted = ascending.cumsum(0) / counts < threshold
    return torch.zeros_like(is_trusted).scatter(0, order, is_trusted).view_as(batch.mask)


def apply_filter(batch: Batch, settings: Settings, *, filtered: bool) -> tuple[Tensor, Tensor]:
    """KL_i by the chosen estimator, `[N]`, and what the chosen filter keeps, bool `[N]`; all where not `filtered`."""
    kl = sequence_kl(batch, settings.kl_estimator)
    if not filtered:
        return kl, torch.ones_like(kl, dtype=torch.bool)
    if settings.filter == "kl":
        return kl, keep_near_or_good(batch.advantages, kl, settings.kl_threshold)
    if settings.filter == "ess":
        return kl, keep_nearest(batch, kl, effective_share(batch), rank_own=settings.rank_own)
    share = kl.new_full((batch.num_senders,), settings.keep_share)
    return kl, keep_nearest(batch, kl, share, rank_own=settings.rank_own)
