"""The checkpoint manager of one learner: it resumes from the newest checkpoint and schedules the next one."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftis_node.errors import MachineError
from ftis_node.learner.checkpoint.checkpoint import (
    TrainingProgress,
    gather,
    restore_optimizer,
    restore_weights,
    state_of,
    write_checkpoint,
)
from ftis_node.learner.checkpoint.checkpoint_choice import find_checkpoint
from ftis_node.learner.checkpoint.saving import CheckpointSaver
from ftis_node.learner.distributed.rank_commands import GatherCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ftis_node.learner.checkpoint.checkpoint import CheckpointOwner
    from ftis_node.learner.distributed.ranks import Ranks
    from ftis_node.learner.messages import CheckpointSkipped, LearnerBoot
    from ftis_node.learner.step.masters import MasterWeights

FREE_SPACE: Final = "free disk space there and start again; the node resumes at the newest checkpoint"


class CheckpointManager:
    """The manager of one home's checkpoints. `progress` is the learner's; `saver` is the thread that writes."""

    def __init__(
        self,
        boot: LearnerBoot,
        *,
        owner: CheckpointOwner,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
    ) -> None:
        self.progress = TrainingProgress()
        self.saver = CheckpointSaver(every_steps=boot.settings.checkpoint_every_steps)
        self._folder = Path(boot.checkpoints_dir)
        self._keep = boot.settings.keep_checkpoints
        self._owner = owner
        self._masters = masters
        self._optimizer = optimizer
        self._ranks = ranks

    def resume(self, on_skipped: Callable[[CheckpointSkipped], None]) -> None:
        """Restore tensors and progress from the newest checkpoint, if there is one. Raises as `newest_usable` does."""
        trainable = self._masters.tensors
        shapes = {name: value.shape for name, value in trainable.items()}
        found = find_checkpoint(
            self._folder, owner=self._owner, shapes=shapes, ranks=self._ranks, on_skipped=on_skipped
        )
        if found is None:
            return
        restore_weights(found, trainable)
        self._masters.write_back()
        restore_optimizer(found, trainable, self._optimizer)
        state = found.state
        self.progress = TrainingProgress(state.step, state.policy_version, state.last_report, state.last_groups)
        self.saver.goes_on_at(state.step)

    def save_if_behind(self) -> None:
        """Write a checkpoint unless the newest one is already of this step. Raises MachineError if the disk refuses."""
        with self._disk_errors():
            self.saver.wait()
            if self.saver.saved_step != self.progress.step:
                self._begin()
                self.saver.wait()

    def save_if_due(self) -> None:
        """Begin a checkpoint if one is due. Wait for its end unless checkpoints are written in the background.

        Raises MachineError if the disk refuses this one, or refused the previous one.
        """
        with self._disk_errors():
            self.saver.raise_failure()
            if self.saver.is_due(self.progress.step):
                self._begin()
                if not self.saver.in_background:
                    self.saver.wait()

    def take_part(self) -> None:
        """Contribute the shards of a rank above 0 when rank 0 begins a checkpoint."""
        gather(self._masters.tensors, self._optimizer, keep=False)

    def close(self) -> None:
        """Finish the current write and end the thread."""
        self.saver.close()

    def _begin(self) -> None:
        with self._ranks.lead(GatherCommand("checkpoint")):
            weights, moments = gather(self._masters.tensors, self._optimizer)
        state = state_of(self._owner, self.progress)
        self.saver.begin(state.step, partial(write_checkpoint, self._folder, state, weights, moments, keep=self._keep))

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            step = self.saver.failed_step
            raise MachineError(f"the checkpoint of step {step} cannot be written: {error}; {FREE_SPACE}") from error
