"""The checkpoint manager of one learner: it resumes from the newest checkpoint and schedules the next one.

Weights and moments stay those of the last step while the next one computes gradients. So a thread writes them in the
background without a copy (write-behind), and the next update waits for it. A learner of several processes gathers its
shards first, which makes a copy.

Unless the operator sets an interval, writing takes at most `SHARE` of the time. After w seconds of writing, no write
begins for 19 w seconds. A model of 3B parameters whose 37 GB take 40 s is saved every 13 minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
from ftis_node.learner.distributed.ranks import Ranks, RankTask
from ftis_node.learner.messages import MAX_UNSAVED_STEPS, CheckpointEvent, CheckpointInProgress, LearnerBoot
from ftis_node.learner.step.optimizer import MasterWeights

log = logging.getLogger(__name__)
FREE_SPACE: Final = "free disk space there and start again; the node resumes at the newest checkpoint"
SHARE: Final = 0.05  # of the time
POLL_INTERVAL_S: Final = 0.5


class CheckpointSaver:
    """A write-behind saver that writes one checkpoint at a time. Not thread-safe.

    `saved_step` and `begun_step` are those of the newest checkpoint on disk and the newest begun one. `waited_s` is the
    total time that steps have waited, `write_s` that of the newest write.
    """

    def __init__(
        self,
        *,
        every_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the schedule. `every_steps` None: as often as `SHARE` allows. `wait` calls `on_wait` meanwhile."""
        self.saved_step = self.begun_step = 0
        self.waited_s = self.write_s = 0.0
        self._every_steps = every_steps
        self._clock = clock
        self._on_wait = on_wait
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._not_before = clock()

    @property
    def in_background(self) -> bool:
        """Return whether steps continue while a checkpoint is written."""
        return self._every_steps is None

    def is_due(self, step: int) -> bool:
        unsaved = step - self.begun_step
        if self._every_steps is not None:
            return unsaved >= self._every_steps
        return unsaved > 0 and (self._clock() >= self._not_before or unsaved >= MAX_UNSAVED_STEPS)

    def begin(self, step: int, write: Callable[[], object]) -> None:
        """Queue `write()` in the thread, after the previous checkpoint. Raises the error of that one."""
        self.wait()
        self.begun_step = step
        self._writing = self._thread.submit(self._write, step, write)

    def wait(self) -> None:
        """Wait until no write is in progress. Raises the error of a failed write once; its step is then due again."""
        if self._writing is None:
            return
        self.pause(self._on_wait)
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except BaseException:
            self.begun_step = self.saved_step
            raise

    def raise_failure(self) -> None:
        """Raise as `wait` does if the write has already ended; else return at once."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def pause(self, between: Callable[[], object]) -> None:
        """Wait until no write is in progress, calling `between()` meanwhile. `wait` raises a failure later."""
        began_at = self._clock()
        while self._writing is not None and wait([self._writing], timeout=POLL_INTERVAL_S).not_done:
            between()
        self.waited_s += self._clock() - began_at

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, step: int, write: Callable[[], object]) -> None:
        began_at = self._clock()
        write()
        ended_at = self._clock()
        self.saved_step, self.write_s = step, ended_at - began_at
        self._not_before = ended_at + (1 / SHARE - 1) * self.write_s


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
