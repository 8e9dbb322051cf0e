"""Operations on several models' log-probs of the same tokens, on plain numbers, for callers without tensors.

All values are in nats. A likelihood here is the sum of the log-probs of a text's tokens after its first one.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import torch

from ftis_node.algorithms import cached_prior, posterior, text_logprobs, uniform_prior
from ftis_node.generation.engines.mixture_decoder import MixtureWeights

if TYPE_CHECKING:
    from collections.abc import Sequence


def uniform_mixture_weights(num_experts: int, *, learns: bool = True, reads_prompt: bool = True) -> MixtureWeights:
    """Return a uniform prior; without `learns` the mixture is the plain mean of probabilities."""
    return MixtureWeights((-log(num_experts),) * num_experts, learns=learns, reads_prompt=reads_prompt)


def cached_mixture_weights(likelihoods: Sequence[Sequence[float]], *, decay: float) -> MixtureWeights:
    """Return the prior from the J likelihoods of each of N texts, of which the last weighs most; see
    `algorithms.cached_prior`.
    """
    texts = torch.tensor(likelihoods, dtype=torch.float64)
    log_posteriors = posterior(uniform_prior(texts.shape[1]), texts.T).T
    return MixtureWeights(tuple(cached_prior(log_posteriors, decay).tolist()))


def mixture_nats(windows: Sequence[Sequence[Sequence[float]]], weighing: MixtureWeights) -> float:
    """Return the negative log-likelihood of a text under the mixture.

    `windows` has, for each window of the text, the experts' log-probs of its tokens; each window starts at the prior.
    """
    log_prior = torch.tensor(weighing.log_prior, dtype=torch.float64)
    return -sum(
        float(text_logprobs(torch.tensor(window, dtype=torch.float64), log_prior, learns=weighing.learns).sum())
        for window in windows
    )
