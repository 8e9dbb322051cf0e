"""The mismatch between engine and learner on the same tokens under the same weights.

The engine reports the log-prob of each token that it samples, and the learner recomputes it. If both were exact they
would be equal, and an importance ratio would compare two policies only. Their difference (another kernel, number format
or softmax, or old weights) enters every ratio that the learner computes.

The KL is estimated by k3 of J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). With samples
from q, and r = p / q, the mean of (r - 1) - log r is an unbiased estimate of KL(q || p). Each of its terms is >= 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_RATIO_ERROR = 0.01
MAX_LOG_RATIO = 20.0  # nats; the losses clamp log-ratios to the same bound


@dataclass(frozen=True, slots=True)
class Mismatch:
    """`kl` is KL(engine || learner) in nats a token, `share` the share of tokens whose ratio differs from 1 by more
    than 1 %.
    """

    kl: float
    share: float
    num_tokens: int


def measure_mismatch(learner_logprobs: Tensor, engine_logprobs: Tensor) -> Mismatch | None:
    """Return the mismatch over K tokens that the engine sampled, from both log-probs `[K]` under the same weights.

    Returns None if there is no token, or a log-prob that is not finite.
    """
    log_ratios = learner_logprobs.double() - engine_logprobs.double()
    if not log_ratios.numel() or not bool(log_ratios.isfinite().all()):
        return None
    log_ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    errors = torch.expm1(log_ratios)  # r - 1, exact for small values
    return Mismatch(
        kl=float((errors - log_ratios).mean()),
        share=float((errors.abs() > MAX_RATIO_ERROR).double().mean()),
        num_tokens=log_ratios.numel(),
    )
