"""The section `[method]` of the manifest: the loss and its parameters."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ftis_node.config.method_table import KlEstimator, require_filter, require_method
from ftis_node.config.section import MOST, UNKNOWN_NAME, Positive, Section


class MethodSection(Section):
    """The loss. Defaults are the F-TIS paper's."""

    package: str | None = Field(
        default=None,
        exclude_if=lambda value: value is None,  # so that the ids of runs with built-in methods do not change
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Python package that provides the plug-in `name`. A node without it refuses the run and names the "
        "package. Nothing is fetched.",
    )
    name: str = Field(
        default="ftis",
        validate_default=True,
        max_length=64,
        description="Loss method: a row of ftis-node docs train/methods, or that of an installed plug-in.",
    )
    advantage_scale: Literal["std", "mean"] | None = Field(
        default=None,
        description="`std`: (r - mean) / std of the group (GRPO). `mean`: r - mean (Dr.GRPO). Unset: the method's.",
    )
    cap: Positive | None = Field(
        default=None, description="Upper bound C of the importance weight; unset: the method's."
    )
    kl_estimator: KlEstimator | None = Field(
        default=None, description="Estimator that the filter reads; unset: the method's."
    )
    kl_threshold: Positive | None = Field(
        default=None,
        description="Completions with A < 0 and this KL or more are dropped. Set it with `kl_estimator`; unset: the "
        "method's.",
    )
    floor: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="tis, ftis: smallest weight of a token where A > 0, at most `cap` (beyond the paper). Unset: 0.",
    )
    filter: str | None = Field(
        default=None,
        max_length=64,
        description="Completions with A < 0 that the filtered methods drop. `kl`: from `kl_threshold` on (paper). "
        "`quantile`: of each peer's in a step, all but the `keep_share` of least KL. `ess`: likewise, with the peer's "
        "effective sample size as the share. The last two use `kl_estimator`, keep own completions, and need one more "
        "forward pass. Unset: `kl`.",
    )
    keep_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description='Share of each peer\'s completions with A < 0 that `filter = "quantile"` keeps. Unset: 0.3.',
    )
    rank_own: bool | None = Field(
        default=None,
        description="`quantile` and `ess`: rank own completions too. For runs in which new weights reach the "
        "generators many steps late. Unset: false.",
    )
    eps_low: Positive | None = Field(default=None, description="Lower clip width; unset: the method's.")
    eps_high: Positive | None = Field(default=None, description="Upper clip width; unset: the method's.")
    denominator: Literal["all", "kept"] | None = Field(
        default=None, description="`all`: filtered completions count in N (paper). `kept`: only kept ones do."
    )
    agg: Literal["seq_mean", "token_mean", "max_len"] | None = Field(
        default=None,
        description="Mean inside each completion, over all tokens, or by the completion limit; unset: the method's.",
    )
    clip: bool | None = Field(default=None, description="gepo: whether its weight is clipped.")
    alpha: float | None = Field(
        default=None, ge=0, le=1, description="gepo: share of the learner's probability in the weight's denominator."
    )
    k3_beta: float | None = Field(
        default=None, ge=0, le=MOST, description="gepo: weight of the k3 regularizer (paper: 0.005)."
    )
    mis_low: float | None = Field(default=None, ge=0, le=MOST, description="mis: ratios below this have weight 0.")
    mis_high: Positive | None = Field(default=None, description="mis: ratios above this have weight 0.")
    m2_threshold: Positive | None = Field(default=None, description="m2po: bound of the mean squared log-ratio.")
    topr_level: Literal["seq_mean", "seq_sum", "token"] | None = Field(
        default=None,
        description="topr: ratio that reduces the weight of completions with A < 0. `seq_mean`, `seq_sum`: of the "
        "sequence, by the mean or the sum of its log-probs. `token`: of each token.",
    )

    peer_weights: Literal["agreement"] | None = Field(
        default=None,
        description="`agreement`: scales each peer's advantages by how far the gradient of its completions agrees "
        "with that of own ones (ftis-node docs train/methods#beyond-the-paper). Unset: no scaling.",
    )

    @field_validator("name", "filter")
    @classmethod
    def _is_known(cls, value: str | None, info: ValidationInfo) -> str | None:
        try:
            if info.field_name == "name":
                require_method(str(value), info.data.get("package"))
            elif value is not None:
                require_filter(value)
        except ValueError as error:
            raise PydanticCustomError(UNKNOWN_NAME, "{line}", {"line": str(error)}) from None
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> MethodSection:
        if (self.kl_estimator is None) != (self.kl_threshold is None):
            raise ValueError(
                "kl_estimator and kl_threshold go together: set both or neither, because a threshold fits one estimator"
            )
        if self.floor is not None and self.cap is not None and self.floor > self.cap:
            raise ValueError(f"floor must not exceed cap, but {self.floor} > {self.cap}")
        if self.keep_share is not None and self.filter != "quantile":
            raise ValueError('keep_share has no effect without filter = "quantile": remove it')
        if self.rank_own is not None and self.filter not in ("quantile", "ess"):
            raise ValueError('rank_own has no effect without filter = "quantile" or "ess": remove it')
        return self

    def given(self) -> dict[str, float | str]:
        """Return the parameters that the manifest sets. The method's defaults apply to the others."""
        return self.model_dump(exclude={"name", "package", "advantage_scale", "peer_weights"}, exclude_none=True)
