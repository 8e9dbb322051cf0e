"""The gate before a step: it opens when the groups of the step are there, or when waiting for more is not worth it.

A node's own gate goes by the run's patience (`step_policy.py` has the rule). An experiment uses another one, which
keeps all nodes at the same step and needs no clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ftis_node.node.training.foreign_shortfall import Fill
from ftis_node.node.training.step_policy import Outlook, StepNeeds, may_start, never_starts, stand_in
from ftis_node.node.training.token_budget import makes_more, shares_of_next_step
from ftis_node.replay.lifecycle import Freshness, ReleaseReason

if TYPE_CHECKING:
    from ftis_node.node.context import Parts
    from ftis_node.node.loops.intake import IntakeLoop

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5  # patience and staleness pass without an event


class StepGate(Protocol):
    """What the train loop waits for before it takes a step's groups."""

    async def wait(self, step: int) -> bool:
        """Returns when step `step` may start: True. False: it never will, for no more groups will come."""
        ...

    def shares(self, step: int) -> tuple[int, int]:
        """How many own and foreign groups step `step` takes, by who signed them."""
        ...


class PatientGate:
    """Waits for all own groups, and for foreign ones as long as the run's patience lasts."""

    def __init__(self, parts: Parts, intake: IntakeLoop) -> None:
        self._parts = parts
        self._intake = intake
        self._started_at = time.monotonic()
        self._own_ready_since: float | None = None
        self._with_members_at = self._started_at
        self._fill = Fill()
        self._needs = StepNeeds.of(parts.manifest)

    async def wait(self, step: int) -> bool:
        """Returns when the step may start, or never will; releases on the way what has grown stale."""
        self._own_ready_since = None
        while True:
            self._intake.stored.clear()
            await self._release_unusable()
            self._needs = self._wanted()
            outlook = await self._outlook()
            if may_start(self._needs, outlook):
                self._plan_next()
                return True
            if self._parts.settings.generates and not makes_more(self._parts) and never_starts(self._needs, outlook):
                log.info("no more groups are generated, and none will come for step %d: the node ends", step)
                return False
            with suppress(TimeoutError):  # not `wait_for`: in Python 3.11 it loses a cancellation that meets the event
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._intake.stored.wait()

    def shares(self, step: int) -> tuple[int, int]:
        """The run's, or what stands in for own groups where no more are made."""
        return shares_of_next_step(self._parts, self._needs)

    @property
    def _fills(self) -> bool:
        """Whether own groups may stand in for foreign ones: not of a node that generates none, or no more."""
        return self._parts.manifest.step.backfill_with_own and makes_more(self._parts)

    def _wanted(self) -> StepNeeds:
        """Return the run's quota; with `step.backfill_with_own`, own groups replace the foreign ones missing before."""
        needs = StepNeeds.of(self._parts.manifest)
        if not self._fills:
            return needs
        own, foreign = self._fill.shares(needs.own, needs.foreign)
        return replace(needs, own=own, foreign=foreign)

    def _plan_next(self) -> None:
        """A step starts: what is missing of it is generated for the next one."""
        if not self._fills:
            return
        step = self._parts.manifest.step
        self._fill.note(self._needs.foreign, [sender for sender, _ in self._parts.reader.ready_foreign()])
        own, _ = self._fill.shares(step.own_groups, step.foreign_groups)
        self._parts.slots.resize(own * (1 + step.max_async_level))

    async def _outlook(self) -> Outlook:
        own_ready, foreign_ready = self._parts.reader.ready_counts()
        if not self._parts.settings.generates or (self._needs.foreign and not makes_more(self._parts)):
            self._needs = replace(self._needs, generated=0)
            own_ready, foreign_ready = stand_in(own_ready + foreign_ready, needs=self._needs)
        now = time.monotonic()
        has_members = bool(await self._parts.gossip.members())
        if has_members:
            self._with_members_at = now
        if own_ready < self._needs.own_waited_for:
            self._own_ready_since = None
        elif self._own_ready_since is None:
            self._own_ready_since = now
        return Outlook(
            own_ready=own_ready,
            foreign_ready=foreign_ready,
            waited_s=now - (self._own_ready_since or now),
            uptime_s=now - self._started_at,
            has_members=has_members,
            alone_s=now - self._with_members_at,
        )

    async def _release_unusable(self) -> None:
        parts = self._parts
        freshness = Freshness(
            now=time.time(),
            max_age_s=parts.manifest.step.max_age_s,
            policy_version=parts.state.policy_version,
            max_version_lag=parts.manifest.step.max_version_lag,
            peer_id=parts.identity.peer_id,
        )
        stale = await parts.disk(parts.buffer.release_stale, freshness)
        for group in stale:
            parts.events.write("released", group=group.id, reason=ReleaseReason.STALE)
        if stale:
            parts.slots.hold(parts.reader.own_held())
        await evict_foreign(parts)


async def evict_foreign(parts: Parts) -> None:
    """Makes room where foreign groups are more or larger than the buffer keeps, or one peer's more than its places."""
    limits = parts.settings.buffer
    keep = {"keep": limits.max_ready_groups, "keep_bytes": limits.max_ready_bytes}
    for group in await parts.disk(parts.buffer.evict_foreign, **keep, cap=parts.peers.share_cap()):
        parts.events.write("released", group=group.id, reason=ReleaseReason.EVICTED)
