"""Importance weights for completions of a peer with another tokenizer, whose tokens do not correspond to ours.

Token ratios do not exist across vocabularies. The receiver re-tokenizes the text, and two values remain. One is the
ratio of the two geometric means, each under its own tokenizer. The other is the sign of the advantage. The distance to
the generator is unknown. The filter treats it as large and keeps only completions with A > 0. This goes beyond the
F-TIS paper; GRAFT and HACPO (arXiv 2603.02604) study similar methods.

The weight is one number per completion, so the caller can multiply it into the advantage. A batch may then mix such
completions with ordinary ones. Pass these advantages and, as behaviour log-probs, the learner's own (detached). The
token ratio is then 1 and the KL 0, so `nois`, `tis` and `ftis` compute keep * min(s, C) * R * A.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ftis_node.algorithms.checks import FLOATING, require_finite, require_tensor


def cross_tokenizer_advantages(
    learner_mean_logprobs: Tensor, behaviour_mean_logprobs: Tensor, advantages: Tensor, *, cap: float = 2.0
) -> Tensor:
    """Return A_i * min(exp(mean lp - mean lg), cap) if A_i > 0, else 0: `[N]`, in the dtype of `advantages`, no
    gradient.

    All three are `[N]`, float32 or float64. A mean log-prob is over a completion's tokens, each side's under its own
    tokenizer. Raises ValueError for a wrong shape or dtype, a non-finite value, or a `cap` that is not > 0.
    """
    if math.isnan(cap) or cap <= 0:
        raise ValueError(f"cap must be a number > 0, not {cap!r}")
    num_completions = advantages.shape[0] if isinstance(advantages, Tensor) and advantages.dim() == 1 else 0
    named = {
        "advantages": advantages,
        "learner_mean_logprobs": learner_mean_logprobs,
        "behaviour_mean_logprobs": behaviour_mean_logprobs,
    }
    for name, value in named.items():
        require_tensor(name, value, dtypes=FLOATING, shape=(num_completions,))
        require_finite(name, value)
    log_ratio = learner_mean_logprobs.detach().double() - behaviour_mean_logprobs.detach().double()
    # Capped before the exponential, which would overflow for a distant pair of models.
    weights = torch.exp(log_ratio.clamp(max=math.log(cap)))
    exact = advantages.detach().double()
    return torch.where(exact > 0, weights * exact, 0.0).to(advantages.dtype)
