"""Log-probs that no honest sampling brings about: the learner finds the completion far likelier than its sender says.

Whoever sampled y from a policy mu and reports log mu(y) as it is cannot often be told by another policy that y was much
likelier: the mean of pi(y) / mu(y) over y ~ mu is at most 1 for *any* pi, so by Markov's inequality

    P( log pi(y) - log mu(y) >= t ) <= e^-t

whatever the two models are, however far apart, and however many tokens y has. At t = 16 that is one honest completion
in nine million. A sender who understates its log-probs, so that the importance weight is as large as the cap lets
it be, exceeds t within a few tokens. The bound needs mu to be what was sampled from: a cut distribution (top_p, top_k)
with the log-probs of the whole softmax is not.

The opposite cannot be bounded so: log-probs that are too high only make weights small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def likelihood_gain(learner_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi(y) - log mu(y) of each completion, in nats: `[N, T]` three times, to `[N]` float64 without gradient."""
    gains = learner_logprobs.detach().double() - behaviour_logprobs.double()
    return torch.where(mask, gains, 0.0).sum(dim=1)
