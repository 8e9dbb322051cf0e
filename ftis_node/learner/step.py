"""One step, exact for every method although the batch does not fit in memory at once.

A loss may tie completions together (a token mean over the batch, a group's expectation, a share of outliers), so it
cannot be summed over micro-batches. But it depends on the model only through the log-probs, a small matrix:

    pass 1   for each micro-batch, without gradient: log-probs            -> lp [N, T]
             loss(lp), dL/dlp [N, T]                                         the whole batch at once
    pass 2   for each micro-batch, with gradient: lp.backward(dL/dlp)     -> dL/dweights

which is the chain rule and nothing else. If all fits in one micro-batch, pass 1 keeps its graph and there is no second
forward. Micro-batches whose part of dL/dlp is zero (filtered, or no advantage) are not run again.

A step ends in one of three ways: applied; *skipped*, where no token has a gradient (an Adam step would still move the
weights by its momentum); *refused*, where a value is not finite. Then weights and optimiser are as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from ftis_node.errors import WorkerTaskError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ftis_node.learner.batch import Batch, MicroBatch
    from ftis_node.learner.objective import Objective

Forward: TypeAlias = "Callable[[MicroBatch], Tensor]"  # log-probs [M] of a micro-batch's completion tokens
Between: TypeAlias = Callable[[], None]  # called between micro-batches; raises WorkerTaskError to stop the step


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the two passes found. `skipped` or `refused` say why the parameters hold no gradient to apply.

    `learner_logprobs` is `[N, T]` float32 on the CPU, detached; `grad_norm` is the norm before clipping.
    """

    learner_logprobs: Tensor
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    skipped: str | None = None
    refused: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether there is a gradient to apply."""
        return self.skipped is None and self.refused is None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step of one or more updates on one batch.

    `first` is the first update's passes. `refused` may stand beside `num_updates` > 0: then a later update was not
    applied.
    """

    first: Gradients
    num_updates: int
    skipped: str | None
    refused: str | None


def compute_gradients(
    forward: Forward,
    batch: Batch,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    anchor: Tensor | None = None,
    between: Between = lambda: None,
) -> Gradients:
    """Add dL/dweights of the whole batch to the `.grad` of whatever `forward` depends on."""
    keeps_graph = len(micro_batches) == 1
    logprobs = torch.zeros(batch.mask.shape)
    outputs: list[Tensor] = []
    for micro_batch in micro_batches:
        between()
        with torch.set_grad_enabled(keeps_graph):
            outputs.append(forward(micro_batch))
        logprobs.view(-1)[micro_batch.cell_index] = outputs[-1].detach().cpu()
    refused = find_non_finite(logprobs, batch)
    if refused is not None:
        return Gradients(logprobs, refused=refused)

    leaf = logprobs.clone().requires_grad_()
    loss, metrics = objective.loss(leaf, batch, objective.advantages(batch), anchor=anchor)
    (gradient,) = torch.autograd.grad(loss, leaf)
    if not (torch.isfinite(loss) and torch.isfinite(gradient).all()):
        return Gradients(logprobs, refused="the loss is not finite")
    if not gradient.any():
        return Gradients(logprobs, loss=loss.item(), metrics=metrics, skipped="no signal")
    for micro_batch, output in zip(micro_batches, outputs, strict=True):
        share = gradient.view(-1)[micro_batch.cell_index]
        if share.any():
            between()
            with_graph = output if keeps_graph else forward(micro_batch)
            torch.autograd.backward(with_graph, share.to(with_graph.device))
    return Gradients(logprobs, loss=loss.item(), metrics=metrics)


@torch.no_grad()
def compute_logprobs(
    forward: Forward, batch: Batch, micro_batches: Sequence[MicroBatch], *, between: Between = lambda: None
) -> Tensor:
    """The learner's log-probs `[N, T]`, float32 on the CPU, 0 outside the mask; no gradient."""
    logprobs = torch.zeros(batch.mask.shape)
    for micro_batch in micro_batches:
        between()
        logprobs.view(-1)[micro_batch.cell_index] = forward(micro_batch).cpu()
    return logprobs


def take_step(
    forward: Forward,
    batch: Batch,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    *,
    max_grad_norm: float,
    updates: int = 1,
    between: Between = lambda: None,
    before_update: Callable[[], None] = lambda: None,
) -> StepOutcome:
    """`updates` optimiser steps on one batch, or fewer: it ends at the first that is skipped or refused.

    `before_update` is called once, at the last moment at which the weights are those that the step began with. What is
    raised during the first update (by a callback, or for want of memory) leaves weights and optimiser as they were.
    Later it cannot: then the step is done, with fewer updates.
    """

    def update(anchor: Tensor | None) -> Gradients:
        gradients = compute_gradients(forward, batch, micro_batches, objective, anchor=anchor, between=between)
        between()
        if anchor is None:
            before_update()
        return _apply(gradients, optimizer, max_grad_norm)

    try:
        first = last = update(None)
        num_updates = int(first.is_usable)
        while last.is_usable and num_updates < updates:
            try:
                last = update(first.learner_logprobs)
            except (WorkerTaskError, torch.OutOfMemoryError) as error:
                last = replace(first, refused=f"update {num_updates + 1} of {updates} was not done: {error}")
            num_updates += int(last.is_usable)
    finally:
        optimizer.zero_grad(set_to_none=True)
    return StepOutcome(first, num_updates=num_updates, skipped=last.skipped, refused=last.refused)


def _apply(gradients: Gradients, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> Gradients:
    """Clip and step if there is something to apply; returns `gradients` with the norm, or with why it was refused."""
    if not gradients.is_usable:
        return gradients
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    if not math.isfinite(norm):
        return replace(gradients, refused="the gradient is not finite")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return replace(gradients, grad_norm=norm)


def find_non_finite(learner_logprobs: Tensor, batch: Batch) -> str | None:
    """What in the batch is not finite, in words; None where all is."""
    if not torch.isfinite(batch.rewards).all():
        return "a reward is not finite"
    if not (torch.isfinite(batch.behaviour_logprobs).all() and torch.isfinite(batch.behaviour_means).all()):
        return "a behaviour log-prob is not finite"
    if not torch.isfinite(learner_logprobs).all():
        return "a learner log-prob is not finite"
    return None
