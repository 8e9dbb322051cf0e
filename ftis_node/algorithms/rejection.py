"""Optimal budgeted rejection sampling of tokens, at the receiver: the filter `obrs`.

Jackpot (arXiv 2602.06107, eq. 3 to 5; authors' PDF in Infini-AI-Lab/jackpot) accepts a token with probability

    a = min(1, rho0 / lambda),  rho0 = pi / mu at the first pass

and masks the others. Accepted tokens follow mu a / Z, which is nearer to pi than mu is. Their ratio to pi is
Z rho0 / a = Z max(rho0, lambda); the paper truncates it. Here the ratio of an accepted token is rho0 / a, so `ftis`
weighs it by min(max(rho0, lambda), C), `f-vis` clips it, and `f-nois` ignores it.

Departures. Z needs the whole vocabulary, which a group does not have. Means here divide by all tokens, rejected ones
included. So Z cancels: without truncation, the mean of rho0 / a over accepted tokens, times their share Z, is unbiased.
The sender's model is not trained here, so its two losses are omitted.

The random numbers are hashes of the group's id, the completion's place in the group, the column, and the sender's
log-prob. So a repeated step, and every update on a batch, accepts the same tokens on any device. The
sender controls or guesses all four. So the learner adds a number to the ids that its peers do not know.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ftis_node.algorithms.batch import Batch, places_in
from ftis_node.algorithms.importance_weights import first_pass_log_ratio

WORD = 0xFFFFFFFF


def accepted(batch: Batch, threshold: float) -> Batch:
    """Return the batch with accepted tokens in the mask, and log(mu a) for their behaviour log-probs.

    `threshold` is lambda. `num_tokens` still counts all tokens.
    """
    log_share = (first_pass_log_ratio(batch) - math.log(threshold)).clamp(max=0.0)
    mask = batch.mask & (uniform_numbers(batch) < log_share.exp())
    return replace(
        batch,
        mask=mask,
        learner_logprobs=torch.where(mask, batch.learner_logprobs, 0.0),
        first_pass_logprobs=torch.where(mask, batch.first_pass_logprobs, 0.0),
        behaviour_logprobs=torch.where(mask, batch.behaviour_logprobs + log_share, 0.0),
    )


def uniform_numbers(batch: Batch) -> Tensor:
    """Return a number in (0, 1) for each token, `[N, T]` float64."""
    bits = batch.behaviour_logprobs.contiguous().view(torch.int64)
    places = places_in(batch.group_index, batch.num_groups)
    columns = torch.arange(batch.mask.shape[1], device=bits.device)
    state = _mixed(_mixed(batch.group_ids & WORD) ^ ((batch.group_ids >> 32) & WORD))
    state = _mixed(state ^ places)[:, None]
    for word in (columns[None, :], bits & WORD, (bits >> 32) & WORD):
        state = _mixed(state ^ word)
    return (state.double() + 0.5) / 2**32


def _mixed(values: Tensor) -> Tensor:
    """Return 32-bit words with every bit spread over all others: the finalizer of MurmurHash3 (Appleby)."""
    values = ((values ^ (values >> 16)) * 0x85EBCA6B) & WORD
    values = ((values ^ (values >> 13)) * 0xC2B2AE35) & WORD
    return values ^ (values >> 16)
