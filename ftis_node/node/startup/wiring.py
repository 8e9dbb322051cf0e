"""Composition root: passes its dependencies to each loop and component. `run.py` chooses the loops of a role."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from ftis_node.node.exchange.group_exchange import GroupExchange
from ftis_node.node.loops.audit import AuditLoop, CheckLoop
from ftis_node.node.loops.backfill import ShardsLoop
from ftis_node.node.loops.confirmations import DeliverLoop
from ftis_node.node.loops.directory import DirectoryLoop
from ftis_node.node.loops.generate import GenerateLoop
from ftis_node.node.loops.publish import PublishLoop, ReannounceLoop
from ftis_node.node.loops.status import StatusLoop
from ftis_node.node.loops.train import TrainLoop, update_engine
from ftis_node.node.loops.upkeep import DiskSpaceLoop, PeersLoop
from ftis_node.node.loops.weight_follow import FollowLoop
from ftis_node.node.loops.weight_offer import OfferLoop
from ftis_node.node.startup.shared import SharedComponents
from ftis_node.node.supervision.watchdog import Watchdog
from ftis_node.node.supervision.worker_status import HealthReporter, WorkerReporter
from ftis_node.node.training.evaluation import OwnStats
from ftis_node.node.training.group_limits import BufferReporter
from ftis_node.node.training.step_gate import TimedStepGate
from ftis_node.node.training.step_peers import StepPeers
from ftis_node.node.training.step_selection import StepGroups, StepSelection

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Coroutine

    from ftis_node.node.loops.directory import BackfillSource
    from ftis_node.node.loops.train import DeliverWeights
    from ftis_node.node.training.step_gate import StepGate
    from ftis_node.records.group import Group


class Wiring(SharedComponents):
    """Builder of the loops of one node."""

    def rollout_loops(self) -> dict[str, Coroutine[None, None, None]]:
        """Return the loops that bring own and foreign groups into the buffer, without the train loop."""
        scored: asyncio.Queue[Group] = asyncio.Queue(self.node.slots.capacity)
        return {
            "generate": self.generate_loop(scored).run(),
            "publish": self.publish_loop(scored).run(),
            "pull": self.pull.run(),
            "intake": self.intake.run(),
        }

    def serve_peers(self) -> None:
        """Answer the requests of peers from now on."""
        served = self.served
        self.node.gossip.serve(
            served.lookup,
            on_confirm=served.confirmed,
            answer=served.answer,
            lookup_text=served.encode_as_text,
            is_refused=self.node.peers.is_banned,
            on_sent=served.sent,
            on_refusal=served.announcement_refused,
        )

    def generate_loop(self, scored: asyncio.Queue[Group]) -> GenerateLoop:
        node = self.node
        return GenerateLoop(
            context=node.context,
            about=node.about,
            scored=scored,
            domain=node.domain,
            tokenizer=node.tokenizer,
            scorer=node.scorer,
            generation=node.generation,
            position=node.buffer.prompt_position(),
            slots=node.slots,
            budget=node.budget,
            space=node.space,
            division=node.division,
        )

    def publish_loop(self, scored: asyncio.Queue[Group]) -> PublishLoop:
        node = self.node
        return PublishLoop(
            context=node.context,
            scored=scored,
            intake=self.intake,
            announcer=self.announcer,
            slots=node.slots,
            counters=node.counters,
            confirmations=node.confirmations,
            last_number=node.buffer.last_number(),
        )

    def group_exchange(self, publish: PublishLoop) -> GroupExchange:
        node = self.node
        return GroupExchange(
            context=node.context,
            about=node.about,
            task=node.task,
            tokenizer=node.tokenizer,
            scorer=node.scorer,
            buffer=node.buffer,
            disk=node.disk,
            slots=node.slots,
            space=node.space,
            peers=node.peers,
            counters=node.counters,
            guard=node.gossip.guard,
            selection=self._step_selection(),
            publish=publish.publish,
        )

    def _step_selection(self) -> StepSelection:
        node = self.node
        return StepSelection(
            context=node.context,
            buffer=node.buffer,
            reader=node.reader,
            disk=node.disk,
            peers=node.peers,
            guard=node.gossip.guard,
            division=node.division,
            own_domain=self.own_domain,
        )

    def check_loop(self) -> CheckLoop:
        node = self.node
        return CheckLoop(
            context=node.context, next_own=self.intake.next_own, learner=node.learner, guard=node.gossip.guard
        )

    def audit_loop(self) -> AuditLoop:
        node = self.node
        audit = AuditLoop(
            context=node.context,
            about=node.about,
            learner=node.learner,
            buffer=node.buffer,
            disk=node.disk,
            peers=node.peers,
            registry=node.registry,
            counters=node.counters,
            guard=node.gossip.guard,
            takes_turns=node.arrangement.takes_turns,
        )
        self.intake.on_foreign = audit.offer
        return audit

    def reannounce_loop(self) -> ReannounceLoop:
        node = self.node
        return ReannounceLoop(
            context=node.context,
            announcer=self.announcer,
            gossip=node.gossip,
            reader=node.reader,
            counters=node.counters,
            confirmations=node.confirmations,
        )

    def shards_loop(self) -> ShardsLoop:
        node = self.node
        return ShardsLoop(
            context=node.context,
            gossip=node.gossip,
            peers=node.peers,
            registry=node.registry,
            announcements=self.announcements,
            backfill=self.backfill,
        )

    def directory_loop(self, backfill: BackfillSource) -> DirectoryLoop:
        node = self.node
        return DirectoryLoop(
            context=node.context,
            about=node.about,
            gossip=node.gossip,
            learner=node.learner,
            generation=node.generation,
            buffer=node.buffer,
            registry=node.registry,
            backfill=backfill,
            stats=OwnStats(context=node.context, counters=node.counters, evaluations=node.evaluations),
        )

    def deliver_loop(self) -> DeliverLoop:
        node = self.node
        return DeliverLoop(
            context=node.context,
            buffer=node.buffer,
            reader=node.reader,
            disk=node.disk,
            slots=node.slots,
            confirmations=node.confirmations,
        )

    def peers_loop(self) -> PeersLoop:
        node = self.node
        return PeersLoop(events=node.context.events, gossip=node.gossip, peers=node.peers, limits=self.limits)

    def disk_space_loop(self) -> DiskSpaceLoop:
        node = self.node
        return DiskSpaceLoop(context=node.context, home=node.home, space=node.space, buffer=node.buffer, disk=node.disk)

    def status_loop(
        self,
        *,
        watchdog: Watchdog | None = None,
        http_refused: Counter[str] | None = None,
    ) -> StatusLoop:
        node = self.node
        workers = WorkerReporter(
            context=node.context,
            about=node.about,
            generation=node.generation,
            learner=node.learner,
            counters=node.counters,
        )
        return StatusLoop(
            context=node.context,
            about=node.about,
            home=node.home,
            workers=workers,
            health=HealthReporter(
                workers=workers,
                gossip=node.gossip,
                watchdog=watchdog or Watchdog(node.context.settings.observe),
            ),
            gossip=node.gossip,
            swarm=self.swarm,
            peer_table=self.peer_table,
            buffer=BufferReporter(
                context=node.context, replay=node.home.replay, reader=node.reader, disk=node.disk, slots=node.slots
            ),
            space=node.space,
            disk=node.disk,
            evaluations=node.evaluations,
            http_refused=http_refused,
        )

    def offer_loop(self) -> OfferLoop:
        node = self.node
        return OfferLoop(context=node.context, about=node.about, source=node.source, disk=node.disk, peers=node.peers)

    def follow_loop(self) -> FollowLoop:
        node = self.node
        return FollowLoop(
            context=node.context,
            about=node.about,
            source=node.source,
            vocab_size=node.tokenizer.vocab_size,
            folder=node.home.weights / "followed",
            gossip=node.gossip,
            generation=node.generation,
            learner=node.learner,
            evaluator=self.evaluator,
            registry=node.registry,
            counters=node.counters,
        )

    def step_gate(self) -> TimedStepGate:
        node = self.node
        return TimedStepGate(
            context=node.context,
            stored=self.intake.stored,
            step_shares=self.step_shares,
            limits=self.limits,
            slots=node.slots,
            buffer=node.buffer,
            reader=node.reader,
            disk=node.disk,
            gossip=node.gossip,
        )

    def train_loop(self, gate: StepGate, *, last_step: int | None, deliver: DeliverWeights | None = None) -> TrainLoop:
        """Return the train loop. `deliver` takes new weights; None delivers them to this node's generation worker."""
        node = self.node
        return TrainLoop(
            context=node.context,
            gate=gate,
            selection=self._step_selection(),
            learner=node.learner,
            generation=node.generation,
            deliver=deliver or partial(update_engine, generation=node.generation, events=node.context.events),
            groups=StepGroups(
                buffer=node.buffer, reader=node.reader, disk=node.disk, slots=node.slots, limits=self.limits
            ),
            peers=StepPeers(
                context=node.context,
                peers=node.peers,
                registry=node.registry,
                counters=node.counters,
                guard=node.gossip.guard,
            ),
            step_shares=self.step_shares,
            reporter=self.reporter,
            evaluator=self.evaluator,
            takes_turns=node.arrangement.takes_turns,
            last_step=last_step,
        )
