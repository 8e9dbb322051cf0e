"""TrainerExchange: publishes the groups of a trainer on this machine, and gives it the groups of peers.

    trainer --completions, log-probs--> publish: problem compared, scored --> publish loop --> peers
    trainer <--bodies, rewards--------- take: the run's rule, RELEASED as trained <-- buffer <-- peers

It replaces the generate and train loops in a node of the role `exchange`.

The page docs/train/trl.md has all reasons for which a group or a request of the trainer is refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ftis_node.node.exchange.offered_groups import OfferedGroups
from ftis_node.node.exchange.trainer_messages import OwnGroup, PublishedGroup
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.training.step_groups import take_groups
from ftis_node.records.group import Group
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.validation import Accepted, Refusal, ValidationResult

PASSING = frozenset({"busy", "paused", "scoring_timeout"})  # reasons for which the trainer may try again
MAX_STEP = 2**62


@dataclass(eq=False, repr=False)
class TrainerExchange(NodePart):
    """Both directions between the trainer and the swarm. One group is scored at a time.

    `publish_scored` numbers, signs and announces a scored group, and returns its verdict.
    """

    slots: SlotPool
    offered_groups: OfferedGroups
    publish_scored: Callable[[Group], Awaitable[ValidationResult]]

    def __post_init__(self) -> None:
        self._take_number = self.context.state.step  # of the last step of an earlier role
        self._has_failed = False  # the last take
        self._publishing = asyncio.Lock()
        self._taking = asyncio.Lock()

    async def resume(self) -> None:
        """Release the groups that a take before a crash left TAKEN. Number takes above those of earlier starts."""
        self.context.state.saved_step = None  # no checkpoint needs released groups again
        await self.store.disk(self.store.buffer.reconcile, MAX_STEP)
        self._take_number = max(self._take_number, self.store.reader.last_step())

    async def publish(self, offered: OwnGroup) -> PublishedGroup | Refusal:
        """Score and publish the trainer's group. Return its number and rewards, or why it is not published."""
        self.context.state.policy_version = offered.policy_version
        if self.store.space.why_full:
            return Refusal("paused", self.store.space.why_full)
        async with self._publishing:
            if not self.slots.try_charge():
                return Refusal("busy", f"peers have not fetched the last {self.slots.capacity} groups yet")
            is_submitted = False
            try:
                scored = await self.offered_groups.scored(offered)
                if isinstance(scored, Refusal):
                    return scored
                is_submitted = True  # the publish loop fills or frees the slot
                verdict = await self.publish_scored(scored)
            finally:
                if not is_submitted:
                    self.slots.cancel()
        if isinstance(verdict, Accepted):
            return PublishedGroup(verdict.group.number, list(verdict.group.rewards))
        return verdict.refusal

    async def take(self, count: int) -> list[StoredGroup]:
        """Take up to `count` foreign groups by the run's rule, and release them as trained.

        Take none while the disk is full.
        """
        if self.store.space.why_full:
            return []
        async with self._taking:
            if self._has_failed:  # a full disk: the trainer did not get the groups of that take
                self.context.events.write("step_lost", step=self._take_number, error="the take before failed")
                await self.store.disk.once(self.store.buffer.reconcile, self._take_number - 1)
            self._take_number += 1
            self._has_failed = True
            groups = await take_groups(self, self._take_number, own=0, foreign=count, disk=self.store.disk.once)
            await self.store.disk.once(self.store.buffer.release_step, self._take_number, ReleaseReason.TRAINED)
            self._has_failed = False
        self.context.counters.groups_trained_foreign += len(groups)
        if groups:
            self.context.counters.recent_sources.append(dict(Counter(group.sender for group in groups)))
        for group in groups:
            self.peers.note_used(group)
        return groups
