"""Diagnostics of a step's completions by sender, and detection of understated log-probs.

The *weight* w of a completion is the factor of its advantage in the gradient, the mean over its tokens. It is 1 for
`nois`, the mean of min(rho, C) for `tis`, s for `gspo`. It is the slope of the objective for A = 1 (A = -1 if A < 0),
so no method needs code for it. A completion is *trained* if the filter kept it and A is not 0. The effective sample
size of those is (sum w)^2 / sum w^2 (A. Kong, "A note on importance sampling using standardized weights", 1992).

Log-probs are understated if the learner finds a completion far likelier than its sender claims. Suppose a sender
samples y from a policy mu and reports log mu(y) correctly. For any policy pi the ratio M_n = pi(y_1..n) / mu(y_1..n) is
a martingale or supermartingale, token by token, with mean at most 1 under mu. By Ville's inequality (J. Ville, Etude
critique de la notion de collectif, 1939)

    P( max over n of log M_n >= t ) <= e^-t

for any two models and any number of tokens. The same bound holds for the tokens from any position s on. Give the
positions weights that sum to 1: a half for s = 0, the other half shared by the T - 1 later ones. Then the bounds add up
(Boole's inequality):

    P( max over s, n of log (M_n / M_s) + log w_s >= t ) <= e^-t

At t = 16 that is one honest completion in nine million. A sender that understates its log-probs to raise the importance
weight exceeds t within a few tokens. It cannot hide this by overstating other tokens: the maximum is over all
contiguous parts. The bound requires that mu is the sampling distribution. A truncated distribution (top_p, top_k) with
the log-probs of the whole softmax violates this. Overstated log-probs have no such bound; they only make weights small.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ftis_node.algorithms.batch import Batch, group_sum, read_batch
from ftis_node.algorithms.filters import apply_filter
from ftis_node.algorithms.importance_weights import token_log_ratio
from ftis_node.algorithms.methods import Method, find_method
from ftis_node.algorithms.settings import Settings, make_settings

HALF = math.log(2.0)


def likelihood_gain(learner_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the largest log pi(part) - log mu(part) over all contiguous parts of each completion, in nats.

    A part that begins at the first token counts less log 2, any other part of a completion of T tokens less
    log 2 (T - 1). Three inputs `[N, T]`, result `[N]` in float64 without gradient.
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


def sender_sums(
    method: str,
    learner_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    sender_ids: Tensor,
    *,
    num_senders: int,
    of_own_weights: Tensor | None = None,
    is_text: Tensor | None = None,
    text_weights: Tensor | None = None,
    **params: Any,
) -> dict[str, Tensor]:
    """Return statistics of the first pass over a batch for each of S senders, float64 `[S]`.

    The first five tensors and `params` are as in `policy_loss`; `sender_ids` `[N]` are integers in 0..S-1, 0 for this
    node's own. Filter and objective treat rows of `of_own_weights` `[N]` as own, too. Rows of `is_text` `[N]` have no
    log-probs of their sender: pass the learner's own as `behaviour_logprobs`, and their weights `[N]` as `text_weights`
    (`importance_weights.py`). Raises ValueError as `policy_loss` does.

        groups, groups_with_signal          groups, and those with an advantage that is not 0
        completions, negatives              completions, and those with A < 0
        kept, kept_negatives                of these, those that the filter kept
        trained, clipped                    kept with A not 0; of these, those without any gradient: the method's clip
                                            or mask, or `obrs`, took every token
        weight_sum, weight_square_sum       sum of w and of w^2 over `trained`
        tokens                              completion tokens
        measured, measured_tokens           completions and tokens with log-probs by their sender; over these:
        truncated_tokens                    tokens with rho > cap
        log_ratio_sum                       sum of log rho over tokens, nats; each within +-20
        kl_sum                              sum over completions of the chosen estimator's mean over tokens
    """
    row = find_method(method)
    settings = make_settings(row.defaults, params)
    if is_text is None or text_weights is None:
        is_text, text_weights = torch.zeros_like(advantages, dtype=torch.bool), torch.zeros_like(advantages)
    compared = torch.where(is_text, 0, sender_ids)  # their KL is unknown, so no filter compares them
    if of_own_weights is not None:
        compared = torch.where(of_own_weights, 0, compared)
    batch = read_batch(learner_logprobs.detach(), behaviour_logprobs, mask, advantages, group_ids, sender_ids=compared)
    kl, keep, used = apply_filter(batch, settings, filtered=row.filtered)
    advantage = batch.advantages
    keep = keep & (~is_text | (advantage > 0))
    trained = keep & (advantage != 0)
    slopes = objective_slopes(row, used, settings)
    weights = torch.where(is_text, text_weights.double(), slopes.sum(dim=1))
    weights = torch.where(trained, weights, 0.0)
    is_silent = (slopes == 0).all(dim=1) & ~is_text & (batch.num_tokens > 0)

    known = batch.mask & ~is_text[:, None]
    measured = known.any(dim=1)
    log_ratio = torch.where(known, token_log_ratio(batch), 0.0)
    rows = {
        "completions": torch.ones_like(keep),
        "negatives": advantage < 0,
        "kept": keep,
        "kept_negatives": keep & (advantage < 0),
        "trained": trained,
        "clipped": trained & is_silent,
        "weight_sum": weights,
        "weight_square_sum": weights.square(),
        "tokens": batch.num_tokens,
        "measured": measured,
        "measured_tokens": known.sum(dim=1),
        "truncated_tokens": ((log_ratio.exp() > settings.cap) & known).sum(dim=1),
        "log_ratio_sum": log_ratio.sum(dim=1),
        "kl_sum": torch.where(measured, kl, 0.0),
    }
    table = torch.stack([values.double() for values in rows.values()])
    sums = table.new_zeros(len(rows), num_senders).index_add(1, sender_ids, table)
    return dict(zip(rows, sums, strict=True)) | _group_counts(batch, sender_ids, num_senders)


def objective_slopes(row: Method, batch: Batch, settings: Settings) -> Tensor:
    """Return each token's part of its completion's weight, `[N, T]` float64; the weight is the sum over tokens, `[N]`.

    GEPO's regularizer is excluded: it affects every completion alike, whatever its advantage.
    """
    leaf = batch.learner_logprobs.detach().requires_grad_()
    signs = torch.where(batch.advantages < 0, -1.0, 1.0).double()
    with torch.enable_grad():
        probe = replace(batch, learner_logprobs=leaf, advantages=signs)
        means = batch.sequence_mean(row.objective(probe, replace(settings, k3_beta=0.0)))
        (slopes,) = torch.autograd.grad(means.sum(), leaf)
    return signs[:, None] * slopes


def _group_counts(batch: Batch, sender_ids: Tensor, num_senders: int) -> dict[str, Tensor]:
    sender_of = sender_ids.new_zeros(batch.num_groups).scatter(0, batch.group_index, sender_ids)
    num_with_advantage = group_sum((batch.advantages != 0).double(), batch.group_index, batch.num_groups)
    has_signal = (num_with_advantage > 0).double()
    return {
        "groups": group_sum(torch.ones_like(has_signal), sender_of, num_senders),
        "groups_with_signal": group_sum(has_signal, sender_of, num_senders),
    }
