"""An optimizer step: the tables `[method]`, `[optimizer]` and `[step]` of the manifest.

`[method]` has the loss and those of its parameters that runs differ in. All others, such as the masks of `mis`, are
those of the method's paper (`ftis_node/algorithms/settings.py`). `[step]` has the groups. `[optimizer]` has Adam, its
learning-rate schedule, and the KL penalty to the initial model.

The learning rate is a pure function of the step's number:

    rate
    peak |      ________                 constant
         |     /  '-._                   linear, cosine: from the peak to a tenth of it
         |    /       '-._
         |   /            '-------       ... constant from here
         |__/________________________
            warmup   decay          step

So a resumed run needs no state for it, and every update on one batch has the same rate. Steps count from 1. No step
of a warm-up has the rate 0, and without a warm-up the first step has the peak.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ftis_node.config.method_table import SCALES, KlEstimator, known_name
from ftis_node.config.section import MOST, Positive, Section

Share = Literal["vertical", "horizontal"]
ScheduleName = Literal["constant", "linear", "cosine"]
FINAL_SHARE = 0.1  # of the peak, which remains at last; not 0: a swarm's run has no end
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


class OptimizerSection(Section):
    """The optimizer. Defaults are the F-TIS paper's."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Adam's learning rate for full fine-tuning."""
    lora_learning_rate: float = Field(default=1e-4, gt=0, le=1)
    """Adam's learning rate for LoRA adapters."""
    schedule: ScheduleName = "constant"
    """Schedule of the learning rate after the warm-up. `constant`; `linear` and `cosine`: it falls within `decay_steps`
    to a tenth and stays there. Steps are those of each node."""
    warmup_steps: int = Field(default=0, ge=0, le=1000000)
    """Steps over which the rate rises; at step s it is s / warmup_steps of the full rate."""
    decay_steps: int | None = Field(default=None, ge=1, le=10000000)
    """Steps over which the rate falls, counted from the first step at the full rate. `linear` and `cosine` need it."""
    max_grad_norm: float = Field(default=1.0, ge=0, le=MOST)
    """Gradients are scaled down to this L2 norm; 0: no scaling, the norm is only reported."""
    kl_coef: float = Field(default=0.0, ge=0, le=100)
    """Weight of the KL to the initial model in the loss (GRPO's k3 with its gradient, arXiv 2402.03300 eq. 4). Above 0
    a step has one more forward pass, and full fine-tuning holds a second model. With LoRA the reference is the same
    model with the adapter off. 0: none."""
    kl_weighted: bool = False
    """Weights the KL of each token by min(rho, `cap`) (DeepSeek-V3.2, arXiv 2512.02556; TRL's
    `use_bias_correction_kl`). Without it, tokens of peers count as if the learner had sampled them."""
    updates_per_batch: int = Field(default=1, ge=1, le=64)
    """Optimizer updates on one batch."""

    @model_validator(mode="after")
    def _settings_agree(self) -> OptimizerSection:
        if self.kl_weighted and not self.kl_coef:
            raise ValueError("kl_weighted has no effect without kl_coef: set kl_coef, or remove it")
        if self.schedule == "constant" and self.decay_steps is not None:
            raise ValueError(
                'decay_steps has no effect on a constant rate: set schedule = "linear" or "cosine", or remove it'
            )
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(f'schedule = "{self.schedule}" needs decay_steps: over how many steps the rate falls')
        return self

    def learning_rate_at(self, step: int, *, peak: float) -> float:
        """Return the rate of step `step`, counted from 1; `peak` is the highest rate."""
        if step < self.warmup_steps:
            return peak * step / self.warmup_steps
        if self.decay_steps is None:  # a constant rate
            return peak
        first_at_peak = max(1, self.warmup_steps)
        progress = min(1.0, (step - first_at_peak) / self.decay_steps)
        left = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * left)


class StepSection(Section):
    """Groups of one optimizer step."""

    own_groups: int = Field(default=12, ge=0, le=4096)
    """Groups of this node that a step takes (I)."""
    foreign_groups: int = Field(default=12, ge=0, le=4096)
    """Groups of peers that a step takes (J)."""
    prompt_sharing: Share = "vertical"
    """`vertical`: each node answers its own prompts, one advantage group per node. `horizontal`: all answer the same
    prompts, one advantage group per prompt over all nodes' completions."""
    group_selection: str = Field(default="newest", max_length=64)
    """`newest`: ready own groups and the newest of each peer. `sapo`: groups with equal rewards are discarded, then a
    uniform draw (Swarm sAmpling, arXiv 2509.08721). Or an installed plug-in."""
    foreign_wait_s: float = Field(default=120.0, ge=0, le=86400)
    """How long a step that has all its own groups waits for foreign ones at most. After it the step starts with those
    it has. It waits only for senders whose groups come (ftis-node docs get-started/concepts)."""
    max_age_s: float = Field(default=1800.0, gt=0, le=86400)
    """Age at which an unused group is dropped (stale)."""
    max_async_level: int = Field(default=1, ge=0, le=64)
    """Steps that generation may run ahead of training. The node generates at most own_groups x (1 + max_async_level)
    groups before a step uses them."""
    max_version_lag: int = Field(default=8, ge=0, le=100000)
    """Weight updates after which an unused own group is dropped."""
    other_tokenizers: Literal["ignore", "text"] = "ignore"
    """Groups of peers with another tokenizer. `ignore`: not pulled. `text`: the node pulls their text and learns from
    the positive ones, by the ratio of the mean log-probs (meant for `nois`, `tis` and `ftis`)."""

    backfill_with_own: bool = False
    """Whether own groups replace foreign ones that are missing or refused, so that a step keeps its size. The node
    generates in the next step what one step lacked."""
    generated_groups: int | None = Field(default=None, ge=1, le=4096)
    """Groups that this node generates for a step, of which `own_groups` are drawn; the others are discarded. Needs
    `group_selection = "sapo"` and at least `own_groups`. Unset: `own_groups`."""

    @field_validator("group_selection")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return known_name("choice", value)

    @model_validator(mode="after")
    def _settings_agree(self) -> StepSection:
        if self.backfill_with_own and self.prompt_sharing == "horizontal":
            raise ValueError(
                'backfill_with_own has no effect with prompt_sharing = "horizontal", where all nodes answer the same '
                "prompts: remove it"
            )
        if self.generated_groups is not None:
            if self.group_selection != "sapo" or self.backfill_with_own:
                raise ValueError('generated_groups needs group_selection = "sapo", and no backfill_with_own')
            if self.generated_groups < self.own_groups:
                raise ValueError(
                    f"generated_groups is {self.generated_groups}: {self.own_groups} own_groups cannot be drawn from "
                    "so few"
                )
        if self.own_groups + self.foreign_groups < 1:
            raise ValueError("own_groups and foreign_groups are both 0: a step would take nothing")
        return self

    @property
    def num_generated(self) -> int:
        """Groups that a node generates for a step."""
        return self.generated_groups or self.own_groups
