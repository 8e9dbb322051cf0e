"""The checkpoint manager of one learner: it resumes from the newest checkpoint and schedules the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ftis_node.config.limits import KEPT_CHECKPOINTS
from ftis_node.errors import MachineError
from ftis_node.files import write_error
from ftis_node.learner.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointOwner,
    CheckpointState,
    TrainingProgress,
    check_moments,
    gather,
    newest_usable,
    restore,
    state_of,
    tidy,
    write_checkpoint,
)
from ftis_node.learner.checkpoint.saving import CheckpointSaver
from ftis_node.learner.distributed.ranks import Ranks, RankTask
from ftis_node.learner.messages import CheckpointEvent, CheckpointInProgress, LearnerBoot
from ftis_node.learner.step.optimizer import MasterWeights

log = logging.getLogger(__name__)
FREE_SPACE: Final = "free disk space there and start again; the node resumes at the newest checkpoint"


class CheckpointManager:
    """The manager of one home's checkpoints. `progress` is the learner's; `saver` is the thread that writes.

    `on_event` gets an event for each unreadable checkpoint, and repeatedly while the learner waits for one.
    """

    def __init__(
        self,
        boot: LearnerBoot,
        owner: CheckpointOwner,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        *,
        ranks: Ranks,
        on_event: Callable[[CheckpointEvent], None],
    ) -> None:
        self.progress = TrainingProgress()
        self.saver = CheckpointSaver(every_steps=boot.settings.checkpoint_every_steps, on_wait=self._report_wait)
        self._folder = Path(boot.checkpoints_dir)
        self._owner = owner
        self._masters = masters
        self._optimizer = optimizer
        self._ranks = ranks
        self._on_event = on_event

    def resume(self) -> None:
        """Restore tensors and progress from the newest checkpoint, if there is one. Raises as `newest_usable` does."""
        trainable = self._masters.tensors
        found: Checkpoint | None = None
        with self._ranks.agreed():
            if self._ranks.rank == 0:
                found, damaged = newest_usable(self._folder, owner=self._owner)
                for skipped in damaged:
                    self._on_event(skipped)
                tidy(self._folder, damaged)
                if found is not None:
                    check_moments(found, trainable, self._optimizer)
        if (state := restore(found, trainable, self._optimizer, self._ranks)) is None:
            return
        self._masters.write_back()
        self.progress = TrainingProgress(*(getattr(state, name) for name in TrainingProgress.__struct_fields__))
        self.saver.saved_step = self.saver.begun_step = state.step

    def save_if_behind(self) -> None:
        """Write a checkpoint unless the newest one is of this step. Raises MachineError if the disk refuses."""
        try:
            self.saver.wait()
        except MachineError as error:  # the disk may have space again: the newest step is what must not be lost
            log.warning("%s; the next checkpoint is tried now", error)
        if self.saver.saved_step != self.progress.step:
            self._begin()
            self.saver.wait()

    def save_if_due(self) -> None:
        """Begin a checkpoint if one is due. Wait for its end unless checkpoints are written in the background.

        Raises MachineError if the disk refuses this one, or refused the previous one.
        """
        self.saver.raise_failure()
        if self.saver.is_due(self.progress.step):
            self._begin()
            if not self.saver.in_background:
                self.saver.wait()

    def take_part(self) -> None:
        """Contribute the shards of a rank above 0 when rank 0 begins a checkpoint."""
        gather(self._masters.tensors, self._optimizer, keep=False)

    def _begin(self) -> None:
        with self._ranks.lead(RankTask("save")):
            weights, moments = gather(self._masters.tensors, self._optimizer, on_gathered=self._report_wait)
        state = state_of(self._owner, self.progress)
        self.saver.begin(state.step, partial(self._write, state, weights, moments))

    def _write(self, state: CheckpointState, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        try:
            write_checkpoint(self._folder, state, weights, moments, keep=KEPT_CHECKPOINTS)
        except OSError as error:
            message = f"the checkpoint of step {state.step} cannot be written: {error}; {FREE_SPACE}"
            raise write_error(message, error) from error

    def _report_wait(self) -> None:
        self._on_event(CheckpointInProgress(step=self.progress.step))
