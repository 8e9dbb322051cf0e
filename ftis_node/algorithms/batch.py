"""The validated inputs of a loss, sums over groups, and the aggregation of an objective to one scalar.

Both entry points of the package check their arguments once; the formulas behind them check nothing. `read_batch`
replaces padding, which may be NaN, by 0 *before* the first exponential. A mask applied afterwards would still propagate
NaN backwards (0 * inf). All values are float64. The k3 estimate of two nearly equal policies is 5e-7 at a difference of
1e-3. With float32 log-probs the rounding of rho - 1 would hide it.

A *group* is the completions of one prompt by one generator; its id is any integer that its completions share.

`aggregate` weighs each completion and each token:

    seq_mean    1/N sum_i 1/L_i sum_t   every completion counts the same, a token of a long one less     GRPO, F-TIS
    token_mean  1/sum L sum_i sum_t     every token counts the same                                      DAPO
    max_len     1/(N L_max) sum_i sum_t every token counts the same; short batches get no larger weight  Dr.GRPO

`denominator` selects whether filtered completions count in the mean. `all`, as in the F-TIS paper: they count in N (and
in sum L). A batch that loses most of its completions then makes a small step. `kept`: only kept completions count. A
completion without tokens counts in N and adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def require_tensor(
    name: str, value: object, *, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | torch.Size
) -> None:
    """Raise ValueError naming `name` unless `value` is a tensor of one of `dtypes` and of `shape`."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(value).__name__}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} must be one of {_names(dtypes)}, not {_names((value.dtype,))}")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape {list(shape)}, not {list(value.shape)}")


