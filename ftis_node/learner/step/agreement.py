"""The agreement of a peer's completions with this node's own, by their gradients: a cosine or a squared distance.

For each sender the gradient of the loss to one matrix, from that sender's completions alone:

    G_s = sum over the sender's tokens t of delta_t h_t^T            [out, in]
    agreement of s = cos(G_s, G_own)

The matrix is the last layer's attention output projection, with LoRA the one that the adapter modifies. Its input is
h_t, and delta_t the gradient of its output. In the last layer a position's output affects only that position's
prediction. So one backward pass over all senders' tokens gives every G_s exactly.

Other nodes cannot forge own completions. The cosine cos(G_a, G_b) between the even and the odd own groups is the
reference value for good data in so small a batch.

With `peer_weights = "shrinkage"` the gradients are divided by their completions: g_s is that of sender s, g_o the own.

    v_o = |g_a - g_b|^2 n_a n_b / n_o^2           variance of g_o; |g_a - g_b|^2 / 4 for halves of equal size
    v_s = v_o n_o / n_s                           that of g_s, if its completions vary as the own ones do
    distance of s = (|g_o - g_s|^2 - v_o) n_s / n_o

An unbiased sender has the expected distance v_o. A bias b adds |b|^2 n_s / n_o.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ftis_node.config.step import PeerWeighting
from ftis_node.errors import ConfigError
from ftis_node.learner.batch import MicroBatch, TrainBatch
from ftis_node.learner.step.train_step import Forward

PROJECTION = "o_proj"
MAX_SENDERS = 64  # senders whose gradients are held at once; further senders have no entry
OWN_HALVES = 2


class AgreementMeter:
    """Measures a step's passes: wrap the forward function of each step's batch, then `take` the results."""

    def __init__(self, causal_lm: Any, measure: PeerWeighting = "agreement") -> None:
        modules = [module for name, module in causal_lm.named_modules() if name.endswith(PROJECTION)]
        if not modules:
            raise ConfigError(f"method.peer_weights needs a model whose layers have a {PROJECTION}: remove the setting")
        self._measure = measure
        modules[-1].register_forward_hook(self._on_forward)
        self._batch: TrainBatch | None = None
        self._micro_batch: MicroBatch | None = None
        self._slots = torch.zeros(0, dtype=torch.int64)
        self._sums: dict[int, Tensor] = {}
        self._seen: list[Tensor] = []

    def watching(self, forward: Forward, batch: TrainBatch) -> Forward:
        """Return `forward`, measured until the next `take`."""
        self._batch, self._slots = batch, _slots(batch)
        self._sums, self._seen = {}, []

        def watched(micro_batch: MicroBatch) -> Tensor:
            self._micro_batch = micro_batch
            return forward(micro_batch)

        return watched

    def take(self) -> tuple[dict[str, float], float | None]:
        """Return the agreement by sender, and that of the own halves, None unless both have a gradient.

        Senders without a gradient have no entry. Without a gradient of own completions the result is empty. With
        `shrinkage` it has distances by sender, and v_o. It is then empty unless both halves have a gradient.
        """
        batch, sums, slots = self._batch, self._sums, self._slots
        self._batch, self._micro_batch, self._sums, self._seen = None, None, {}, []
        if batch is not None and self._measure == "shrinkage":
            return _distances(batch, slots, sums)
        halves = [sums.pop(half) for half in range(OWN_HALVES) if half in sums]
        if batch is None or not halves:
            return {}, None
        own = torch.stack(halves).sum(dim=0)
        found = {batch.senders[slot - OWN_HALVES + 1]: _cosine(total, own) for slot, total in sums.items()}
        among_own = _cosine(*halves) if len(halves) == OWN_HALVES else None
        return {name: value for name, value in found.items() if value is not None}, among_own

    def _on_forward(self, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._batch is None or not output.requires_grad:
            return
        assert self._micro_batch is not None
        add = partial(self._add, self._micro_batch, inputs[0].detach())
        output.register_hook(add)  # type: ignore[no-untyped-call]

    def _add(self, micro_batch: MicroBatch, features: Tensor, gradient: Tensor) -> None:
        """Add a micro-batch's gradient, in the backward pass. A repeated micro-batch begins a new pass."""
        if self._batch is None:
            return
        if any(micro_batch.cell_index is each for each in self._seen):
            self._sums, self._seen = {}, []
        self._seen.append(micro_batch.cell_index)
        rows = micro_batch.cell_index // self._batch.mask.shape[1]
        slot_at = torch.full((gradient.shape[0] * gradient.shape[1],), -1, dtype=torch.int64)
        slot_at[micro_batch.predictor_index] = self._slots[rows]
        deltas, inputs = gradient.detach().flatten(0, 1).float(), features.flatten(0, 1).float()
        for slot in set(slot_at.tolist()):
            if slot < 0:
                continue
            at = (slot_at == slot).nonzero().squeeze(1).to(deltas.device)
            total = deltas[at].T @ inputs[at]
            self._sums[slot] = self._sums[slot] + total if slot in self._sums else total


def _slots(batch: TrainBatch) -> Tensor:
    """Return `[N]`: 0 or 1 for the own halves, then a number for each sender, -1 for senders beyond the limit."""
    own_groups = torch.tensor(sorted(set(batch.group_ids[batch.is_own].tolist())), dtype=torch.int64)
    halves = torch.searchsorted(own_groups, batch.group_ids) % OWN_HALVES
    slots = torch.where(batch.is_own, halves, batch.sender_ids + OWN_HALVES - 1)
    return torch.where(slots < OWN_HALVES + MAX_SENDERS, slots, -1)


def _distances(batch: TrainBatch, slots: Tensor, sums: dict[int, Tensor]) -> tuple[dict[str, float], float | None]:
    sizes = {slot: int((slots == slot).sum()) for slot in sums}
    # A gradient is proportional to the weights of its completions, which a peer's weight must not depend on.
    means = {slot: total.double() / float(batch.weights[slots == slot].sum()) for slot, total in sums.items()}
    if not all(half in means for half in range(OWN_HALVES)):
        return {}, None
    num_own = sum(sizes[half] for half in range(OWN_HALVES))
    own = sum(means[half] * (sizes[half] / num_own) for half in range(OWN_HALVES))
    variance = float((means[0] - means[1]).square().sum()) * sizes[0] * sizes[1] / num_own**2
    if not math.isfinite(variance):
        return {}, None
    found = {
        batch.senders[slot - OWN_HALVES + 1]: (float((own - mean).square().sum()) - variance) * sizes[slot] / num_own
        for slot, mean in means.items()
        if slot >= OWN_HALVES
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}, variance


def _cosine(one: Tensor, other: Tensor) -> float | None:
    """Return the cosine; None if one of them is 0, or not finite."""
    norms = float(one.norm() * other.norm())
    value = float((one * other).sum()) / norms if norms > 0 else float("nan")
    return max(-1.0, min(1.0, value)) if value == value else None
