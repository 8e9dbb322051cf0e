"""Mixture of language models: their next-token probabilities, weighted by each model's likelihood of the text.

D is the expert whose domain the text belongs to, and J experts share one tokenizer. The formulas are those of DEMix
(arXiv 2108.05036, "Mixing experts at inference time"). The first one is also in c-BTM (arXiv 2303.14177). HDEE (arXiv
2502.19385) uses experts of different sizes.

    p(x_t | x_<t) = sum_j p(D = j | x_<t) p_j(x_t | x_<t)                   the mixture
    p(D = j | x_<t) = p(D = j) p_j(x_<t) / sum_i p(D = i) p_i(x_<t)         Bayes: the posterior

All values are in nats, in the log domain and in float64. After a thousand tokens the likelihoods are far below the
range of a float.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mixture_logprobs(expert_logprobs: Tensor, log_posterior: Tensor) -> Tensor:
    """Return `[..., V]` log-probs of the mixture of `[J, ..., V]` log-softmaxed `expert_logprobs`.

    `log_posterior` is `[J, ...]`. log p(x) = logsumexp over j of (log p(D = j) + log p_j(x)); it is -inf if every
    expert with a weight excludes x.
    """
    return torch.logsumexp(expert_logprobs.double() + log_posterior.double()[..., None], dim=0)


def posterior(log_prior: Tensor, sequence_logprobs: Tensor) -> Tensor:
    """Return `[J, ...]` log p(D = j | x), from `[J]` log p(D = j), maybe unnormalized, and `[J, ...]` log p_j(x).

    The result is the prior if every expert with a weight excludes the text: Bayes' rule is 0 / 0 there.
    """
    prior = log_prior.double().reshape(-1, *[1] * (sequence_logprobs.dim() - 1)).expand_as(sequence_logprobs)
    joint = prior + sequence_logprobs.double()
    is_possible = torch.isfinite(joint).any(dim=0)
    return torch.where(is_possible, joint, prior).log_softmax(dim=0)
