"""Parameters of all methods, with their defaults and bounds. Filters of other packages.

All methods accept the common parameters, so that a comparison can pass one set to a whole family. A clip or threshold
that a formula lacks has no effect there. The other parameters belong to single methods; every other one refuses them.

A plug-in filter is a function of `Batch` and `Settings` that returns bool `[N]`, true for kept completions. Results of
plug-ins are checked, because a wrong shape would broadcast into a wrong gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor

from ftis_node.algorithms.batch import AGGREGATIONS, DENOMINATORS, require_choice
from ftis_node.config.method_table import FILTERS, KlEstimator
from ftis_node.errors import ConfigError
from ftis_node.plugins import FILTER_GROUP, Plugin, call_plugin, load_function

FilterRule = Callable[[Any, Any], Tensor]  # of a `Batch` and `Settings`


LEVELS = ("seq_mean", "seq_sum", "token")
OLD_LOGPROBS = ("engine", "learner")
TENSORS = ("first_pass_logprobs", "sender_ids")  # parameters of a batch: None, or as `read_batch` documents


@dataclass(frozen=True, slots=True)
class Settings:
    """The parameters of `policy_loss`, except the tensors in `TENSORS`."""

    # Common to all methods.
    cap: float = 2.0  # C: largest importance weight; also the threshold of `truncated_fraction`
    kl_estimator: str = "author_k3"  # see filters.py; also the estimator of `mean_kl`
    kl_threshold: float = 50.0  # g, in the units of kl_estimator: a far completion is kept only if A > 0
    eps_low: float = 0.2  # PPO clip, lower bound 1 - eps_low
    eps_high: float = 0.2  # PPO clip, upper bound 1 + eps_high
    denominator: str = "all"  # completions that count in N: `all` or `kept`
    agg: str = "seq_mean"  # see batch.py
    max_completion_length: int | None = None  # tokens; the configured limit that `max_len` divides by
    # Of single methods.
    floor: float = 0.0  # tis, ftis: smallest importance weight of a token with A > 0
    filter: str = "kl"  # filtered methods: the rule for far negatives, see filters.py
    keep_share: float = 0.3  # filter `quantile`: share of each sender's negatives that is kept
    rank_own: bool = False  # filters `quantile` and `ess`: own negatives are ranked like another sender's
    obrs_lambda: float = 1.0  # filter `obrs`: a token is accepted with probability min(1, rho / lambda)
    clip: bool = True  # gepo: PPO clip on the group weight
    alpha: float = 0.0  # gepo: share of the learner's own p in the denominator
    k3_beta: float = 0.0  # gepo: weight of the k3 regularizer; 0.005 if used
    mis_low: float = 0.5  # mis: smallest ratio that is not masked
    mis_high: float = 2.0  # mis: largest
    mis_level: str = "token"  # mis: the unit over which the ratio is computed
    m2_threshold: float = 0.04  # m2po: tau, bound on the mean squared log-ratio
    topr_level: str = "seq_mean"  # topr: the unit over which the ratio of a negative completion is computed
    tau_pos: float = 1.0  # soft_adaptive: slope of the gate where A > 0
    tau_neg: float = 1.05  # soft_adaptive: slope elsewhere
    old_logprobs: str = "engine"  # gspo, gspo_token, hacpo: whose log-probs s of own completions is relative to
    foreign_clip: float = 0.2  # hacpo: s of other senders' completions is clipped to [1 - foreign_clip, 1]
    ratio_power: float = 1.0  # hacpo: and weighted by sg[s] to this power


COMMON_PARAMETERS = (
    "cap",
    "kl_estimator",
    "kl_threshold",
    "eps_low",
    "eps_high",
    "denominator",
    "agg",
    "max_completion_length",
    "first_pass_logprobs",
)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


# Infinity is valid if it means "no bound".
_Bound: TypeAlias = tuple[str, Callable[[Any], bool]]
_POSITIVE: _Bound = ("a number > 0", lambda value: _is_number(value) and value > 0)
_NOT_NEGATIVE: _Bound = ("a number >= 0", lambda value: _is_number(value) and value >= 0)
_FINITE: _Bound = ("a finite number >= 0", lambda value: _is_number(value) and 0 <= value < math.inf)
_FINITE_POSITIVE: _Bound = ("a finite number > 0", lambda value: _is_number(value) and 0 < value < math.inf)
_SLOPE: _Bound = ("a number in [0.001, 1000]", lambda value: _is_number(value) and 1e-3 <= value <= 1e3)
_SHARE: _Bound = ("a number in [0, 1]", lambda value: _is_number(value) and 0 <= value <= 1)
_FLAG: _Bound = ("true or false", lambda value: isinstance(value, bool))
_BOUNDS: Mapping[str, _Bound] = {
    **dict.fromkeys(("cap", "m2_threshold"), _POSITIVE),
    "obrs_lambda": _FINITE_POSITIVE,
    **dict.fromkeys(("tau_pos", "tau_neg"), _SLOPE),
    **dict.fromkeys(("kl_threshold", "eps_high", "mis_low", "mis_high"), _NOT_NEGATIVE),
    **dict.fromkeys(("eps_low", "floor", "keep_share", "alpha", "foreign_clip"), _SHARE),
    **dict.fromkeys(("rank_own", "clip"), _FLAG),
    **dict.fromkeys(("k3_beta", "ratio_power"), _FINITE),
    "max_completion_length": (
        "a whole number of tokens >= 1",
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1),
    ),
}

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "kl_estimator": get_args(KlEstimator),
    "filter": FILTERS,
    "denominator": DENOMINATORS,
    "agg": AGGREGATIONS,
    "mis_level": LEVELS,
    "topr_level": LEVELS,
    "old_logprobs": OLD_LOGPROBS,
}


def make_settings(method_defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    """Return the method's defaults overridden by the given values; both hold names of `Settings` only.

    Raises ValueError naming a parameter that is out of bounds, or one that another parameter requires.
    """
    settings = replace(Settings(), **{**method_defaults, **given})
    for field in fields(settings):
        _require_bounds(field.name, getattr(settings, field.name))
    if settings.mis_low > settings.mis_high:
        raise ValueError(f"mis_low must not exceed mis_high, but {settings.mis_low!r} > {settings.mis_high!r}")
    if settings.floor > settings.cap:
        raise ValueError(f"floor must not exceed cap, but {settings.floor!r} > {settings.cap!r}")
    if settings.agg == "max_len" and settings.max_completion_length is None:
        raise ValueError("agg max_len divides by max_completion_length: give it, the token limit of a completion")
    return settings


def _require_bounds(name: str, value: object) -> None:
    if name == "filter" and isinstance(value, str) and value not in FILTERS:
        if load_filter(value) is not None:
            return
    if name in _CHOICES:
        require_choice(name, value, _CHOICES[name])
        return
    words, is_within = _BOUNDS[name]
    if not is_within(value):
        raise ValueError(f"{name} must be {words}, not {value!r}")


@lru_cache(maxsize=16)
def load_filter(name: str) -> FilterRule | None:
    """Return the filter of the plug-in `name`; None if no package has one. Raises ConfigError for a faulty one."""
    plugin, rule = load_function(FILTER_GROUP, name, error=ConfigError)
    if plugin is None or rule is None:
        return None

    def keep(batch: Any, settings: Any) -> Tensor:
        kept = call_plugin(plugin, lambda: rule(batch, settings), error=ConfigError)
        return require_shape(plugin, kept, ((len(batch.mask),),), torch.bool)

    return keep


def require_shape(plugin: Plugin, values: object, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this type and one of these shapes. Raises ConfigError for anything else."""
    expected = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(values, Tensor):
        raise ConfigError(f"{plugin} gave a {type(values).__name__} instead of a tensor {expected}")
    if values.dtype != dtype or tuple(values.shape) not in shapes:
        got = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
        raise ConfigError(f"{plugin} gave {got} instead of {str(dtype).removeprefix('torch.')} {expected}")
    return values
