"""Importance weights: the ratio of a sample's probability under the learner and under its generator, and its caps.

    token      rho_t = exp(lp_t - lg_t)                                GRPO, arXiv 2402.03300
    sequence   s_i = exp(mean_t(lp_t - lg_t))                          GSPO, arXiv 2507.18071
    sum        exp(sum_t(lp_t - lg_t)), of the whole completion    levels of `mis` and `topr`
    group      w_i = p_i / E_q, the generator's mean over one group    GEPO, arXiv 2508.17850
    first pass rho0_t = exp(lp0_t - lg_t), without gradient            F-TIS, arXiv 2605.22537
    step       R_t = exp(lp_t - lp0_t), 1 at the first pass            PPO's ratio: the change since the first pass

lp0 is lp at the first of several updates on one batch; with one update lp0 = lp. An objective has either rho, or rho0
as a weight of R: rho = rho0 R. With rho as a weight of R the change since the first pass would count twice.

Every function is also defined at padding, where rho = 1, so `aggregate` can apply the mask once.

Departures. Token log-ratios are clamped to +-20, which changes no ratio below a cap of 2. Sequence log-ratios follow
the papers; their only upper bound prevents an overflow of float32. GEPO's p and q are geometric means of the token
probabilities, as in its authors' code. The paper writes the probability of the whole sequence, which underflows. The
defensive mix `alpha` bounds its weight at the first pass by 1 / alpha; 0, the default, is the plain form.

Token ratios do not exist for completions of a peer with another tokenizer. The receiver re-tokenizes the text. Two
values remain: the ratio of the geometric means, each under its own tokenizer, and the sign of the advantage. The
distance to the generator is unknown, so only completions with A > 0 are kept. This goes beyond the F-TIS paper; GRAFT
and HACPO (arXiv 2603.02604) study similar methods. The weight is one number per completion, multiplied into the
advantage. Behaviour log-probs are then the learner's own at the first pass: rho0 is 1 and the KL 0. So `nois`, `tis`
and `ftis` compute keep * min(s0, C) * R * A, with s0 the ratio of the means at the first pass.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ftis_node.algorithms.batch import Batch, group_logsumexp

TOKEN_LOG_RATIO_LIMIT = 20.0
SEQUENCE_LOG_RATIO_LIMIT = 80.0  # exp(80) = 5.5e34: a loss of many such terms is still finite in float32


def cross_tokenizer_advantages(
    learner_mean_logprobs: Tensor, behaviour_mean_logprobs: Tensor, advantages: Tensor, *, cap: float = 2.0
) -> Tensor:
    """Return A_i * min(exp(mean lp - mean lg), cap) if A_i > 0, else 0: `[N]`, without gradient.

    All three are finite and `[N]`. A mean log-prob is over a completion's tokens, each side's under its own tokenizer.
    """
    log_ratio = learner_mean_logprobs.detach().double() - behaviour_mean_logprobs.detach().double()
    # Capped before the exponential, which would overflow for a distant pair of models.
    weights = torch.exp(log_ratio.clamp(max=math.log(cap)))
    exact = advantages.detach().double()
    return torch.where(exact > 0, weights * exact, 0.0).to(advantages.dtype)


def token_log_ratio(batch: Batch) -> Tensor:
    """Return log rho, clamp(lp - lg, -20, 20), `[N, T]`. Its gradient is 1 inside the clamp and 0 beyond."""
    return _clamped(batch.learner_logprobs - batch.behaviour_logprobs)


def token_ratio(batch: Batch) -> Tensor:
    """Return rho, `[N, T]`, with a gradient."""
    return torch.exp(token_log_ratio(batch))


def first_pass_log_ratio(batch: Batch) -> Tensor:
    """Return log rho0, clamp(lp0 - lg, -20, 20), `[N, T]` without gradient."""
    return _clamped(batch.first_pass_logprobs - batch.behaviour_logprobs)


def first_pass_ratio(batch: Batch) -> Tensor:
    """Return rho0, `[N, T]` without gradient: the ratio for weights and masks of an objective that has R."""
    return torch.exp(first_pass_log_ratio(batch))


def step_ratio(batch: Batch) -> Tensor:
    """Return R = exp(lp - lp0), `[N, T]`: 1 at the first pass over a batch, where R only carries the gradient."""
    return torch.exp(_clamped(batch.learner_logprobs - batch.first_pass_logprobs))


def truncated(ratio: Tensor, cap: float) -> Tensor:
    """Return sg[min(ratio, cap)]. F-TIS has no lower bound: an unlikely token may weigh almost 0."""
    return ratio.detach().clamp(max=cap)


def masked_outside(ratio: Tensor, low: float, high: float) -> Tensor:
    """Return sg[ratio] inside [low, high] and 0 elsewhere (IcePop), instead of truncating."""
    weight = ratio.detach()
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def sequence_ratio(batch: Batch, old_logprobs: str = "engine") -> Tensor:
    """Return s = exp(mean_t(lp - lg)), `[N, 1]`, with a gradient: the geometric mean of the token ratios.

    With `old_logprobs` "learner", s of this node's own completions is exp(mean_t(lp - lp0)), 1 at the first pass.
    """
    old = batch.behaviour_logprobs
    if old_logprobs == "learner":
        old = torch.where(batch.is_own[:, None], batch.first_pass_logprobs, old)
    return _bounded_exp(batch.sequence_mean(batch.learner_logprobs - old))


def sequence_product(batch: Batch) -> Tensor:
    """Return exp(sum_t(lp - lg)), `[N, 1]`, with a gradient: the ratio of the whole sequences' probabilities."""
    return _bounded_exp((batch.learner_logprobs - batch.behaviour_logprobs).sum(dim=1))


