"""The check group: an own group that the learner's present weights sampled, compared with its own log-probs.

Generation runs ahead. So a step's groups are mostly a version old and cannot compare engine and learner under the same
weights. The daemon therefore offers the first group that a new version sampled. An idle learner measures it at once, a
busy one just before the update of the step in progress.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ftis_node.learner.data.batch import make_batch
from ftis_node.learner.data.groups import unpack_train_group
from ftis_node.learner.step.mismatch import measure_mismatch

if TYPE_CHECKING:
    from torch import Tensor

    from ftis_node.learner.data.batch import TrainBatch
    from ftis_node.learner.messages import TrainGroup
    from ftis_node.learner.step.mismatch import Mismatch


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
