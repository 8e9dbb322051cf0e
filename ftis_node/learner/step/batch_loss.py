"""The loss of a batch as a function of its log-probs, and flags that the host reads once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ftis_node.learner.batch import MicroBatch, TrainBatch, on_device
from ftis_node.learner.step.objective import Objective

LOSS = "the loss"


class Flags:
    """Booleans on one device. The host reads all at once, because each read waits for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[str, Tensor] = {}

    def note(self, name: str, flag: Tensor) -> None:
        """Set `name` if the scalar `flag` is true."""
        flag = flag.to(self._device, non_blocking=True)
        self._found[name] = self._found[name] | flag if name in self._found else flag

    def check(self, values: Tensor, name: str) -> None:
        """Note under `name` whether one of the values is not finite."""
        self.note(name, ~torch.isfinite(values.detach()).all())

    def read(self) -> list[str]:
        """Return the names that are set, in the order in which they were first noted."""
        values = torch.stack(list(self._found.values())).tolist() if self._found else []
        return [name for name, value in zip(self._found, values, strict=True) if value]


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The loss of a batch as a function of its learner log-probs `[N, T]`; the fields are as in `Objective.loss`."""

    objective: Objective
    batch: TrainBatch
    advantages: Tensor
    first_pass: Tensor | None
    reference: Tensor | None
    excluded: Tensor | None
    flags: Flags
    share: float = 1.0

    def __call__(self, learner_logprobs: Tensor, *, checks: bool = True) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = self.objective.loss(
            learner_logprobs,
            self.batch,
            self.advantages,
            first_pass=self.first_pass,
            reference=self.reference,
            excluded=self.excluded,
            checks=checks,
        )
        return self.share * loss, metrics

    def gradient(self, logprobs: Tensor) -> Tensor:
        """Return dL/dlp, `[N, T]`."""
        leaf = logprobs.clone().requires_grad_()
        loss, _ = self(leaf, checks=False)
        (gradient,) = torch.autograd.grad(loss, leaf)
        self.flags.check(loss, LOSS)
        self.flags.check(gradient, LOSS)
        return gradient

    def mark(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return them with the tokens that may have a gradient, as known before any pass."""
        rows = self.objective.may_train(self.batch, self.advantages, self.excluded)
        return marked(micro_batches, rows[:, None].expand(self.batch.mask.shape))

    def gradient_in(self, micro_batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Return dL/dlp `[M]` of a micro-batch's tokens.

        A separable loss is computed of their groups alone: the whole matrix would take longer than the model on a GPU.
        """
        cells, num_columns = micro_batch.cell_index, logprobs.shape[1]
        there = partial(on_device, device=logprobs.device)
        completions, group_ids = cells // max(1, num_columns), self.batch.group_ids
        rows = torch.isin(group_ids, group_ids[completions]).nonzero()[:, 0]
        if len(rows) == len(group_ids) or not self.objective.separates(self.batch):
            return self.gradient(logprobs).view(-1)[there(cells)]
        # In float64, so that `share` adds no rounding.
        gradient = self._only(rows).gradient(logprobs[there(rows)].double())
        here = torch.searchsorted(rows, completions) * num_columns + cells % num_columns
        return gradient.view(-1)[there(here)].to(logprobs)

    def _only(self, rows: Tensor) -> BatchLoss:
        """Return the part that the completions `rows` have in the loss."""
        part = self.batch.only(rows)
        each = {name: getattr(self, name) for name in ("advantages", "first_pass", "reference", "excluded")}
        chosen = {name: value[rows] for name, value in each.items() if value is not None}
        return replace(self, batch=part, share=self.objective.share(part, self.batch), **chosen)


def marked(micro_batches: Sequence[MicroBatch], may_train: Tensor) -> list[MicroBatch]:
    """Return the micro-batches with the tokens of which `may_train` `[N, T]` is true."""
    cells = may_train.reshape(-1)
    return [replace(each, trained=cells[each.cell_index].nonzero()[:, 0]) for each in micro_batches]
