"""Detection of understated log-probs: the learner finds a completion far likelier than its sender claims.

Suppose a sender samples y from a policy mu and reports log mu(y) correctly. Another policy then rarely finds y much
likelier. For any policy pi the ratio M_n = pi(y_1..n) / mu(y_1..n) is a martingale or supermartingale, token by token,
with mean at most 1 under mu. By Ville's inequality (J. Ville, Etude critique de la notion de collectif, 1939; for a
fixed n it is Markov's)

    P( max over n of log M_n >= t ) <= e^-t

for any two models, at any distance, and any number of tokens. The same bound holds for the tokens from any position s
on. Give the positions weights that sum to 1: a half for s = 0, the other half shared by the T - 1 later ones. Then the
bounds add up (Boole's inequality):

    P( max over s, n of log (M_n / M_s) + log w_s >= t ) <= e^-t

At t = 16 that is one honest completion in nine million. A sender may understate its log-probs to raise the importance
weight to the cap; it then exceeds t within a few tokens. It cannot hide this by overstating other tokens: the maximum
is over all contiguous parts, not the whole completion. The bound requires that mu is the sampling distribution. A
truncated distribution (top_p, top_k) with the log-probs of the whole softmax violates this.

No such bound exists in the other direction. Overstated log-probs only make weights small.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

HALF = math.log(2.0)


def likelihood_gain(learner_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the largest log pi(part) - log mu(part) over all contiguous parts of each completion, in nats.

    The function subtracts log 2 from a part that begins at the first token, and log 2 (T - 1) from any other part of a
    completion of T tokens. An honest completion then reaches t with a probability of at most e^-t. Three inputs `[N,
    T]`, result `[N]` in float64 without gradient.
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
