"""The mismatch between engine and learner on the same tokens under the same weights.

The engine reports the log-prob of each token that it samples, and the learner recomputes it. If both were exact they
would be equal, and an importance ratio would compare two policies only. Their difference (another kernel, number format
or softmax, or old weights) enters every ratio that the learner computes.

The KL is estimated by k3 of J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). With samples
from q, and r = p / q, the mean of (r - 1) - log r is an unbiased estimate of KL(q || p). Each of its terms is >= 0.

Generation runs ahead. So a step's groups are mostly a version old and cannot compare engine and learner under the same
weights. The daemon therefore offers the first group that a new version sampled, the check group. An idle learner
measures it at once, a busy one just before the update of the step in progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ftis_node.learner.data.batch import make_batch
from ftis_node.learner.data.groups import unpack_train_group

if TYPE_CHECKING:
    from torch import Tensor

    from ftis_node.learner.data.batch import TrainBatch
    from ftis_node.learner.messages import TrainGroup

MAX_RATIO_ERROR = 0.01
MAX_LOG_RATIO = 20.0  # nats; the losses clamp log-ratios to the same bound


@dataclass(frozen=True, slots=True)
class Mismatch:
    """`kl` is KL(engine || learner) in nats a token, `share` the share of tokens whose ratio differs from 1 by more
    than 1 %.
    """

    kl: float
    share: float
    num_tokens: int


def measure_mismatch(learner_logprobs: Tensor, engine_logprobs: Tensor) -> Mismatch | None:
    """Return the mismatch over K tokens that the engine sampled, from both log-probs `[K]` under the same weights.

    Returns None if there is no token, or a log-prob that is not finite.
    """
    log_ratios = learner_logprobs.double() - engine_logprobs.double()
    if not log_ratios.numel() or not bool(log_ratios.isfinite().all()):
        return None
    log_ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    errors = torch.expm1(log_ratios)  # r - 1, exact for small values
    return Mismatch(
        kl=float((errors - log_ratios).mean()),
        share=float((errors.abs() > MAX_RATIO_ERROR).double().mean()),
        num_tokens=log_ratios.numel(),
    )


class CheckGroup:
    """A queue of at most one group, the newest, and the last measurement with its version."""

    def __init__(self) -> None:
        self._waiting: deque[TrainGroup] = deque(maxlen=1)
        self._version: int | None = None
        self._found: Mismatch | None = None

    def offer(self, group: TrainGroup) -> None:
        """Queue `group`, in place of one that waits. Safe from any thread. Raises as `unpack_train_group`."""
        unpack_train_group(group)  # here, because an error in `take` would end the step
        self._waiting.append(group)

    def take(self, *, version: int) -> TrainGroup | None:
        """Remove and return the queued group. Returns None if `version`, the learner's present one, did not sample it
        completely.
        """
        try:
            group = self._waiting.pop()
        except IndexError:
            return None
        return group if make_batch([group]).sampled_by(version).any() else None

    def note(self, batch: TrainBatch, learner_logprobs: Tensor, *, version: int) -> None:
        """Measure the taken group: `batch` holds it alone, and `learner_logprobs` `[N, T]` are under `version`."""
        tokens = batch.sampled_by(version)
        self._found = measure_mismatch(learner_logprobs[tokens], batch.behaviour_logprobs[tokens])
        self._version = version

    def found(self, *, version: int) -> Mismatch | None:
        """Return the measurement under `version`; None without one."""
        return self._found if self._version == version else None
