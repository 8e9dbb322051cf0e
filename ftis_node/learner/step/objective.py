"""The objective of a step: the method by name, its parameters, and the conversion of rewards to advantages.

Groups have two roles. Advantages are computed inside an *advantage key*, which in the horizontal mode spans several
generators. The loss gets the groups as they were generated, since GEPO's expectation is over one generator's
completions of one prompt.

Advantages of a plug-in may depend on the learner's log-probs at the first pass (`algorithms/scored_batch.py`). So its
loss couples all completions, and the two passes of `train_step.py` are needed.

Completions that a peer with another tokenizer sent as text have no token ratio. Their advantage is computed in their
whole group, then weighted or dropped as in `algorithms/importance_weights.py`. The loss gets the learner's own log-
probs at the first pass as theirs. That suits `nois`, `tis` and `ftis`; others lose the ratio that they need. A filter
that compares a sender's completions treats them as this node's own. Their KL is unknown, so those with A <= 0 are
filtered.

A peer's group gets no gradient if no honest sampling can cause its log-probs (`algorithms/diagnostics.py`). Until
all log-probs are computed, that is decided on the completions computed so far (`train_step.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ftis_node.algorithms.advantages import group_advantages
from ftis_node.algorithms.diagnostics import likelihood_gain, sender_sums
from ftis_node.algorithms.importance_weights import SEQUENCE_LOG_RATIO_LIMIT, cross_tokenizer_advantages
from ftis_node.algorithms.loss import kl_to_start, policy_loss, require_parameters
from ftis_node.algorithms.methods import METHODS, find_method, is_separable, method_parameters
from ftis_node.algorithms.scored_batch import AdvantageRule, ScoredBatch, load_advantage
from ftis_node.algorithms.settings import TENSORS
from ftis_node.config.method_table import SCALES
from ftis_node.errors import ConfigError
from ftis_node.learner.batch import TrainBatch, on_device


@dataclass(slots=True)
class Objective:
    """The `loss` of a batch under one method. Raises ConfigError for parameters that do not fit together.

    `params` are parameters of the method, afterwards all of them; those that are tensors are None until a batch gives
    them. `advantage_scale` None: the method's own. `advantage_shift` is the `shift` of built-in advantages.

    `kl_to_start` is the KL's weight; with `kl_weighted` min(rho, `cap`) weighs each of its tokens.
    `max_logprob_gap_nats` bounds how far a peer's log-probs of a part of a completion may sum below the learner's. With
    `mask_truncated` completions without an end get no gradient. The number `rejection_key` in [0, 2^62) is mixed into
    the random numbers of the filter `obrs`.
    """

    method: str
    params: Mapping[str, Any]
    advantage_scale: str | None = None
    advantage_shift: float = 0.0
    kl_to_start: float = 0.0
    kl_weighted: bool = False
    max_logprob_gap_nats: float = math.inf
    mask_truncated: bool = False
    rejection_key: int = 0
    scale: str = field(init=False)
    separable: bool = field(init=False)
    advantage_rule: AdvantageRule | None = field(init=False)  # of a plug-in

    def __post_init__(self) -> None:
        try:
            self.scale = self.advantage_scale or find_method(self.method).advantage_scale
            self.advantage_rule = None if self.scale in SCALES else load_advantage(self.scale)
            self.separable = is_separable(self.method, self.params) and self.advantage_rule is None
            require_parameters(self.method, self.params)
            self.params = method_parameters(self.method) | dict(self.params)
        except ValueError as error:
            raise ConfigError(f"the learner's method cannot be set up: {error}") from error

    def separates(self, batch: TrainBatch) -> bool:
        """Return whether dL/dlp of a completion's tokens is independent of other completions' learner log-probs.

        It is not if those also act as behaviour log-probs of a group, for rows sent as text.
        """
        return self.separable and not bool(batch.is_text.any())

    def share(self, part: TrainBatch, batch: TrainBatch) -> float:
        """Return the weight of the loss of `part`, some completions of `batch`, in the loss of `batch`."""
        if self.params["agg"] == "token_mean":
            return part.num_tokens / max(1, batch.num_tokens)
        return len(part.completions) / len(batch.completions)

    def _text_weights(self, means: Tensor, batch: TrainBatch) -> Tensor:
        """Return the weights `[N]` of rows sent as text; `means` `[N]` are the learner's mean log-probs."""
        ones = torch.ones_like(means)
        if not find_method(self.method).weighted:
            return ones
        return cross_tokenizer_advantages(means, batch.behaviour_means, ones, cap=self.params["cap"])

    def _group_ids(self, batch: TrainBatch) -> Tensor:
        """Return the ids of groups for the loss. A peer that knew them could choose which tokens `obrs` accepts."""
        return batch.group_ids + self.rejection_key

    def advantages(self, batch: TrainBatch, first_pass: Tensor | None = None) -> Tensor:
        """Return the advantages, `[N]` float64.

        Those of a plug-in need `first_pass` `[N, T]`, the learner's log-probs there; None: all ratios are 1.
        """
        if self.advantage_rule is not None:
            advantages = self.advantage_rule(_scored(batch, first_pass))
        else:
            advantages = group_advantages(
                batch.rewards,
                batch.advantage_ids,
                scale=self.scale,
                sender_ids=batch.policy_ids,
                shift=self.advantage_shift,
            )
        advantages = batch.weights * advantages
        return torch.where(batch.is_cut, 0.0, advantages) if self.mask_truncated else advantages

    def understated(self, learner_logprobs: Tensor, batch: TrainBatch) -> Tensor:
        """Return `[N]` bool: peers' completions with log-probs too far below the learner's to be honest."""
        there = partial(on_device, device=learner_logprobs.device)
        gain = likelihood_gain(learner_logprobs, there(batch.behaviour_logprobs), there(batch.mask))
        return there(~batch.is_own & ~batch.is_text) & (gain > self.max_logprob_gap_nats)

    def excluded(self, learner_logprobs: Tensor, batch: TrainBatch) -> Tensor:
        """Return `[N]` bool: all completions of groups with an understated one, because the others may be false too."""
        refused_ids = batch.group_ids[self.understated(learner_logprobs, batch)]
        return torch.isin(batch.group_ids, refused_ids)

    def may_train(self, batch: TrainBatch, advantages: Tensor, excluded: Tensor | None) -> Tensor:
        """Return `[N]` bool: completions that may have a gradient, whatever their log-probs are.

        Without an advantage those of the built-in methods have none, unless a KL term is part of the loss. Advantages
        of a plug-in are not yet known.
        """
        is_plugin = self.method not in METHODS or self.advantage_rule is not None
        has_other_terms = self.kl_to_start or self.params.get("k3_beta") or is_plugin
        rows = torch.ones_like(batch.is_own) if has_other_terms else advantages != 0
        return rows if excluded is None else rows & ~excluded

    def loss(
        self,
        learner_logprobs: Tensor,
        batch: TrainBatch,
        advantages: Tensor,
        *,
        first_pass: Tensor | None,
        reference: Tensor | None = None,
        excluded: Tensor | None = None,
        checks: bool = True,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the scalar loss and metrics of `learner_logprobs` `[N, T]`, computed on their device.

        All other tensors are on the CPU. Without `checks` the host does not wait for a GPU: values are not checked, and
        there are no metrics. The loss of a batch with rows sent as text is computed on the CPU, once a step.

        `excluded` `[N]` marks completions without a gradient. If None, the completions that `learner_logprobs` show to
        be understated are excluded, each by itself. `first_pass` `[N, T]` is the learner's log-probs at the first of
        several updates on this batch; None at the first. With `reference` `[N, T]`, the starting model's log-probs, the
        KL to that model is part of the loss and of the metrics.
        """
        if batch.is_text.any():
            learner_logprobs = learner_logprobs.cpu()
        if self.advantage_rule is not None:
            advantages = self.advantages(batch, learner_logprobs if first_pass is None else first_pass)
        there = partial(on_device, device=learner_logprobs.device)
        excluded = self.understated(learner_logprobs, batch) if excluded is None else there(excluded)
        believed = torch.where(excluded, 0.0, there(advantages))
        frozen = excluded | there(batch.is_cut) if self.mask_truncated else excluded
        # A KL term has a gradient without an advantage, too.
        learner_logprobs = torch.where(frozen[:, None], learner_logprobs.detach(), learner_logprobs)
        params = {**self.params, "first_pass_logprobs": None if first_pass is None else there(first_pass)}
        if "sender_ids" in params:
            params["sender_ids"] = torch.where(batch.is_text, 0, batch.policy_ids)
        mask = there(batch.mask)
        if batch.is_text.any():
            loss, metrics = self._loss_with_texts(learner_logprobs, batch, believed, params)
        else:
            loss, metrics = policy_loss(
                self.method,
                learner_logprobs,
                there(batch.behaviour_logprobs),
                mask,
                believed,
                self._group_ids(batch),
                checks=checks,
                **params,
            )
        if reference is None:
            return loss, metrics
        agg, max_completion_length = self.params["agg"], self.params["max_completion_length"]
        sampled = torch.where(there(batch.is_text)[:, None], learner_logprobs.detach(), there(batch.behaviour_logprobs))
        kl = kl_to_start(
            learner_logprobs,
            there(reference),
            mask,
            agg=agg,
            max_completion_length=max_completion_length,
            behaviour_logprobs=sampled if self.kl_weighted else None,
            cap=self.params["cap"],
        )
        if checks:
            metrics = metrics | {"kl_to_start": kl.item()}
        return loss + self.kl_to_start * kl.to(loss.dtype), metrics

    def _loss_with_texts(
        self, learner_logprobs: Tensor, batch: TrainBatch, advantages: Tensor, params: dict[str, Any]
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a batch with rows sent as text: those with A <= 0 are filtered, the others weighted.

        `kept_fraction` counts all completions, `mean_kl` the rows that are no text.
        """
        first_pass = params["first_pass_logprobs"]
        own_logprobs = learner_logprobs.detach() if first_pass is None else first_pass
        is_filtered = batch.is_text & (advantages <= 0)
        is_counted = ~is_filtered if params["denominator"] == "kept" else torch.ones_like(is_filtered)
        weighted = self._text_weights(_mean_logprobs(own_logprobs, batch.mask), batch) * advantages.clamp(min=0)
        of_rows = {name: params[name][is_counted] for name in TENSORS if params.get(name) is not None}
        loss, metrics = policy_loss(
            self.method,
            learner_logprobs[is_counted],
            torch.where(batch.is_text[:, None], own_logprobs, batch.behaviour_logprobs)[is_counted],
            batch.mask[is_counted],
            torch.where(batch.is_text, weighted, advantages)[is_counted],
            self._group_ids(batch)[is_counted],
            **params | of_rows,
        )
        num_counted = int(is_counted.sum())
        num_kept = metrics["kept_fraction"] * num_counted - int((is_filtered & is_counted).sum())
        num_with_kl = num_counted - int((batch.is_text & is_counted).sum())
        metrics["kept_fraction"] = num_kept / len(is_counted)
        metrics["mean_kl"] *= num_counted / max(num_with_kl, 1)
        return loss, metrics

    def sender_sums(self, learner_logprobs: Tensor, batch: TrainBatch) -> dict[str, Tensor]:
        """Return the statistics of `batch.senders` (`algorithms/diagnostics.py`) from the first pass, `[N, T]`."""
        known = self.advantages(batch, learner_logprobs)
        advantages = torch.where(self.excluded(learner_logprobs, batch), 0.0, known)
        behaviour_logprobs, texts = batch.behaviour_logprobs, {}
        if batch.is_text.any():
            behaviour_logprobs = torch.where(batch.is_text[:, None], learner_logprobs, behaviour_logprobs)
            weights = self._text_weights(_mean_logprobs(learner_logprobs, batch.mask), batch)
            texts = {"is_text": batch.is_text, "text_weights": weights}
        return sender_sums(
            self.method,
            learner_logprobs,
            behaviour_logprobs,
            batch.mask,
            advantages,
            self._group_ids(batch),
            batch.sender_ids,
            num_senders=len(batch.senders),
            of_own_weights=batch.of_own_weights,
            **texts,
            **{name: value for name, value in self.params.items() if name not in TENSORS},
        )


def _scored(batch: TrainBatch, first_pass: Tensor | None) -> ScoredBatch:
    """Return the batch as a plug-in for advantages gets it."""
    ratios = torch.ones_like(batch.rewards)
    if first_pass is not None:
        generator = _mean_logprobs(batch.behaviour_logprobs, batch.mask)
        generator = torch.where(batch.is_text, batch.behaviour_means, generator)
        log_ratios = _mean_logprobs(first_pass.detach().cpu(), batch.mask) - generator
        ratios = log_ratios.clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    return ScoredBatch(batch.rewards, batch.advantage_ids, batch.policy_ids, batch.task_ids, ratios)


def _mean_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens of each completion, `[N]` float64; 0 without tokens."""
    return torch.where(mask, logprobs, 0.0).double().sum(dim=1) / mask.sum(dim=1).clamp(min=1)
