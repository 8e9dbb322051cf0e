"""`policy_loss`: log-probs and advantages in, a scalar to minimize out.

**Loss.** It is minus the mean (`batch.py`) of the objective (`methods.py`) over the completions that the filter keeps
(`filters.py`). It is computed in float64 and returned in the dtype of the learner's log-probs.

**KL term** between the learner and the model that it started from. DeepSeekMath (arXiv 2402.03300, eq. 4) estimates
KL(learner || start) at each token by k3, r - log r - 1 with r = pi_start / pi, with a gradient. As in the paper, tokens
are weighted as if the learner had sampled them, so the term also covers completions that a filter removed. Each token's
weight depends on the mask alone, so callers may split the sum in any way.

Over tokens of another model that mean estimates no KL of the learner. DeepSeek-V3.2 (arXiv 2512.02556) multiplies k3 by
rho. The gradient flows through both factors, so that of a token is rho (lp - log pi_start). Here min(rho, C) takes the
place of rho in both. A peer reports the log-probs in rho, so without C one token could rule the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ftis_node.algorithms.batch import Batch, aggregate, read_batch
from ftis_node.algorithms.filters import apply_filter
from ftis_node.algorithms.importance_weights import TOKEN_LOG_RATIO_LIMIT, first_pass_ratio, truncated
from ftis_node.algorithms.methods import find_method, method_parameters
from ftis_node.algorithms.settings import TENSORS, make_settings


def kl_to_start(
    learner_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    agg: str,
    max_completion_length: int | None = None,
    behaviour_logprobs: Tensor | None = None,
    cap: float = 2.0,
) -> Tensor:
    """Return k3 of `[N, T]` log-probs over the tokens in `mask`, averaged by `agg`: a float64 scalar, nats a token.

    With `behaviour_logprobs` `[N, T]`, those of the generator, each token is multiplied by min(rho, cap). The gradient
    goes to `learner_logprobs` alone and is exactly 0 outside the mask, whatever the values there are.
    """
    learner = torch.where(mask, learner_logprobs, 0.0).double()
    log_ratios = torch.where(mask, reference_logprobs, 0.0).double() - learner.detach()
    excess = torch.expm1(log_ratios.clamp(max=TOKEN_LOG_RATIO_LIMIT))  # pi_start / pi - 1, exact for small values
    # d/dlp [exp(ref - lp) - (ref - lp) - 1] = 1 - exp(ref - lp). With rho, d/dlp [rho k3] = rho (lp - ref).
    slope = -excess if behaviour_logprobs is None else -log_ratios
    per_token = (excess - log_ratios) + slope * (learner - learner.detach())
    if behaviour_logprobs is not None:
        to_generator = learner - torch.where(mask, behaviour_logprobs, 0.0).double()
        ratio = torch.exp(to_generator.clamp(-TOKEN_LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT))
        per_token = truncated(ratio, cap) * per_token
    # As in `aggregate`, with every completion kept.
    num_completions = max(1, mask.shape[0])
    total: Tensor | int = mask.sum().clamp(min=1)
    if agg == "max_len":
        assert max_completion_length is not None  # settings.py refuses `max_len` without it
        total = num_completions * max_completion_length
    elif agg == "seq_mean":
        total = num_completions * mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (per_token * (mask.double() / total)).sum()


def policy_loss(
    method: str,
    learner_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    *,
    checks: bool = True,
    **params: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of `method`, with a gradient to `learner_logprobs` alone, and its metrics.

    `learner_logprobs` and `behaviour_logprobs` are `[N, T]`, `mask` bool `[N, T]`, `advantages` `[N]`, `group_ids`
    integers `[N]` in any order. Floats are float32 or float64. Padding may hold anything and gets exactly zero
    gradient. `method_parameters(method)` lists `params` with the method's own defaults; `settings.py` explains each.
    With several updates on one batch, `first_pass_logprobs` `[N, T]` holds the learner's log-probs of the first pass:
    weights, filters and metrics are of that pass (`methods.py`).
    Filters that compare the completions of a sender, `hacpo`, and `old_logprobs` read `sender_ids`, integers `[N]`: 0
    is this node. If None, each group counts as a separate sender, none of them this node.

    Returns the scalar loss and the metrics, plain floats:
        kept_fraction       completions that the filter kept, of all N (1 without a filter, and with obrs)
        truncated_fraction  tokens with rho > cap, of all tokens
        mean_kl             mean over completions with tokens of the chosen estimator's mean over tokens

    Raises ValueError for an unknown method or parameter, a value out of bounds, or a wrong shape or dtype. NaN or inf
    in the advantages, or in log-probs inside the mask, raises it as well.

    Without `checks` no value is read, so the host does not wait for a GPU. NaN then reaches the loss, and there are no
    metrics. The ids may be on the CPU.
    """
    if (anchor := params.pop("anchor_logprobs", None)) is not None:  # another name of it
        params["first_pass_logprobs"] = anchor
    row, known = find_method(method), method_parameters(method)
    for name, value in params.items():
        if name not in known and not (name in TENSORS and value is None):
            raise ValueError(f"method {method!r} has no parameter {name!r}; it takes: {', '.join(known)}")
    settings_given = dict(params)
    tensors = {name: settings_given.pop(name, None) for name in TENSORS}
    settings = make_settings(row.defaults, settings_given)
    batch = read_batch(learner_logprobs, behaviour_logprobs, mask, advantages, group_ids, **tensors, checks=checks)

    kl, keep, used = apply_filter(batch, settings, filtered=row.filtered)
    mean_objective = aggregate(
        row.objective(used, settings),
        used,
        keep,
        agg=settings.agg,
        denominator=settings.denominator,
        max_completion_length=settings.max_completion_length,
    )
    metrics = _metrics(batch, kl, keep, settings.cap) if checks else {}
    return (-mean_objective).to(learner_logprobs.dtype), metrics


def require_parameters(method: str, params: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown method, or for `params` that `policy_loss` refuses."""
    one = torch.zeros(1, 1)
    policy_loss(method, one, one, one.bool(), one[0], torch.zeros(1, dtype=torch.int64), **params)


def _metrics(batch: Batch, kl: Tensor, keep: Tensor, cap: float) -> dict[str, float]:
    """Return the metrics, each 0 if there is nothing to count. They leave the device in one transfer."""
    is_truncated = (first_pass_ratio(batch) > cap) & batch.mask
    has_tokens = batch.num_tokens > 0
    figures = {
        "kept_fraction": _share(keep.sum(), keep.numel()),
        "truncated_fraction": _share(is_truncated.sum(), batch.num_tokens.sum()),
        "mean_kl": _share(kl.sum(), has_tokens.sum()),
    }
    return dict(zip(figures, torch.stack(list(figures.values())).tolist(), strict=True))


def _share(part: Tensor, whole: Tensor | int) -> Tensor:
    return part.double() / torch.as_tensor(whole, device=part.device).clamp(min=1)
