"""The validated inputs of a loss.

`read_batch` does two things that keep the formulas simple. It replaces padding, which may hold anything including NaN,
by 0 *before* the first exponential. A mask applied afterwards would still propagate NaN backwards (0 * inf).

All values are float64. The k3 estimate of two nearly equal policies is 5e-7 at a difference of 1e-3, and the filter
compares it with a threshold. With float32 log-probs the rounding of rho - 1 would hide it. The matrix is small compared
with the logits that it came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ftis_node.algorithms.checks import FLOATING, INTEGERS, require_finite, require_tensor
from ftis_node.algorithms.groups import group_index


@dataclass(frozen=True, slots=True)
class Batch:
    """N completions of at most T tokens. Float tensors are float64; outside the mask they hold 0.

    learner_logprobs    [N, T]  lp; the only tensor with a gradient
    behaviour_logprobs  [N, T]  lg, of the generator that sampled the tokens
    anchor_logprobs     [N, T]  the learner's own at the first pass over this batch; equal to lp there
    mask                [N, T]  bool, true at completion tokens, the end-of-sequence token included
    advantages          [N]     A
    group_index         [N]     position of each completion's group in 0..num_groups-1
    sender_index        [N]     position of each completion's sender in 0..num_senders-1
    is_own              [N]     bool, by this node itself: sender id 0
    num_tokens          [N]     L, the tokens inside the mask; may be 0
    """

    learner_logprobs: Tensor
    behaviour_logprobs: Tensor
    anchor_logprobs: Tensor
    mask: Tensor
    advantages: Tensor
    group_index: Tensor
    num_groups: int
    sender_index: Tensor
    num_senders: int
    is_own: Tensor
    num_tokens: Tensor

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` `[N, T]` over the tokens of each completion, `[N]`; 0 for a completion without
        tokens.
        """
        return torch.where(self.mask, values, 0.0).sum(dim=1) / self.num_tokens.clamp(min=1)


def read_batch(
    learner_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    anchor_logprobs: Tensor | None = None,
    sender_ids: Tensor | None = None,
) -> Batch:
    """Check the inputs of `policy_loss` and return a `Batch` of them. Raises ValueError naming the invalid input.

    `sender_ids` are integers `[N]`, 0 for this node's own completions. If None, each group counts as a separate sender,
    and none of them is this node.

    Log-probs must be finite inside the mask. A positive one is *not* refused: rounding produces some, and the loss is
    defined for them. Validation (`ftis_node/validation`) checks a peer's values before they reach this function.
    """
    is_matrix = isinstance(learner_logprobs, Tensor) and learner_logprobs.dim() == 2
    num_completions, num_columns = learner_logprobs.shape if is_matrix else (0, 0)
    matrix = (num_completions, num_columns)
    require_tensor("learner_logprobs", learner_logprobs, dtypes=FLOATING, shape=matrix)
    require_tensor("behaviour_logprobs", behaviour_logprobs, dtypes=FLOATING, shape=matrix)
    require_tensor("mask", mask, dtypes=(torch.bool,), shape=matrix)
    require_tensor("advantages", advantages, dtypes=FLOATING, shape=(num_completions,))
    require_tensor("group_ids", group_ids, dtypes=INTEGERS, shape=(num_completions,))
    require_finite("advantages", advantages)

    learner = _inside("learner_logprobs", learner_logprobs, mask)
    if anchor_logprobs is None:
        anchor = learner.detach()
    else:
        require_tensor("anchor_logprobs", anchor_logprobs, dtypes=FLOATING, shape=matrix)
        anchor = _inside("anchor_logprobs", anchor_logprobs, mask).detach()
    index, num_groups = group_index(group_ids)
    sender_index, num_senders, is_own = index, num_groups, torch.zeros_like(index, dtype=torch.bool)
    if sender_ids is not None:
        require_tensor("sender_ids", sender_ids, dtypes=INTEGERS, shape=(num_completions,))
        sender_index, num_senders = group_index(sender_ids)
        is_own = sender_ids == 0
    return Batch(
        learner_logprobs=learner,
        behaviour_logprobs=_inside("behaviour_logprobs", behaviour_logprobs, mask).detach(),
        anchor_logprobs=anchor,
        mask=mask,
        advantages=advantages.detach().double(),
        group_index=index,
        num_groups=num_groups,
        sender_index=sender_index,
        num_senders=num_senders,
        is_own=is_own,
        num_tokens=mask.sum(dim=1),
    )


def _inside(name: str, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `logprobs` in float64 with 0 and a zero gradient outside the mask. Raises ValueError for NaN and inf
    inside.
    """
    inside = torch.where(mask, logprobs, 0.0).double()
    require_finite(name, inside.detach(), where=" inside the mask")
    return inside