def first_pass_ratio_at(batch: Batch, level: str) -> Tensor:
    """Return rho0 `[N, T]` for `token`, s0 or exp(sum) `[N, 1]` for `seq_mean` or `seq_sum`; no gradient."""
    if level == "token":
        return first_pass_ratio(batch)
    first = replace(batch, learner_logprobs=batch.first_pass_logprobs)
    return sequence_ratio(first) if level == "seq_mean" else sequence_product(first)


def group_expectation_ratio(batch: Batch, alpha: float) -> Tensor:
    """Return w = p / ((1 - alpha) E_q + alpha p0), `[N, 1]`; the gradient flows through the numerator alone.

    p0 is p at the first pass, so all updates on a batch have the same denominator. p and q are exp(mean log-prob) of
    learner and generator, and log E_q = logsumexp(2 log q) - logsumexp(log q) over the group: the mean of q, weighted
    by q. A group must be one generator's completions of one prompt, even if advantages are pooled over several
    generators. Completions without tokens do not count in E_q.
    """
    has_tokens = batch.num_tokens > 0
    log_p, log_p0 = batch.sequence_mean(batch.learner_logprobs), batch.sequence_mean(batch.first_pass_logprobs)
    log_q = torch.where(has_tokens, batch.sequence_mean(batch.behaviour_logprobs), -math.inf)
    log_total = group_logsumexp(log_q, batch.group_index, batch.num_groups)
    log_total_of_squares = group_logsumexp(2 * log_q, batch.group_index, batch.num_groups)
    log_expected = (log_total_of_squares - log_total)[batch.group_index]
    # In a group without tokens log E_q is NaN. It is never used, but would reach the backward pass.
    log_expected = torch.where(has_tokens, log_expected, 0.0)
    log_denominator = torch.logaddexp(_log(1 - alpha) + log_expected, _log(alpha) + log_p0)
    return _bounded_exp(log_p - log_denominator)


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-TOKEN_LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a sequence log-ratio `[N]`, as a column `[N, 1]` that broadcasts over tokens."""
    return torch.exp(log_ratio.clamp(max=SEQUENCE_LOG_RATIO_LIMIT))[:, None]


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf
