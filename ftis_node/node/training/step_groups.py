"""The groups that steps took from the buffer: release them, or return them to READY."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ftis_node.replay.failures import MAX_FAILED_STEPS

if TYPE_CHECKING:
    from ftis_node.learner.messages import LearnerState
    from ftis_node.node.supervision.disk_thread import DiskThread
    from ftis_node.node.training.buffer_limits import BufferLimits
    from ftis_node.node.training.slots import SlotPool
    from ftis_node.replay.buffer import ReplayBuffer
    from ftis_node.replay.lifecycle import ReleaseReason
    from ftis_node.replay.reader import HeldGroup, ReplayReader

log = logging.getLogger(__name__)


class StepGroups:
    """State transitions of TAKEN groups, and the slots that they free."""

    def __init__(
        self, *, buffer: ReplayBuffer, reader: ReplayReader, disk: DiskThread, slots: SlotPool, limits: BufferLimits
    ) -> None:
        self._buffer = buffer
        self._reader = reader
        self._disk = disk
        self._slots = slots
        self._limits = limits

    async def release(self, step: int, reason: ReleaseReason) -> None:
        """Release the groups of a step: TAKEN -> RELEASED."""
        await self._disk(self._buffer.release_step, step, reason)

    async def note_failed(self, step: int) -> None:
        """Count a failure against each group of a step."""
        await self._disk(self._buffer.note_failed, step)

    async def reconcile(self, state: LearnerState) -> None:
        """Make the groups of steps that are not in the learner's checkpoint ready again: TAKEN -> READY."""
        last_groups = None if state.last_groups is None else [bytes.fromhex(name) for name in state.last_groups]
        returned = await self._disk(self._buffer.reconcile, state.step, last_groups)
        if returned:
            log.warning("the learner is at step %d: %d groups are ready again", state.step, returned)

    async def release_poisoned(self) -> dict[bytes, HeldGroup | None]:
        """Release and return groups on which the learner failed repeatedly, so that they cannot block the node."""
        poisoned = await self._disk(self._buffer.release_poisoned)
        if poisoned:
            log.warning(
                "the learner failed %d times on the same %d groups: they are released", MAX_FAILED_STEPS, len(poisoned)
            )
        return {group_id: self._reader.held(group_id) for group_id in poisoned}

    async def prune(self) -> None:
        """Keep the buffer within its limits."""
        await self._limits.prune()

    def free_slots(self) -> None:
        """Free all slots except those of own groups that are READY or TAKEN, or in generation."""
        self._slots.set_held(self._reader.own_held())
