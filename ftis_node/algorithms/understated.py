"""Log-probs that no honest sampling brings about: the learner finds the completion far likelier than its sender says.

Whoever sampled y from a policy mu and reports log mu(y) as it is cannot often be told by another policy that y was much
likelier. For any policy pi the ratio M_n = pi(y_1..n) / mu(y_1..n) is a martingale, or less, with mean 1 under mu,
token by token, so by Ville's inequality (J. Ville, Etude critique de la notion de collectif, 1939; for a fixed n it is
Markov's)

    P( max over n of log M_n >= t ) <= e^-t

whatever the two models are, however far apart, and however many tokens y has. The same holds of the tokens from any
place s on. With weights that add up to 1, a half for s = 0 and the other half shared by the T - 1 later places, the
bounds add up (Boole's inequality):

    P( max over s, n of log (M_n / M_s) + log w_s >= t ) <= e^-t

At t = 16 that is one honest completion in nine million. A sender who understates its log-probs, so that the importance
weight is as large as the cap lets it be, exceeds t within a few tokens; to overstate others, before, behind or between
them, does not hide it, as the sum over the whole completion would have let it. The bound needs mu to be what was
sampled from: a cut distribution (top_p, top_k) with the log-probs of the whole softmax is not.

The opposite cannot be bounded so: log-probs that are too high only make weights small.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

HALF = math.log(2.0)


def likelihood_gain(learner_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The largest log pi(part) - log mu(part) over all unbroken parts of each completion, in nats.

    Less log 2 for a part that begins with the completion, log 2 (T - 1) for any other of T tokens: then it is at least
    t with a chance of e^-t at most. `[N, T]` three times, to `[N]` float64 without gradient.
    """
    gains = learner_logprobs.detach().double() - behaviour_logprobs.double()
    sums = torch.where(mask, gains, 0.0).cumsum(dim=1)
    if not sums.shape[1]:
        return sums.new_full((len(sums),), -HALF)
    from_the_start = sums.amax(dim=1) - HALF
    if sums.shape[1] == 1:
        return from_the_start
    lowest = sums[:, :-1].cummin(dim=1).values
    num_starts = (mask.sum(dim=1) - 1).clamp(min=1)
    from_later = (sums[:, 1:] - lowest).amax(dim=1) - HALF - num_starts.double().log()
    return torch.maximum(from_the_start, from_later)
