"""The gate before a step: whether enough groups are READY, or none will come.

A step takes I own and J foreign groups (`step_shares.py`). It waits for own groups without a limit, and for foreign
ones up to the run's longest wait (`step.foreign_wait_s`). It waits only for senders whose groups come
(`swarm/arrivals.py`), and in the first `foreign_wait_s` after the start of the node for any. A step is smaller if
foreign groups do not arrive or are refused.

A node that has stopped generating may end. Either the run takes no foreign groups, or no sender was awaited for the
whole wait.

An experiment uses another gate, which keeps all nodes at the same step and needs no clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import Protocol

from ftis_node.config.step import StepSection
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.supervision.waits import wait_at_most
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.training.step_shares import ForeignShortfall, StepShares, substitute_foreign
from ftis_node.swarm.arrivals import AwaitedSenders

log = logging.getLogger(__name__)

MAX_LOOK_S = 2.0  # most time charged at once: a suspended process does not wait
RECHECK_INTERVAL_S = 0.5  # no event reports that the wait has ended or a group is stale


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of `may_start` and `never_starts`. `waited_s` is the time since all own groups were READY.

    `uptime_s` is the time since the node started, `alone_s` since a sender was last awaited, or since the start.
    """

    own_ready: int
    foreign_ready: int
    waited_s: float
    uptime_s: float
    awaits_sender: bool
    alone_s: float = 0.0


def may_start(needs: StepSection, outlook: StepInputs) -> bool:
    if outlook.own_ready < needs.num_generated:
        return False
    if outlook.foreign_ready >= needs.foreign_groups:
        return True
    if outlook.own_ready + outlook.foreign_ready == 0:
        return False
    somebody_may_come = outlook.awaits_sender or outlook.uptime_s < needs.foreign_wait_s
    return not somebody_may_come or outlook.waited_s >= needs.foreign_wait_s


def never_starts(needs: StepSection, outlook: StepInputs) -> bool:
    """Return whether the next step of a node that has stopped generating can never start: no peer will complete it."""
    if outlook.own_ready >= needs.own_groups and outlook.own_ready + outlook.foreign_ready > 0:
        return False
    return not needs.foreign_groups or (not outlook.awaits_sender and outlook.alone_s >= needs.foreign_wait_s)


class StepGate(Protocol):
    """Interface of the gate on which the train loop waits before it takes a step's groups."""

    async def wait(self, step: int) -> bool:
        """Wait until step `step` may start, and return True; return False if no more groups will come for it.

        It also returns True after a pause, since the new learner may be at an earlier step.
        """
        ...

    def shares(self, step: int) -> tuple[int, int]:
        """Return how many own and foreign groups step `step` takes, by signer."""
        ...


