"""Filters of a learner's batch: F-TIS drops distant negative completions, and M2PO drops single outlier tokens.

F-TIS (arXiv 2605.22537) keeps a completion if A > 0 or KL < g. A negative gradient on a completion that the learner
would hardly sample moves its probability to arbitrary others. A positive gradient on a good answer helps at any
distance.

The KL is estimated from the tokens that the generator sampled. The ratio rho = exp(lp - lg) is that of the first pass
over the batch, so several updates keep the same completions:

    author_k3   1/rho + log rho - 1     chi2(gen||learner) - KL(gen||learner), heavy tailed; used by the F-TIS authors'
                                        code, so the scale of the paper's thresholds (5 to 100)
    k1_fwd      lg - lp                 KL(gen||learner); a single value may be negative
    k3_fwd      rho - log rho - 1       KL(gen||learner); never negative, small variance
    rkl_iw      rho log rho - rho + 1   KL(learner||gen), the quantity that the paper names

A threshold is meaningful only with its estimator: set both together.

Two more rules, beyond the paper, need no threshold. Each keeps a share of every sender's negatives: those with the
smallest KL by the same estimator. So one setting fits any pair of models and any length:

    quantile    the share is `keep_share`
    ess         the share is measured: the sender's effective sample size (`effective_share`)

`positives` keeps no negatives of other senders. It is `quantile` with a share of 0, and reads no log-probs.

The share is of the completions with A < 0 in one batch; those with A = 0 do not fill it. This node's
own completions (sender id 0) are kept, whatever their distance. With `rank_own` they count as one more sender:
completions of old weights may be as far from the learner as a peer's.

The off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556) is the first rule with `k1_fwd` and 0.5, in `f-nois`.
TRL's form of it also keeps KL = g, and A = 0, which has no gradient.

M2PO (arXiv 2510.01161) masks the tokens of largest (lp - lg)^2 until the mean of the rest is below tau. Departure: all
tokens take part, not only those that PPO's clip could affect. If even the smallest square is not below tau, no token
remains; some implementations keep one. The mask takes the place of PPO's clip, so it is that of the current pass.

`obrs` drops single tokens at random: optimal budgeted rejection sampling, at the receiver. Jackpot (arXiv 2602.06107,
eq. 3 to 5; authors' PDF in Infini-AI-Lab/jackpot) accepts a token with probability

    a = min(1, rho0 / lambda),  rho0 = pi / mu at the first pass

and masks the others. Accepted tokens follow mu a / Z, which is nearer to pi than mu is. Their ratio to pi is
Z rho0 / a = Z max(rho0, lambda); the paper truncates it. Here the ratio of an accepted token is rho0 / a, so `ftis`
weighs it by min(max(rho0, lambda), C), `f-vis` clips it, and `f-nois` ignores it.

Departures. Z needs the whole vocabulary, which a group does not have. Means here divide by all tokens, rejected ones
included. So Z cancels: without truncation, the mean of rho0 / a over accepted tokens, times their share Z, is unbiased.
The sender's model is not trained here, so its two losses are omitted.

The random numbers of `obrs` are hashes of the group's id, the completion's place in the group, the column, and the
sender's log-prob. So a repeated step, and every update on a batch, accepts the same tokens on any device. The sender
controls or guesses all four. So the learner adds a number to the ids that its peers do not know.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ftis_node.algorithms.batch import Batch, group_extremes, group_sum, places_in
from ftis_node.algorithms.importance_weights import SEQUENCE_LOG_RATIO_LIMIT, first_pass_log_ratio
from ftis_node.algorithms.settings import Settings, load_filter

WORD = 0xFFFFFFFF


def author_k3(log_ratio: Tensor) -> Tensor:
    """Return 1/rho + log rho - 1: k3 with the two policies exchanged."""
    return torch.exp(-log_ratio) + log_ratio - 1


def k3_fwd(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio) - log_ratio - 1


def rkl_iw(log_ratio: Tensor) -> Tensor:
    """Return rho log rho - rho + 1: k3 of the reverse divergence, weighted to be an expectation over the learner."""
    ratio = torch.exp(log_ratio)
    return ratio * log_ratio - ratio + 1


def token_kl(batch: Batch, estimator: str) -> Tensor:
    """Return the chosen estimator of each token, `[N, T]` without gradient; anything outside the mask."""
    if estimator == "k1_fwd":
        return batch.behaviour_logprobs - batch.first_pass_logprobs
    formula = {"author_k3": author_k3, "k3_fwd": k3_fwd, "rkl_iw": rkl_iw}[estimator]
    return formula(first_pass_log_ratio(batch))


def sequence_kl(batch: Batch, estimator: str) -> Tensor:
    """Return KL_i `[N]`, the chosen estimator's mean over each completion's tokens; no gradient, 0 without tokens."""
    return batch.sequence_mean(token_kl(batch, estimator))


def keep_near_or_good(advantages: Tensor, kl: Tensor, threshold: float) -> Tensor:
    """Return the F-TIS filter: bool `[N]`, true if A > 0 or KL < threshold."""
    return (advantages > 0) | (kl < threshold)


def keep_nearest(batch: Batch, kl: Tensor, share: Tensor, *, rank_own: bool = False) -> Tensor:
    """Return bool `[N]`: of each sender's completions with A < 0 only the `share` `[num_senders]` of least KL, and all
    others.

    Without `rank_own` this node's own completions are kept. The number kept is rounded to the nearest integer, halves
    up. Ties with the last kept KL are kept too, so the order of rows has no effect.
    """
    sender = batch.sender_index
    is_ranked = (batch.advantages < 0) & (~batch.is_own | rank_own)
    num_kept = share * group_sum(is_ranked.long(), sender, batch.num_senders)
    by_kl = torch.where(is_ranked, kl, math.inf).argsort(stable=True)
    order = by_kl[sender[by_kl].argsort(stable=True)]  # sort by sender, ranked completions first
    is_near = is_ranked & (places_in(sender, batch.num_senders, order) + 0.5 <= num_kept[sender])
    _, farthest = group_extremes(torch.where(is_near, kl, -math.inf), sender, batch.num_senders)
    return ~is_ranked | (kl <= farthest[sender])


def effective_share(batch: Batch) -> Tensor:
    """Return ESS / n times the mean weight of each sender's completions: `[num_senders]` in (0, 1], no gradient.

    The weight is w = min(1, s), s = exp(mean_t(lp - lg)) the sequence ratio, over all completions, good and bad:

        share = (sum w)^2 / (n sum w^2) * sum w / n

    The first factor, Kish's effective sample size, depends only on the ratios of the weights: equally unlikely
    completions give 1. The second factor, the mean weight, measures how unlikely they are. Without the cap of w at 1,
    one likelier completion would make all others look unlikely. So a peer with the same model has exactly 1.
    """
    log_ratio = batch.sequence_mean(batch.first_pass_logprobs - batch.behaviour_logprobs)
    weight = torch.exp(log_ratio.clamp(-SEQUENCE_LOG_RATIO_LIMIT, 0.0))
    total, squares, num_rows = (
        group_sum(values, batch.sender_index, batch.num_senders)
        for values in (weight, weight.square(), torch.ones_like(weight))
    )
    return total**3 / (num_rows**2 * squares)


def second_moment_mask(batch: Batch, threshold: float) -> Tensor:
    """Return M2PO's mask `[N, T]`: true for the largest set of smallest (lp - lg)^2 whose mean is below `threshold`.

    The running mean of ascending values never falls, so the set is a prefix of the sorted tokens.
    """
    squares = (batch.learner_logprobs.detach() - batch.behaviour_logprobs).square()
    ascending, order = torch.where(batch.mask, squares, math.inf).flatten().sort(stable=True)
    counts = torch.arange(1, len(ascending) + 1, device=ascending.device)
    is_trusted = ascending.cumsum(0) / counts < threshold
    return torch.zeros_like(is_trusted).scatter(0, order, is_trusted).view_as(batch.mask)


def accepted(batch: Batch, threshold: float) -> Batch:
    """Return the batch with accepted tokens in the mask, and log(mu a) for their behaviour log-probs.

    `threshold` is lambda. `num_tokens` still counts all tokens.
    """
    log_share = (first_pass_log_ratio(batch) - math.log(threshold)).clamp(max=0.0)
    mask = batch.mask & (uniform_numbers(batch) < log_share.exp())
    return replace(
        batch,
        mask=mask,
        learner_logprobs=torch.where(mask, batch.learner_logprobs, 0.0),
        first_pass_logprobs=torch.where(mask, batch.first_pass_logprobs, 0.0),
        behaviour_logprobs=torch.where(mask, batch.behaviour_logprobs + log_share, 0.0),
    )


def uniform_numbers(batch: Batch) -> Tensor:
    """Return a number in (0, 1) for each token, `[N, T]` float64."""
    bits = batch.behaviour_logprobs.contiguous().view(torch.int64)
    places = places_in(batch.group_index, batch.num_groups)
    columns = torch.arange(batch.mask.shape[1], device=bits.device)
    state = _mixed(_mixed(batch.group_ids & WORD) ^ ((batch.group_ids >> 32) & WORD))
    state = _mixed(state ^ places)[:, None]
    for word in (columns[None, :], bits & WORD, (bits >> 32) & WORD):
        state = _mixed(state ^ word)
    return (state.double() + 0.5) / 2**32


def _mixed(values: Tensor) -> Tensor:
    """Return 32-bit words with every bit spread over all others: the finalizer of MurmurHash3 (Appleby)."""
    values = ((values ^ (values >> 16)) * 0x85EBCA6B) & WORD
    values = ((values ^ (values >> 13)) * 0xC2B2AE35) & WORD
    return values ^ (values >> 16)


def apply_filter(batch: Batch, settings: Settings, *, filtered: bool) -> tuple[Tensor, Tensor, Batch]:
    """Return KL_i `[N]` by the chosen estimator, bool `[N]`, true for kept completions, and the objective's batch.

    All completions are kept if not `filtered`, and with `obrs`, which masks tokens in the batch instead.
    """
    kl = sequence_kl(batch, settings.kl_estimator)
    all_kept = torch.ones_like(kl, dtype=torch.bool)
    if filtered and settings.filter == "obrs":
        return kl, all_kept, accepted(batch, settings.obrs_lambda)
    return kl, _kept(batch, settings, kl) if filtered else all_kept, batch


def _kept(batch: Batch, settings: Settings, kl: Tensor) -> Tensor:
    if settings.filter == "kl":
        return keep_near_or_good(batch.advantages, kl, settings.kl_threshold)
    if settings.filter == "positives":
        return batch.is_own | (batch.advantages >= 0)
    if settings.filter == "ess":
        return keep_nearest(batch, kl, effective_share(batch), rank_own=settings.rank_own)
    if settings.filter == "quantile":
        share = kl.new_full((batch.num_senders,), settings.keep_share)
        return keep_nearest(batch, kl, share, rank_own=settings.rank_own)
    rule = load_filter(settings.filter)
    assert rule is not None, "make_settings has checked the name"
    return rule(batch, settings)
