"""Objectives of the methods, per token. `config/method_table.py` has their constants and sources.

An objective is maximized and is `[N, T]` or, for a whole sequence, `[N, 1]`. Notation as in the papers: A is the
advantage, rho the ratio of learner to generator. The first pass over the batch has rho0 for rho. R is the ratio to the
learner at that pass, and sg[.] stops the gradient.

Several updates on one batch. No objective counts the change since the first pass twice; rho = rho0 R:

    nois, swarm_sapo            R
    tis, ftis, mis              rho0 as weight, truncated or masked, times R: decoupled PPO (arXiv 2110.00641)
    vis, grpo, dr_grpo, dapo    rho of the current pass; the clip bounds its distance to the generator
    gspo, gspo_token, hacpo     s of the current pass
    soft_adaptive               rho of the current pass; the gate takes the place of the clip
    gepo                        p of the current pass; the denominator of the first
    topr, cispo, dppo           their weight is rho or s of the current pass: A lp has no R; dppo's mask likewise
    m2po                        rho and the mask of the current pass: the mask takes the place of the clip
    filters                     KL and effective sample size of the first pass: all updates keep the same completions

Departures. `nois`, `tis`, `ftis` and `mis` are written with R (value A at R = 1), `topr` and `cispo` with log-probs
(value A lp). The gradients are the same. `dr_grpo` and `gepo` expect advantages of scale `mean`. No method has a KL
term to a reference model. `gspo`'s narrow clip suits on-policy samples; for foreign samples widen it. `m2po` averages
over all tokens, the masked ones included, as its paper does.

Two methods are called SAPO. `swarm_sapo` is Swarm sAmpling (arXiv 2509.08721): it differs from `nois` only in the
choice of groups (`group_choice.py`). `soft_adaptive` is Soft Adaptive PO (arXiv 2511.20347): a smooth gate in place of
the clip.

`accepted` is `nois` for own completions, and for those of others with A > 0. It needs no log-prob of a generator.

`hacpo` (arXiv 2603.02604, eq. 56 to 59) follows its authors' code, as its advantages do (`advantages.py`). There the
lower bound of the foreign clip rises with each mini-batch of a step. Here a step is one mini-batch, so the bound stays.
`dppo` (arXiv 2602.04879, Binary-TV) has sg[min(rho, C)] A lp with C = 20, as verl does; its authors' code has C = 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ftis_node.algorithms.batch import Batch
from ftis_node.algorithms.filters import author_k3, second_moment_mask
from ftis_node.algorithms.importance_weights import (
    first_pass_ratio,
    first_pass_ratio_at,
    group_expectation_ratio,
    masked_outside,
    sequence_product,
    sequence_ratio,
    step_ratio,
    token_log_ratio,
    token_ratio,
    truncated,
)
from ftis_node.algorithms.settings import COMMON_PARAMETERS, TENSORS, Settings, require_shape
from ftis_node.config.method_table import METHODS as ROWS
from ftis_node.config.method_table import MethodTraits
from ftis_node.errors import ConfigError
from ftis_node.plugins import METHOD_GROUP, call_plugin, describe, find_entry


def clipped_surrogate(ratio: Tensor, batch: Batch, settings: Settings) -> Tensor:
    """Return PPO's min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), which rewards no move beyond the clip."""
    advantages = batch.advantages[:, None]
    bounded = ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high)
    return torch.minimum(ratio * advantages, bounded * advantages)


