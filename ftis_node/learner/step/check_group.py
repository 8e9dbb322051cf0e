"""The check group: an own group that the learner's present weights sampled, measured against its own log-probs.

Generation runs ahead. So a step's groups are mostly a version old and do not compare engine and learner under the same
weights. The daemon therefore offers the first group that a new version made. It is measured at once if the learner is
idle, else just before the update of the step in progress.
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
    """At most one group waits, the newest; what was measured belongs to one version."""

    def __init__(self) -> None:
        self._waiting: deque[TrainGroup] = deque(maxlen=1)
        self._version: int | None = None
        self._found: Mismatch | None = None

    def offer(self, group: TrainGroup) -> None:
        """Have `group` measured next, instead of one that waits. From any thread. Raises as `unpack_train_group`."""
        unpack_train_group(group)  # here, because an error in `take` would end the step
        self._waiting.append(group)

    def take(self, *, version: int) -> TrainGroup | None:
        """The group that waits; it is dropped where `version`, the learner's present one, did not sample all of it."""
        try:
            group = self._waiting.pop()
        except IndexError:
            return None
        return group if make_batch([group]).sampled_by(version).any() else None

    def note(self, batch: TrainBatch, learner_logprobs: Tensor, *, version: int) -> None:
        """Measure the group that was taken: `batch` holds it alone, `learner_logprobs` `[N, T]` are under `version`."""
        tokens = batch.sampled_by(version)
        self._found = measure_mismatch(learner_logprobs[tokens], batch.behaviour_logprobs[tokens])
        self._version = version

    def found(self, *, version: int) -> Mismatch | None:
        """Return what was measured under `version`; None if nothing was."""
        return self._found if self._version == version else None