@dataclass(eq=False, repr=False)
class TimedStepGate(NodePart):
    """Gate that waits for all own groups, and for foreign ones of awaited senders up to the run's longest wait.

    The intake loop sets `stored` when a group becomes READY.
    """

    slots: SlotPool
    step_shares: StepShares
    awaited_senders: AwaitedSenders
    stored: asyncio.Event

    def __post_init__(self) -> None:
        self._started_at = self._looked_at = time.monotonic()
        self._own_ready_since: float | None = None
        self._with_sender_at = self._started_at
        self._step, self._step_at = 0, 0.0  # the last step, and its start by the clock of the pauses
        self._train_s = 0.0  # from the start of a step to the end of its training, a moving average
        self._awaited: list[str] = []  # senders for whose groups alone the step has waited since the last look
        self._fill = ForeignShortfall()
        self._needs = self.context.manifest.step

    async def wait(self, step: int) -> bool:
        """Wait as `StepGate.wait` says; release stale groups meanwhile."""
        num_pauses = self.context.pause.num_pauses
        self._own_ready_since, self._awaited = None, []
        if self._step and step == self._step + 1:  # else a pause or a death of the learner came before the step
            last_s = self.context.pause.clock() - self._step_at
            self._train_s = (self._train_s + last_s) / 2 if self._train_s else last_s
        while True:
            if self.context.pause.is_paused:  # a pause counts as no time without groups
                await self.context.pause.wait_running()
                self._own_ready_since, self._with_sender_at = None, time.monotonic()
            if self.context.pause.num_pauses != num_pauses:
                self._step = 0
                return True
            self.stored.clear()
            if await self.store.release_stale():
                self.slots.set_held(self.store.reader.own_held())
            await self.store.evict_foreign(self.peers.share_cap())
            self._needs = self._current_needs()
            outlook = await self._outlook()
            if may_start(self._needs, outlook) and not self.context.pause.is_paused:
                self._step, self._step_at = step, self.context.pause.clock()
                self._plan_next()
                return True
            has_stopped = self.context.settings.generates and not self.step_shares.makes_more
            if has_stopped and never_starts(self._needs, outlook):
                log.info("no more groups are generated, and none will come for step %d: the node ends", step)
                return False
            await wait_at_most(RECHECK_INTERVAL_S, self.stored)

    def shares(self, step: int) -> tuple[int, int]:
        """Return the run's own and foreign shares, adjusted by backfill or because generation has ended."""
        return self.step_shares.of_next_step(self._needs)

    @property
    def _fills(self) -> bool:
        return self.context.manifest.step.backfill_with_own and self.step_shares.makes_more

    def _current_needs(self) -> StepSection:
        """Return the manifest's section; with `step.backfill_with_own`, own groups replace missing foreign ones."""
        needs = self.context.manifest.step
        if not self._fills:
            return needs
        own, foreign = self._fill.shares(needs.own_groups, needs.foreign_groups)
        return needs.model_copy(update={"own_groups": own, "foreign_groups": foreign})

    def _plan_next(self) -> None:
        """Note the start of a step, and resize the slots for the own groups of the next step."""
        if not self._fills:
            return
        step = self.context.manifest.step
        self._fill.note(self._needs.foreign_groups, [sender for sender, _ in self.store.reader.ready_foreign()])
        own, _ = self._fill.shares(step.own_groups, step.foreign_groups)
        self.slots.resize(own * (1 + step.max_async_level))

    async def _outlook(self) -> StepInputs:
        own_ready, foreign_ready = self.store.reader.ready_counts()
        if not self.context.settings.generates or (self._needs.foreign_groups and not self.step_shares.makes_more):
            self._needs = self._needs.model_copy(update={"generated_groups": None})
            own_ready, foreign_ready = substitute_foreign(own_ready + foreign_ready, needs=self._needs)
        members, now = await self.gossip.members(), time.monotonic()
        self.awaited_senders.waited(self._awaited, min(now - self._looked_at, MAX_LOOK_S))
        is_idle = own_ready < self._needs.num_generated and not self.step_shares.makes_more
        work_s = math.inf  # of a step without a wait: its training, or its generation if that takes longer
        if self.step_shares.makes_more:
            work_s = max(self._train_s, self._needs.num_generated * self.slots.seconds_per_group)
        awaited = self.awaited_senders.awaited(
            members, now=now, work_s=work_s, quota=self._needs.foreign_groups, may_send=self._may_send
        )
        awaited, self._looked_at = awaited if members else [], now
        if awaited:
            self._with_sender_at = now
        if own_ready < self._needs.num_generated:
            self._own_ready_since = None
        elif self._own_ready_since is None:
            self._own_ready_since = now
        self._awaited = awaited if self._own_ready_since is not None or is_idle else []
        return StepInputs(
            own_ready=own_ready,
            foreign_ready=foreign_ready,
            waited_s=now - (self._own_ready_since or now),
            uptime_s=now - self._started_at,
            awaits_sender=bool(awaited),
            alone_s=now - self._with_sender_at,
        )

    def _may_send(self, peer_id: str) -> bool:
        """Return whether this node would accept groups of a peer: not banned, with a usable tokenizer and role."""
        record = self.peers.registry.record_of(peer_id)
        takes_text = self.context.manifest.step.other_tokenizers == "text"
        is_fit = record is None or takes_text or record.tokenizer == self.context.about.tokenizer
        is_sender = record is None or record.role != "learner"
        return is_fit and is_sender and not self.peers.is_banned(peer_id)
