"""The gate before a step: it opens when the groups of the step are in the buffer, or when the time limit has passed.

`TimedStepGate` waits for foreign groups up to `step.foreign_wait_s` of the run, called the patience (`step_shares.py`).
An experiment uses another gate, which keeps all nodes at the same step and needs no clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ftis_node.node.training.step_shares import (
    ForeignShortfall,
    StepInputs,
    StepQuota,
    may_start,
    never_starts,
    substitute_foreign,
)

if TYPE_CHECKING:
    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.context import NodeContext
    from ftis_node.node.training.group_limits import BufferLimits, SlotPool
    from ftis_node.node.training.step_shares import StepShares
    from ftis_node.replay.reader import ReplayReader

log = logging.getLogger(__name__)

RECHECK_INTERVAL_S = 0.5  # no event reports that the patience has passed or a group is stale


class StepGate(Protocol):
    """Interface of the gate on which the train loop waits before it takes a step's groups."""

    async def wait(self, step: int) -> bool:
        """Wait until step `step` may start, and return True; return False if no more groups will come for it."""
        ...

    def shares(self, step: int) -> tuple[int, int]:
        """Return how many own and foreign groups step `step` takes, by signer."""
        ...


@dataclass(kw_only=True, eq=False, repr=False)
class TimedStepGate:
    """Gate that waits for all own groups, and for foreign ones up to the run's patience.

    The intake loop sets `stored` when a group becomes READY.
    """

    context: NodeContext
    stored: asyncio.Event
    step_shares: StepShares
    limits: BufferLimits
    slots: SlotPool
    reader: ReplayReader
    gossip: Gossip

    def __post_init__(self) -> None:
        self._started_at = time.monotonic()
        self._own_ready_since: float | None = None
        self._with_members_at = self._started_at
        self._fill = ForeignShortfall()
        self._needs = StepQuota.of(self.context.manifest)

    async def wait(self, step: int) -> bool:
        """Wait until the step may start (True) or can never start (False); release stale groups meanwhile."""
        self._own_ready_since = None
        while True:
            self.stored.clear()
            await self._release_unusable()
            self._needs = self._current_quota()
            outlook = await self._outlook()
            if may_start(self._needs, outlook):
                self._plan_next()
                return True
            if (
                self.context.settings.generates
                and not self.step_shares.makes_more
                and never_starts(self._needs, outlook)
            ):
                log.info("no more groups are generated, and none will come for step %d: the node ends", step)
                return False
            with suppress(TimeoutError):  # Python 3.11's `wait_for` loses a cancellation that coincides with the event
                async with asyncio.timeout(RECHECK_INTERVAL_S):
                    await self.stored.wait()

    def shares(self, step: int) -> tuple[int, int]:
        """Return the run's own and foreign shares, adjusted if the node generates no more groups."""
        return self.step_shares.of_next_step(self._needs)

    @property
    def _fills(self) -> bool:
        """Return whether own groups may replace foreign ones: the run allows it and the node still generates."""
        return self.context.manifest.step.backfill_with_own and self.step_shares.makes_more

    def _current_quota(self) -> StepQuota:
        """Return the manifest's quota; with `step.backfill_with_own`, own groups replace missing foreign ones."""
        needs = StepQuota.of(self.context.manifest)
        if not self._fills:
            return needs
        own, foreign = self._fill.shares(needs.own, needs.foreign)
        return replace(needs, own=own, foreign=foreign)

    def _plan_next(self) -> None:
        """Note the start of a step, and resize the slots for the own groups of the next step."""
        if not self._fills:
            return
        step = self.context.manifest.step
        self._fill.note(self._needs.foreign, [sender for sender, _ in self.reader.ready_foreign()])
        own, _ = self._fill.shares(step.own_groups, step.foreign_groups)
        self.slots.resize(own * (1 + step.max_async_level))

    async def _outlook(self) -> StepInputs:
        own_ready, foreign_ready = self.reader.ready_counts()
        if not self.context.settings.generates or (self._needs.foreign and not self.step_shares.makes_more):
            self._needs = replace(self._needs, generated=0)
            own_ready, foreign_ready = substitute_foreign(own_ready + foreign_ready, needs=self._needs)
        now = time.monotonic()
        has_members = bool(await self.gossip.members())
        if has_members:
            self._with_members_at = now
        if own_ready < self._needs.own_waited_for:
            self._own_ready_since = None
        elif self._own_ready_since is None:
            self._own_ready_since = now
        return StepInputs(
            own_ready=own_ready,
            foreign_ready=foreign_ready,
            waited_s=now - (self._own_ready_since or now),
            uptime_s=now - self._started_at,
            has_members=has_members,
            alone_s=now - self._with_members_at,
        )

    async def _release_unusable(self) -> None:
        if await self.limits.release_stale():
            self.slots.set_held(self.reader.own_held())
        await self.limits.evict_foreign()
