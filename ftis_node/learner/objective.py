"""What a step maximises: the method by name, its parameters, and how rewards become advantages.

Two kinds of group meet here. Advantages are taken inside an *advantage key*, which in the horizontal mode spans several
generators; the loss is given the groups as they were generated, since GEPO's expectation is over one generator's
completions of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ftis_node.algorithms import find_method, group_advantages, method_parameters, policy_loss
from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ftis_node.learner.batch import Batch


@dataclass(frozen=True, slots=True)
class Objective:
    """`loss` of a batch under one method. Make it by `make_objective`, which checks the parameters."""

    method: str
    params: Mapping[str, Any]
    advantage_scale: str
    takes_anchor: bool

    def advantages(self, batch: Batch) -> Tensor:
        """`[N]` float64."""
        return group_advantages(batch.rewards, batch.advantage_ids, scale=self.advantage_scale)

    def loss(
        self, learner_logprobs: Tensor, batch: Batch, advantages: Tensor, *, anchor: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Scalar loss and metrics of `learner_logprobs` `[N, T]`.

        `anchor` `[N, T]` is the learner's log-probs at the first of several updates on this batch; methods that do not
        know it measure against the behaviour log-probs and need none.
        """
        params = dict(self.params)
        if anchor is not None and self.takes_anchor:
            params["anchor_logprobs"] = anchor
        return policy_loss(
            self.method, learner_logprobs, batch.behaviour_logprobs, batch.mask, advantages, batch.group_ids, **params
        )


def make_objective(
    method: str, params: Mapping[str, Any], advantage_scale: Literal["std", "mean"] | None = None
) -> Objective:
    """The objective of `method`; `advantage_scale` None takes the method's own. Raises ConfigError for bad settings."""
    try:
        scale = advantage_scale or find_method(method).advantage_scale
        takes_anchor = "anchor_logprobs" in method_parameters(method)
        objective = Objective(method=method, params=params, advantage_scale=scale, takes_anchor=takes_anchor)
        one = torch.zeros(1, 1)
        policy_loss(method, one, one, one.bool(), one[0], torch.zeros(1, dtype=torch.int64), **params)
    except ValueError as error:
        raise ConfigError(f"the learner's method cannot be set up: {error}") from error
    return objective
