"""Components that several loops share. Each node makes them once, at first use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ftis_node.node.loops.announcements import AnnouncementHandler
from ftis_node.node.loops.backfill import BackfillLoop
from ftis_node.node.loops.intake import IntakeLoop
from ftis_node.node.loops.pull import PullLoop
from ftis_node.node.loops.weight_offer import newest_offered
from ftis_node.node.peers.serve import Announcer, PeerRequestHandler
from ftis_node.node.peers.swarm_status import PeerTable, SwarmReporter
from ftis_node.node.training.evaluation import Evaluator, StepTracker
from ftis_node.node.training.group_limits import BufferLimits
from ftis_node.node.training.step_report import StepReporter
from ftis_node.node.training.step_shares import StepShares
from ftis_node.swarm.demand import OwnDomain
from ftis_node.tasks import part_names

if TYPE_CHECKING:
    from ftis_node.node.components import NodeComponents


@dataclass(frozen=True)
class SharedComponents:
    """Base class of `Wiring`: lazily creates the shared components of one node."""

    node: NodeComponents

    @cached_property
    def intake(self) -> IntakeLoop:
        node = self.node
        return IntakeLoop(
            context=node.context,
            tokenizer=node.tokenizer,
            scorer=node.scorer,
            new_peers_scorer=node.new_peers_scorer,
            buffer=node.buffer,
            reader=node.reader,
            disk=node.disk,
            peers=node.peers,
            registry=node.registry,
            counters=node.counters,
            guard=node.gossip.guard,
            newest_offered=partial(newest_offered, node.context, node.learner),
        )

    @cached_property
    def announcements(self) -> AnnouncementHandler:
        node = self.node
        return AnnouncementHandler(
            context=node.context,
            about=node.about,
            gossip=node.gossip,
            reader=node.reader,
            peers=node.peers,
            registry=node.registry,
            counters=node.counters,
        )

    @cached_property
    def backfill(self) -> BackfillLoop:
        node = self.node
        return BackfillLoop(
            context=node.context,
            announcements=self.announcements,
            gossip=node.gossip,
            reader=node.reader,
            peers=node.peers,
            counters=node.counters,
            step_shares=self.step_shares,
        )

    @cached_property
    def pull(self) -> PullLoop:
        node = self.node
        return PullLoop(
            context=node.context,
            intake=self.intake,
            announcements=self.announcements,
            repair=self.backfill,
            gossip=node.gossip,
            reader=node.reader,
            peers=node.peers,
            registry=node.registry,
            counters=node.counters,
            step_shares=self.step_shares,
            space=node.space,
            own_domain=self.own_domain,
        )

    @cached_property
    def own_domain(self) -> OwnDomain | None:
        """Return the domain whose groups the node prefers; None if the run or this node has no preference."""
        share, domain = self.node.context.manifest.step.own_domain_fraction, self.node.about.domain
        return OwnDomain(part_names(domain), share) if share is not None and domain else None

    @cached_property
    def step_shares(self) -> StepShares:
        node = self.node
        return StepShares(context=node.context, budget=node.budget, slots=node.slots, reader=node.reader)

    @cached_property
    def limits(self) -> BufferLimits:
        node = self.node
        return BufferLimits(
            context=node.context, buffer=node.buffer, reader=node.reader, disk=node.disk, peers=node.peers
        )

    @cached_property
    def announcer(self) -> Announcer:
        return Announcer(context=self.node.context, about=self.node.about, gossip=self.node.gossip)

    @cached_property
    def swarm(self) -> SwarmReporter:
        node = self.node
        return SwarmReporter(
            gossip=node.gossip, registry=node.registry, counters=node.counters, confirmations=node.confirmations
        )

    @cached_property
    def evaluator(self) -> Evaluator:
        node = self.node
        return Evaluator(
            context=node.context,
            generator=node.evaluated,
            tasks=node.eval_tasks,
            tokenizer=node.tokenizer,
            scorer=node.scorer,
            history=node.evaluations,
            tracking=node.tracking,
        )

    @cached_property
    def peer_table(self) -> PeerTable:
        node = self.node
        return PeerTable(
            registry=node.registry, peers=node.peers, guard=node.gossip.guard, manifest=node.context.manifest
        )

    @cached_property
    def reporter(self) -> StepReporter:
        node = self.node
        tracker = StepTracker(tracking=node.tracking, generation=node.generation, gossip=node.gossip, swarm=self.swarm)
        return StepReporter(
            context=node.context,
            registry=node.registry,
            counters=node.counters,
            generation=node.generation,
            tracker=tracker,
            guard=node.gossip.guard,
        )

    @cached_property
    def served(self) -> PeerRequestHandler:
        node = self.node
        return PeerRequestHandler(
            context=node.context,
            task=node.task,
            tokenizer=node.tokenizer,
            reader=node.reader,
            replay_file=node.home.replay,
            disk=node.disk,
            announcer=self.announcer,
            peers=node.peers,
            registry=node.registry,
            counters=node.counters,
            confirmations=node.confirmations,
        )
