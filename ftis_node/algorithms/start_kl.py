"""KL term between the learner and the model that it started from, as GRPO adds it to its loss.

DeepSeekMath (arXiv 2402.03300, eq. 4) estimates KL(learner || start) at each token by k3, r - log r - 1 with r =
pi_start / pi. The gradient flows through it. As in the paper, tokens are weighted as if the learner had sampled them.
The term needs no behaviour log-probs. So it also covers completions that a filter removed, or that a peer sent as text.

Each token's term has a constant weight that depends on the mask alone, so callers may split the sum in any way.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats; the exponential and its gradient stay constant beyond it


def kl_to_start(
    learner_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    agg: str,
    max_completion_length: int | None = None,
) -> Tensor:
    """Return k3 of `[N, T]` log-probs over the tokens in `mask`, averaged by `agg`: a float64 scalar, nats a token.

    The gradient goes to `learner_logprobs` alone and is exactly 0 outside the mask, whatever the values there are.
    """
    learner = torch.where(mask, learner_logprobs, 0.0).double()
    log_ratios = torch.where(mask, reference_logprobs, 0.0).double() - learner.detach()
    excess = torch.expm1(log_ratios.clamp(max=MAX_LOG_RATIO))  # pi_start / pi - 1, exact for small values
    # d/dlp [exp(ref - lp) - (ref - lp) - 1] = 1 - exp(ref - lp)
    per_token = (excess - log_ratios) - excess * (learner - learner.detach())
    return (per_token * _token_weights(mask, agg, max_completion_length)).sum()


def _token_weights(mask: Tensor, agg: str, max_completion_length: int | None) -> Tensor:
    """Return `[N, T]` float64, the weight of each token: the constants of `aggregate.py` with every completion kept."""
    inside, num_tokens = mask.double(), mask.sum(dim=1, keepdim=True).clamp(min=1)
    if agg == "token_mean":
        return inside / mask.sum().clamp(min=1)
    num_completions = max(1, mask.shape[0])
    if agg == "max_len":
        assert max_completion_length is not None  # settings.py refuses `max_len` without it
        return inside / (num_completions * max_completion_length)
    return inside / (num_completions * num_tokens)