def require_finite(name: str, values: Tensor, *, where: str = "") -> None:
    """Raise ValueError naming the first NaN or infinity of `values`; the message ends with `where`."""
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    position = (~finite).nonzero()[0].tolist()
    raise ValueError(f"{name} holds a non-finite value{where}: {values[tuple(position)].item()} at {position}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    """Return ids `[N]` of any value as positions `[N]` in 0..G-1, and the number of groups G."""
    unique_ids, index = torch.unique(group_ids, return_inverse=True)
    return index, len(unique_ids)


def group_sum(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Return the sum of `values` `[N]` over each group, `[G]`."""
    return values.new_zeros(num_groups).index_add(0, index, values)


def group_extremes(values: Tensor, index: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest of `values` `[N]` in each group, two tensors `[G]`."""
    empty = values.new_zeros(num_groups)
    smallest = empty.scatter_reduce(0, index, values, "amin", include_self=False)
    largest = empty.scatter_reduce(0, index, values, "amax", include_self=False)
    return smallest, largest


def places_in(index: Tensor, num_groups: int, order: Tensor | None = None) -> Tensor:
    """Return the place 0, 1, ... of each row `[N]` among the rows of its group.

    `order` `[N]` sorts the rows by group; None: rows of a group keep their order.
    """
    order = index.argsort(stable=True) if order is None else order
    sizes = group_sum(torch.ones_like(index), index, num_groups)
    begins = sizes.cumsum(0) - sizes
    places = torch.zeros_like(index).scatter(0, order, torch.arange(len(order), device=order.device))
    return places - begins[index]


def group_logsumexp(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Return log sum exp of `values` `[N]` over each group, `[G]`. Subtracts the maximum first to prevent overflow."""
    _, largest = group_extremes(values, index, num_groups)
    return largest + group_sum(torch.exp(values - largest[index]), index, num_groups).log()


@dataclass(frozen=True, slots=True)
class Batch:
    """N completions of at most T tokens. Float tensors are float64; outside the mask they hold 0.

    learner_logprobs    [N, T]  lp; the only tensor with a gradient
    behaviour_logprobs  [N, T]  lg, of the generator that sampled the tokens
    first_pass_logprobs [N, T]  lp0, the learner's at the first pass over this batch; equal to lp there
    mask                [N, T]  bool, true at completion tokens, the end-of-sequence token included
    advantages          [N]     A
    group_ids           [N]     int64, as the caller gave them
    group_index         [N]     position of each completion's group in 0..num_groups-1
    sender_index        [N]     position of each completion's sender in 0..num_senders-1
    is_own              [N]     bool, by this node itself: sender id 0
    num_tokens          [N]     L, the tokens inside the mask; may be 0
    """

    learner_logprobs: Tensor
    behaviour_logprobs: Tensor
    first_pass_logprobs: Tensor
    mask: Tensor
    advantages: Tensor
    group_ids: Tensor
    group_index: Tensor
    num_groups: int
    sender_index: Tensor
    num_senders: int
    is_own: Tensor
    num_tokens: Tensor

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` `[N, T]` over the tokens of each completion, `[N]`; 0 without tokens."""
        return torch.where(self.mask, values, 0.0).sum(dim=1) / self.num_tokens.clamp(min=1)


def read_batch(
    learner_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    first_pass_logprobs: Tensor | None = None,
    sender_ids: Tensor | None = None,
    checks: bool = True,
) -> Batch:
    """Check the inputs of `policy_loss` and return a `Batch` of them. Raises ValueError naming the invalid input.

    Without `checks` no value is read, so the host does not wait for a GPU. The ids may then be on the CPU.

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
    if checks:
        require_finite("advantages", advantages)

    learner = first_pass = _inside("learner_logprobs", learner_logprobs, mask, checks=checks)
    if first_pass_logprobs is not None:
        require_tensor("first_pass_logprobs", first_pass_logprobs, dtypes=FLOATING, shape=matrix)
        first_pass = _inside("first_pass_logprobs", first_pass_logprobs, mask, checks=checks)
    index, num_groups = _index_on(mask.device, group_ids)
    sender_index, num_senders, is_own = index, num_groups, torch.zeros_like(index, dtype=torch.bool)
    if sender_ids is not None:
        require_tensor("sender_ids", sender_ids, dtypes=INTEGERS, shape=(num_completions,))
        sender_index, num_senders = _index_on(mask.device, sender_ids)
        is_own = (sender_ids == 0).to(mask.device, non_blocking=True)
    return Batch(
        learner_logprobs=learner,
        behaviour_logprobs=_inside("behaviour_logprobs", behaviour_logprobs, mask, checks=checks).detach(),
        first_pass_logprobs=first_pass.detach(),
        mask=mask,
        advantages=advantages.detach().double(),
        group_ids=group_ids.long().to(mask.device, non_blocking=True),
        group_index=index,
        num_groups=num_groups,
        sender_index=sender_index,
        num_senders=num_senders,
        is_own=is_own,
        num_tokens=mask.sum(dim=1),
    )


def _index_on(device: torch.device, ids: Tensor) -> tuple[Tensor, int]:
    """Return `group_index(ids)` on `device`. The host waits for a GPU only if the ids are there."""
    index, number = group_index(ids)
    return index.to(device, non_blocking=True), number


def _inside(name: str, logprobs: Tensor, mask: Tensor, *, checks: bool) -> Tensor:
    """Return `logprobs` in float64, 0 outside the mask. With `checks` raises ValueError for NaN and inf inside."""
    inside = torch.where(mask, logprobs, 0.0).double()
    if checks:
        require_finite(name, inside.detach(), where=" inside the mask")
    return inside


def aggregate(
    objective: Tensor, batch: Batch, keep: Tensor, *, agg: str, denominator: str, max_completion_length: int | None
) -> Tensor:
    """Return the scalar mean of `objective` `[N, T]` or `[N, 1]` over the completions with `keep` `[N]`.

    `max_completion_length` is in tokens: the configured limit, not the number of columns. Otherwise a loss would depend
    on the longest completion of the batch. If nothing counts, the result is 0 and still has a (zero) gradient.
    """
    counted = keep if denominator == "kept" else torch.ones_like(keep)
    kept_values = torch.where(batch.mask & keep[:, None], objective, 0.0)
    if agg == "token_mean":
        return kept_values.sum() / (batch.num_tokens * counted).sum().clamp(min=1)
    num_counted = counted.sum().clamp(min=1)
    if agg == "max_len":
        assert max_completion_length is not None  # settings.py refuses `max_len` without it
        return kept_values.sum() / (num_counted * max_completion_length)
    return (kept_values.sum(dim=1) / batch.num_tokens.clamp(min=1)).sum() / num_counted
