"""The section `[method]` of the manifest: the loss, and those of its parameters that runs differ in.

All others, such as the masks of `mis`, are those of the method's paper (`ftis_node/algorithms/settings.py`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ftis_node.config.method_table import SCALES, KlEstimator, known_name
from ftis_node.config.section import Positive, Section

PeerWeighting = Literal["agreement", "shrinkage"]
NOT_OF_THE_LOSS = ("advantage_scale", "advantage_shift", "peer_weights")  # of every method, besides the loss
FILTERS_OF = {"keep_share": ("quantile",), "rank_own": ("quantile", "ess")}  # that read it


class MethodSection(Section):
    """The loss. Defaults are the F-TIS paper's."""

    package: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Python package that provides the plug-in `name`. A node without it refuses the run and names the package. Nothing
    is fetched."""
    name: str = Field(default="ftis", validate_default=True, max_length=64)
    """Loss method: a row of ftis-node docs train/methods, or that of an installed plug-in."""
    advantage_scale: str | None = Field(default=None, max_length=64)
    """`std`: (r - mean) / std of the group (GRPO). `mean`: r - mean (Dr.GRPO). `success`: (r - mean) / mean (MaxRL).
    `capability`: as `std`, with HACPO's baseline and coefficient (ftis-node docs train/methods#advantages). Or an
    installed plug-in. Unset: the method's."""
    advantage_shift: float | None = Field(default=None, ge=0, le=1)
    """Added to r - mean of peers' completions, unless all rewards of the group are equal (AsymRE). It raises no
    completion above 0 that is not above the mean. Unset: 0."""
    cap: Positive | None = None
    """Upper bound C of the importance weight; unset: the method's."""
    kl_estimator: KlEstimator | None = None
    """Estimator that the filter reads; unset: the method's."""
    kl_threshold: Positive | None = None
    """Completions with A < 0 and this KL or more are dropped. Set it with `kl_estimator`; unset: the method's."""
    floor: float | None = Field(default=None, ge=0, le=1)
    """tis, ftis: smallest weight of a token where A > 0, at most `cap` (beyond the paper). Unset: 0."""
    filter: str | None = Field(default=None, max_length=64)
    """Completions with A < 0 that the filtered methods drop. `kl`: from `kl_threshold` on (paper). `quantile`: of each
    peer's in a step, all but the `keep_share` of least KL. `ess`: likewise, with the peer's effective sample size as
    the share. These two use `kl_estimator`, keep own completions, and need one more forward pass. `obrs`: single tokens
    are rejected at random, whatever A is (Jackpot). `positives`: all of peers. Unset: `kl`, with `accepted` always
    `positives`."""
    keep_share: float | None = Field(default=None, ge=0, le=1)
    """Share of each peer's completions with A < 0 that `filter = "quantile"` keeps. Unset: 0.3."""
    rank_own: bool | None = None
    """`quantile` and `ess`: rank own completions too. For runs in which new weights reach the generators many steps
    late. Unset: false."""
    eps_low: Positive | None = None
    """Lower clip width; unset: the method's."""
    eps_high: Positive | None = None
    """Upper clip width; unset: the method's."""
    agg: Literal["seq_mean", "token_mean", "max_len"] | None = None
    """Mean inside each completion, over all tokens, or by the completion limit; unset: the method's."""
    clip: bool | None = None
    """gepo: whether its weight is clipped."""
    alpha: float | None = Field(default=None, ge=0, le=1)
    """gepo: share of the learner's probability in the weight's denominator."""
    old_logprobs: Literal["engine", "learner"] | None = None
    """gspo, gspo_token, hacpo: log-probs that the ratio of own completions is relative to. `engine`: as sampled.
    `learner`: the learner's at the first pass, so the clip sees no difference between engine and learner. Unset: the
    method's."""

    peer_weights: PeerWeighting | None = None
    """Scales each peer's advantages by the gradient of its completions (ftis-node docs train/methods#beyond-the-paper).
    `agreement`: by its cosine with that of own ones. `shrinkage`: by the squared distance between them. Unset: no
    scaling."""

    @field_validator("name", "filter", "advantage_scale")
    @classmethod
    def _is_known(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.field_name == "name":
            return known_name("method", str(value), info.data.get("package"))
        kind = "filter" if info.field_name == "filter" else "advantage"
        return None if value is None else known_name(kind, value)

    @model_validator(mode="after")
    def _settings_agree(self) -> MethodSection:
        if (self.kl_estimator is None) != (self.kl_threshold is None):
            raise ValueError(
                "kl_estimator and kl_threshold go together: set both or neither, because a threshold fits one estimator"
            )
        if self.floor is not None and self.cap is not None and self.floor > self.cap:
            raise ValueError(f"floor must not exceed cap, but {self.floor} > {self.cap}")
        if self.advantage_shift is not None and self.advantage_scale not in (None, *SCALES):
            raise ValueError(f"advantage_shift has no effect with the plug-in {self.advantage_scale!r}: remove it")
        for name, filters in FILTERS_OF.items():
            if getattr(self, name) is not None and self.filter not in filters:
                known = " or ".join(f'"{each}"' for each in filters)
                raise ValueError(f"{name} has no effect without filter = {known}: remove it")
        return self

    def given(self) -> dict[str, float | str]:
        """Return the parameters that the manifest sets. The method's defaults apply to the others."""
        return self.model_dump(exclude={"name", "package", *NOT_OF_THE_LOSS}, exclude_none=True)
