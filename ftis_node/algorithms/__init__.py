"""Pure tensor functions of policy optimization: advantages, importance weights, filters, losses.

The package has two entry points: `group_advantages` turns rewards into advantages, and `policy_loss` turns log-probs
into a scalar to minimize. Each file behind them implements one idea and names its paper:

    importance_weights.py  ratios of learner to generator, their caps   F-TIS, GSPO, GEPO, IcePop; weights of texts of
                        a peer with another vocabulary
    filters.py          drops distant negatives and outlier tokens      F-TIS, M2PO
    methods.py          the registry: a method is an objective and its constants
    loss.py             rewards -> advantages inside a group            GRPO, Dr.GRPO;
                        `policy_loss`, which combines the above; KL to the model that the learner started from
    settings.py         every parameter with its default and bounds
    batch.py            validated inputs that are safe to exponentiate; sums over groups without a loop;
                        [N, T] objective -> one number                  GRPO, DAPO, Dr.GRPO
    diagnostics.py      training statistics of a step, by sender; detects log-probs that no honest sampling produces
    group_choice.py     selects the groups of a step (Swarm SAPO); divides a task mixture among nodes (Ricardo)
    mixture.py          next-token mixture of several models           DEMix, c-BTM

Nothing here holds state, logs, or depends on a model, an optimizer or a network.

Each function is imported at its first use: the daemon uses only `choose_groups` and must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis_node.algorithms.diagnostics import likelihood_gain, sender_sums
    from ftis_node.algorithms.group_choice import (
        GroupChoice,
        SignalCount,
        choose_groups,
        division_shares,
        has_signal,
        keep_chances,
        pass_rates,
        split_foreign,
        usefulness,
    )
    from ftis_node.algorithms.importance_weights import cross_tokenizer_advantages
    from ftis_node.algorithms.loss import group_advantages, kl_to_start, policy_loss
    from ftis_node.algorithms.methods import METHODS, Method, find_method, is_separable, method_parameters
    from ftis_node.algorithms.mixture import cached_prior, mixture_logprobs, posterior, text_logprobs, uniform_prior

__all__ = [
    "METHODS",
    "GroupChoice",
    "Method",
    "SignalCount",
    "cached_prior",
    "choose_groups",
    "cross_tokenizer_advantages",
    "division_shares",
    "find_method",
    "group_advantages",
    "has_signal",
    "is_separable",
    "keep_chances",
    "kl_to_start",
    "likelihood_gain",
    "method_parameters",
    "mixture_logprobs",
    "pass_rates",
    "policy_loss",
    "posterior",
    "sender_sums",
    "split_foreign",
    "text_logprobs",
    "uniform_prior",
    "usefulness",
]

_FILES = {
    "group_advantages": "loss",
    "cross_tokenizer_advantages": "importance_weights",
    "sender_sums": "diagnostics",
    "SignalCount": "group_choice",
    "division_shares": "group_choice",
    "keep_chances": "group_choice",
    "GroupChoice": "group_choice",
    "choose_groups": "group_choice",
    "has_signal": "group_choice",
    "pass_rates": "group_choice",
    "split_foreign": "group_choice",
    "usefulness": "group_choice",
    "policy_loss": "loss",
    "METHODS": "methods",
    "Method": "methods",
    "find_method": "methods",
    "is_separable": "methods",
    "method_parameters": "methods",
    "cached_prior": "mixture",
    "mixture_logprobs": "mixture",
    "posterior": "mixture",
    "text_logprobs": "mixture",
    "uniform_prior": "mixture",
    "kl_to_start": "loss",
    "likelihood_gain": "diagnostics",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
