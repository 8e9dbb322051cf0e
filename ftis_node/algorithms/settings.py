"""Parameters of all methods, with their defaults and bounds. Filters of other packages.

All methods accept the common parameters, so that a comparison can pass one set to a whole family. A clip or threshold
that a formula lacks has no effect there. The other parameters belong to single methods; every other one refuses them.

A plug-in filter is a function of `Batch` and `Settings` that returns bool `[N]`, true for kept completions. Results of
plug-ins are checked, because a wrong shape would broadcast into a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, ValidationError, field_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from ftis_node.config.method_table import FILTERS, KlEstimator, known_name
from ftis_node.config.section import first_problem
from ftis_node.errors import ConfigError
from ftis_node.plugins import FILTER_GROUP, Plugin, call_plugin, load_function

FilterRule = Callable[[Any, Any], Tensor]  # of a `Batch` and `Settings`
TENSORS = ("first_pass_logprobs", "sender_ids")  # parameters of a batch: None, or as `read_batch` documents

# Infinity is valid where it means "no bound".
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
FiniteNotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Slope = Annotated[float, Field(ge=1e-3, le=1e3)]
Level = Literal["seq_mean", "seq_sum", "token"]


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True))
class Settings:
    """The parameters of `policy_loss`, except the tensors in `TENSORS`. Raises ValidationError for invalid ones."""

    # Common to all methods.
    cap: Positive = 2.0  # C: largest importance weight; also the threshold of `truncated_fraction`
    kl_estimator: KlEstimator = "author_k3"  # see filters.py; also the estimator of `mean_kl`
    kl_threshold: NotNegative = 50.0  # g, in the units of kl_estimator: a far completion is kept only if A > 0
    eps_low: Share = 0.2  # PPO clip, lower bound 1 - eps_low
    eps_high: NotNegative = 0.2  # PPO clip, upper bound 1 + eps_high
    denominator: Literal["all", "kept"] = "all"  # completions that count in N
    agg: Literal["seq_mean", "token_mean", "max_len"] = "seq_mean"  # see batch.py
    # Tokens: the configured limit, by which `max_len` divides.
    max_completion_length: Annotated[int, Field(ge=1)] | None = None
    # Of single methods.
    floor: Share = 0.0  # tis, ftis: smallest importance weight of a token with A > 0
    filter: str = "kl"  # filtered methods: the rule for far negatives, see filters.py
    keep_share: Share = 0.3  # filter `quantile`: share of each sender's negatives that is kept
    rank_own: bool = False  # filters `quantile` and `ess`: own negatives are ranked like another sender's
    # Filter `obrs`: a token is accepted with probability min(1, rho / lambda).
    obrs_lambda: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    clip: bool = True  # gepo: PPO clip on the group weight
    alpha: Share = 0.0  # gepo: share of the learner's own p in the denominator
    k3_beta: FiniteNotNegative = 0.0  # gepo: weight of the k3 regularizer; 0.005 if used
    mis_low: NotNegative = 0.5  # mis: smallest ratio that is not masked
    mis_high: NotNegative = 2.0  # mis: largest
    mis_level: Level = "token"  # mis: the unit over which the ratio is computed
    m2_threshold: Positive = 0.04  # m2po: tau, bound on the mean squared log-ratio
    topr_level: Level = "seq_mean"  # topr: the unit over which the ratio of a negative completion is computed
    tau_pos: Slope = 1.0  # soft_adaptive: slope of the gate where A > 0
    tau_neg: Slope = 1.05  # soft_adaptive: slope elsewhere
    # gspo, gspo_token, hacpo: whose log-probs s of own completions is relative to.
    old_logprobs: Literal["engine", "learner"] = "engine"
    foreign_clip: Share = 0.2  # hacpo: s of other senders' completions is clipped to [1 - foreign_clip, 1]
    ratio_power: FiniteNotNegative = 1.0  # hacpo: and weighted by sg[s] to this power

    @field_validator("filter")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return value if value in FILTERS or load_filter(value) is not None else known_name("filter", value)


COMMON_PARAMETERS = (
    *("cap", "kl_estimator", "kl_threshold", "eps_low", "eps_high"),
    *("denominator", "agg", "max_completion_length", "first_pass_logprobs"),
)


def make_settings(method_defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    """Return the method's defaults overridden by the given values; both hold names of `Settings` only.

    Raises ValueError naming a parameter that is out of bounds, or one that another parameter requires.
    """
    try:
        settings = replace(Settings(), **{**method_defaults, **given})
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    if settings.mis_low > settings.mis_high:
        raise ValueError(f"mis_low must not exceed mis_high, but {settings.mis_low!r} > {settings.mis_high!r}")
    if settings.floor > settings.cap:
        raise ValueError(f"floor must not exceed cap, but {settings.floor!r} > {settings.cap!r}")
    if settings.agg == "max_len" and settings.max_completion_length is None:
        raise ValueError("agg max_len divides by max_completion_length: give it, the token limit of a completion")
    return settings


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
