"""What a learner leaves out: whole completions that are far and bad (F-TIS), and single outlier tokens (M2PO).

F-TIS (arXiv 2605.22537) keeps a completion if A > 0 or KL < g. Pushing down what one's own policy would hardly say
moves probability to nowhere in particular; pulling up a good answer is useful from however far it comes.

The KL is estimated from the very tokens that were sampled, by the generator. With x = log rho = lp - lg:

    author_k3   1/rho + log rho - 1     chi2(gen||learner) - KL(gen||learner), heavy tailed; what the F-TIS authors'
                                        code computes, and so the scale of the paper's thresholds (5 to 100)
    k1_fwd      lg - lp                 KL(gen||learner); a single value may be negative
    k3_fwd      rho - log rho - 1       KL(gen||learner); never negative, small variance
    rkl_iw      rho log rho - rho + 1   KL(learner||gen), the quantity that the paper names

A threshold means nothing without its estimator: the two are set together.

M2PO (arXiv 2510.01161) masks the tokens of largest (lp - lg)^2 until the mean of the rest is below tau. Departure: all
tokens take part; the paper's second version counts only those where PPO's clip could act, A > 0 with rho > 1 and A < 0
with rho < 1. Where even the smallest square is not below tau nothing is left; some implementations keep one token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftis_node.algorithms.weights import token_log_ratio

if TYPE_CHECKING:
    from ftis_node.algorithms.batch import Batch

KL_ESTIMATORS = ("author_k3", "k1_fwd", "k3_fwd", "rkl_iw")


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


def second_moment_mask(batch: Batch, threshold: float) -> Tensor:
    """M2PO's tokens: bool `[N, T]`, true at the largest set of smallest (lp - lg)^2 whose mean is below `threshold`.

    The running mean of ascending values never falls, so the set is a prefix of the sorted tokens.
    """
    squares = (batch.learner_logprobs.detach() - batch.behaviour_logprobs).square()
    ascending, order = torch.where(batch.mask, squares, math.inf).flatten().sort(stable=True)
    counts = torch.arange(1, len(ascending) + 1, device=ascending.device)
    is_trusted = ascending.cumsum(0) / counts < threshold
    return torch.zeros_like(is_trusted).scatter(0, order, is_trusted).view_as(batch.mask)
