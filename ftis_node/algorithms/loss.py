"""`policy_loss`: log-probs and advantages in, a scalar to minimize and three metrics out.

    objective   [N, T]   methods.py     the quantity that the method maximizes, by token
    keep        [N]      filters.py     the completions that the filter keeps
    aggregate   scalar   aggregate.py   the mean, weighted as the method defines
    loss = -aggregate

Computed in float64 and returned in the dtype of the learner's log-probs; see batch.py for why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftis_node.algorithms.aggregate import aggregate
from ftis_node.algorithms.batch import Batch, read_batch
from ftis_node.algorithms.filters import apply_filter
from ftis_node.algorithms.importance_weights import token_ratio
from ftis_node.algorithms.methods import find_method, method_parameters
from ftis_node.algorithms.settings import TENSORS, make_settings

if TYPE_CHECKING:
    from collections.abc import Mapping


def policy_loss(
    method: str,
    learner_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    **params: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of `method`, with a gradient to `learner_logprobs` alone, and its metrics.

    `learner_logprobs` and `behaviour_logprobs` are `[N, T]`, `mask` bool `[N, T]`, `advantages` `[N]`, `group_ids`
    integers `[N]` in any order. Floats are float32 or float64. Padding may hold anything and gets exactly zero
    gradient. `method_parameters(method)` lists `params` with the method's own defaults; `settings.py` explains each.
    With several updates on one batch, `anchor_logprobs` `[N, T]` holds the learner's log-probs of the first pass.
    Filters that compare the completions of a sender read `sender_ids`, integers `[N]`: 0 is this node. If None, each
    group counts as a separate sender.

    Returns the scalar loss and the metrics, plain floats:
        kept_fraction       completions that the filter kept, of all N (1 for methods without a filter)
        truncated_fraction  tokens with rho > cap, of all tokens
        mean_kl             mean over completions with tokens of the chosen estimator's mean over tokens

    Raises ValueError for an unknown method or parameter, a value out of bounds, or a wrong shape or dtype. NaN or inf
    in the advantages, or in log-probs inside the mask, raises it as well.
    """
    row = find_method(method)
    _refuse_unknown(method, params)
    settings_given = dict(params)
    tensors = {name: settings_given.pop(name, None) for name in TENSORS}
    settings = make_settings(row.defaults, settings_given)
    batch = read_batch(learner_logprobs, behaviour_logprobs, mask, advantages, group_ids, **tensors)

    kl, keep = apply_filter(batch, settings, filtered=row.filtered)
    mean_objective = aggregate(
        row.objective(batch, settings),
        batch,
        keep,
        agg=settings.agg,
        denominator=settings.denominator,
        max_completion_length=settings.max_completion_length,
    )
    return (-mean_objective).to(learner_logprobs.dtype), _metrics(batch, kl, keep, settings.cap)


def _metrics(batch: Batch, kl: Tensor, keep: Tensor, cap: float) -> dict[str, float]:
    """Return the metrics, each 0 if there is nothing to count. They leave the device in one transfer."""
    is_truncated = (token_ratio(batch).detach() > cap) & batch.mask
    has_tokens = batch.num_tokens > 0
    figures = {
        "kept_fraction": _share(keep.sum(), keep.numel()),
        "truncated_fraction": _share(is_truncated.sum(), batch.num_tokens.sum()),
        "mean_kl": _share(kl.sum(), has_tokens.sum()),
    }
    return dict(zip(figures, torch.stack(list(figures.values())).tolist(), strict=True))


def _share(part: Tensor, whole: Tensor | int) -> Tensor:
    return part.double() / torch.as_tensor(whole, device=part.device).clamp(min=1)


def _refuse_unknown(method: str, params: Mapping[str, Any]) -> None:
    known = method_parameters(method)
    for name, value in params.items():
        if name not in known and not (name in TENSORS and value is None):
            raise ValueError(f"method {method!r} has no parameter {name!r}; it takes: {', '.join(known)}")