def unweighted(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `nois`: no importance weight, as if the learner had sampled every completion."""
    return clipped_surrogate(step_ratio(batch), batch, settings)


def ratio_clipped(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `vis` and `grpo`: the gradient flows through rho, and is 0 if the clip is active."""
    return clipped_surrogate(token_ratio(batch), batch, settings)


def truncated_weight(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `tis`: the surrogate times min(rho0, C).

    If A > 0 the weight is at least `floor`, beyond the paper: a right answer counts, however unlikely it is.
    """
    floor = settings.floor * (batch.advantages > 0).double()[:, None]
    return truncated(first_pass_ratio(batch), settings.cap).clamp(min=floor) * unweighted(batch, settings)


def masked_weight(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `mis`: as `tis`, with weight 0 outside [mis_low, mis_high].

    With the level `seq_mean` or `seq_sum`, the ratio of the completion takes the place of each token's. TRL's mode
    `sequence_mask` is `seq_sum`.
    """
    ratio = first_pass_ratio_at(batch, settings.mis_level)
    return masked_outside(ratio, settings.mis_low, settings.mis_high) * unweighted(batch, settings)


def sequence_clipped(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `gspo`: one ratio and one clip for the whole completion."""
    return clipped_surrogate(sequence_ratio(batch, settings.old_logprobs), batch, settings)


def sequence_clipped_token(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `gspo_token`: the sequence's ratio with each token's gradient, sg[s] exp(lp - sg[lp])."""
    carrier = torch.exp(batch.learner_logprobs - batch.learner_logprobs.detach())
    return clipped_surrogate(sequence_ratio(batch, settings.old_logprobs).detach() * carrier, batch, settings)


def capability_clipped(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `hacpo`: `gspo` for own completions, for others c sg[c]^ratio_power A.

    c is s limited to [1 - foreign_clip, 1]. Outside these bounds it has no gradient, whatever the sign of A.
    """
    ratio = sequence_ratio(batch, settings.old_logprobs)
    bounded = ratio.clamp(1 - settings.foreign_clip, 1.0)
    foreign = bounded * bounded.detach() ** settings.ratio_power * batch.advantages[:, None]
    return torch.where(batch.is_own[:, None], clipped_surrogate(ratio, batch, settings), foreign)


def soft_gate(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `soft_adaptive`: 4 / tau sigmoid(tau (rho - 1)) A, of slope A at rho = 1."""
    advantages = batch.advantages[:, None]
    is_positive = (advantages > 0).double()
    tau = settings.tau_pos * is_positive + settings.tau_neg * (1 - is_positive)
    return torch.sigmoid(tau * (token_ratio(batch) - 1)) * (4 / tau) * advantages


def group_expectation(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `gepo`: the group's expected q replaces the sample's own, less k3_beta times k3."""
    weight = group_expectation_ratio(batch, settings.alpha)
    objective = clipped_surrogate(weight, batch, settings) if settings.clip else weight * batch.advantages[:, None]
    if settings.k3_beta == 0:
        return objective
    return objective - settings.k3_beta * author_k3(token_log_ratio(batch))


def tapered(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `topr`: full weight for positives, less for negatives far from the learner."""
    levels = {"seq_mean": sequence_ratio, "seq_sum": sequence_product, "token": token_ratio}
    taper = truncated(levels[settings.topr_level](batch), cap=1.0)
    advantages = batch.advantages[:, None]
    return torch.where(advantages >= 0, 1.0, taper) * advantages * batch.learner_logprobs


def truncated_logprob(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `cispo`: sg[min(rho, C)] A lp; no token ever loses its gradient."""
    return truncated(token_ratio(batch), settings.cap) * batch.advantages[:, None] * batch.learner_logprobs


def divergence_masked(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `dppo`: as `cispo`, without tokens whose probability has moved too far along A.

    Masked are tokens with A > 0 and pi - mu > eps_high, and those with A < 0 and pi - mu < -eps_low.
    """
    pi, mu = (torch.exp(each.detach().clamp(max=0.0)) for each in (batch.learner_logprobs, batch.behaviour_logprobs))
    is_near = torch.where(batch.advantages[:, None] > 0, pi - mu <= settings.eps_high, pi - mu >= -settings.eps_low)
    return torch.where(is_near, truncated_logprob(batch, settings), 0.0)


def second_moment(batch: Batch, settings: Settings) -> Tensor:
    """Return the objective of `m2po`: rho A without the outlier tokens, and without a clip."""
    trusted = second_moment_mask(batch, settings.m2_threshold)
    return torch.where(trusted, token_ratio(batch), 0.0) * batch.advantages[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(MethodTraits):
    """Registry entry of a method. `objective` returns that of each token, `[N, T]`, or of each completion, `[N, 1]`."""

    objective: Callable[[Batch, Settings], Tensor]


APART = ("kl", "obrs", "positives")  # filters that decide about each completion by itself
_TRAITS = [each.name for each in fields(MethodTraits)]
METHODS: Mapping[str, Method] = {
    name: Method(objective=globals()[row.objective], **{trait: getattr(row, trait) for trait in _TRAITS})
    for name, row in ROWS.items()
}


def find_method(name: str) -> Method:
    """Return the method's registry entry, built in or of a plug-in.

    Raises ValueError listing the known methods, ConfigError for a faulty plug-in.
    """
    if name in METHODS:
        return METHODS[name]
    method = load_method(name)
    if method is None:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return method


@lru_cache(maxsize=16)
def load_method(name: str) -> Method | None:
    """Return the method of the plug-in `name`; None if no package has one. Raises ConfigError for a faulty one."""
    entry = find_entry(METHOD_GROUP, name, error=ConfigError)
    if entry is None:
        return None
    plugin = describe(entry)
    method = call_plugin(plugin, entry.load, error=ConfigError)
    if not isinstance(method, Method):
        raise ConfigError(f"{plugin} is a {type(method).__name__}, which is not a Method")
    known = {*Settings.__dataclass_fields__, *TENSORS}
    if unknown := sorted({*method.takes, *method.defaults} - known):
        raise ConfigError(f"{plugin} takes {', '.join(unknown)}, which is not a parameter of policy_loss")

    def objective(batch: Batch, settings: Settings) -> Tensor:
        values = call_plugin(plugin, lambda: method.objective(batch, settings), error=ConfigError)
        num_rows, num_columns = batch.mask.shape
        return require_shape(plugin, values, ((num_rows, num_columns), (num_rows, 1)), torch.float64)

    return replace(method, objective=objective)


def method_parameters(name: str) -> dict[str, Any]:
    """Return every parameter that the method takes, with its default. Raises ValueError for an unknown method."""
    method = find_method(name)
    shared = {setting.name: setting.default for setting in fields(Settings)} | dict.fromkeys(TENSORS)
    known = shared | dict(method.defaults)
    return {parameter: known[parameter] for parameter in (*COMMON_PARAMETERS, *method.takes)}


def is_separable(name: str, params: Mapping[str, Any]) -> bool:
    """Return whether the gradient to one completion's log-probs is independent of all other completions.

    A caller can then process a batch in pieces. A filter couples all completions if its mean counts only the kept ones
    and it drops some, which `obrs` does not. A filter that compares the completions of a sender couples them too.

    Raises ValueError for an unknown method.
    """
    method = find_method(name)
    settings = method_parameters(name) | dict(method.defaults) | dict(params)
    counts_kept = settings["denominator"] == "kept" and settings["filter"] != "obrs"
    is_tied = method.filtered and (counts_kept or settings["filter"] not in APART)
    return method.separable and not is_tied
