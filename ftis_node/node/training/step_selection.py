"""Selection of a step's groups by the run's rule: takes some READY groups, and releases those that it discards."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ftis_node.algorithms.group_choice import pass_rates
from ftis_node.node.training.step_shares import note_signals
from ftis_node.replay.faulty_groups import MAX_FAILED_STEPS
from ftis_node.replay.lifecycle import ReleaseReason, choose_newest, choose_same_prompts, choose_sapo, choose_useful

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.learner.messages import LearnerState
    from ftis_node.node.context import NodeContext
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.supervision.background import DiskThread
    from ftis_node.node.training.group_limits import BufferLimits, SlotPool
    from ftis_node.node.training.step_shares import Division
    from ftis_node.replay.buffer import ReplayBuffer, StoredGroup
    from ftis_node.replay.lifecycle import ChoiceRule
    from ftis_node.replay.reader import HeldGroup, ReplayReader
    from ftis_node.swarm.demand import OwnDomain
    from ftis_node.swarm.peer_guard import PeerGuard
    from ftis_node.telemetry.events import EventLog

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


class StepSelection:
    """Selects the groups of a step from the buffer: READY -> TAKEN, or RELEASED if the rule discards them."""

    def __init__(
        self,
        *,
        context: NodeContext,
        buffer: ReplayBuffer,
        reader: ReplayReader,
        disk: DiskThread,
        peers: PeerManager,
        guard: PeerGuard,
        division: Division | None = None,
        own_domain: OwnDomain | None = None,
    ) -> None:
        self._context = context
        self._buffer = buffer
        self._reader = reader
        self._disk = disk
        self._peers = peers
        self._guard = guard
        self._division = division
        self._own_domain = own_domain

    async def take(self, step: int, *, own: int, foreign: int) -> list[StoredGroup]:
        """Take up to `own` and `foreign` groups, by signer, for a step."""
        events, rule = self._context.events, self._rule(step)
        groups, discarded = await self._disk(self._buffer.take, step, own=own, foreign=foreign, rule=rule)
        write_taken(events, groups, step=step)
        for passed_over in discarded:
            events.write("released", group=passed_over.id, reason=ReleaseReason.DISCARDED)
        note_signals(self._division, step, groups, discarded, guard=self._guard, events=events)
        return groups

    def _rule(self, step: int) -> ChoiceRule:
        section, domain = self._context.manifest.step, self._own_domain
        if section.group_selection == "sapo":
            return partial(choose_sapo, seed=step, domain=domain)
        neighbor = self._peers.share_cap().neighbor
        if section.prompt_sharing == "horizontal":
            return partial(choose_same_prompts, neighbor=neighbor)
        if section.group_selection == "useful":
            rates = pass_rates(self._reader.own_rewards())
            return partial(choose_useful, pass_rates=rates, neighbor=neighbor, domain=domain, turn=step)
        return partial(choose_newest, neighbor=neighbor, domain=domain, turn=step)


def write_taken(events: EventLog, groups: Sequence[StoredGroup], *, step: int) -> None:
    """Write one event per group, with its origin, in case the buffer or the event of its admission gets damaged."""
    for group in groups:
        events.write("taken", group=group.id, step=step, sender=group.sender, number=group.number)
