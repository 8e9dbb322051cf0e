"""Composition root: makes the loops and components of a node. `daemon.py` chooses the loops of a role."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import MISSING, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from ftis_node.node.components import NodeComponents
from ftis_node.node.exchange.group_exchange import GroupExchange
from ftis_node.node.loops.announcements import AnnouncementHandler
from ftis_node.node.loops.audit import AuditLoop, CheckLoop
from ftis_node.node.loops.backfill import BackfillLoop, ShardsLoop
from ftis_node.node.loops.confirmations import DeliverLoop
from ftis_node.node.loops.directory import DirectoryLoop
from ftis_node.node.loops.generate import GenerateLoop
from ftis_node.node.loops.intake import IntakeLoop
from ftis_node.node.loops.publish import PublishLoop, ReannounceLoop
from ftis_node.node.loops.pull import PullLoop
from ftis_node.node.loops.status import StatusLoop
from ftis_node.node.loops.train import DeliverWeights, TrainLoop, update_engine
from ftis_node.node.loops.upkeep import DiskSpaceLoop, PeersLoop
from ftis_node.node.loops.weight_follow import FollowLoop
from ftis_node.node.loops.weight_offer import OfferLoop, newest_offered
from ftis_node.node.peers.refusal_reports import RefusalReporter
from ftis_node.node.peers.serve import PeerRequestHandler
from ftis_node.node.peers.swarm_status import PeerTable, SwarmReporter
from ftis_node.node.storage.epochs import begin_epoch
from ftis_node.node.supervision.watchdog import Watchdog
from ftis_node.node.training.evaluation import Evaluator, OwnStats
from ftis_node.node.training.group_limits import BufferLimits
from ftis_node.node.training.step_gate import StepGate, StepSelection, TimedStepGate
from ftis_node.node.training.step_peers import StepPeers
from ftis_node.node.training.step_report import StepReporter
from ftis_node.node.training.step_shares import StepShares
from ftis_node.records.group import Group
from ftis_node.swarm.arrivals import AwaitedSenders
from ftis_node.swarm.demand import OwnDomain
from ftis_node.tasks import part_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ComponentT = TypeVar("ComponentT", bound="DataclassInstance")
NODE_PARTS = {part.name for part in fields(NodeComponents)}


def _shared(kind: type[ComponentT]) -> cached_property[ComponentT]:
    """Return a property of `Wiring`: a component that it makes at the first use."""
    return cached_property(lambda wiring: wiring.make(kind))


class Wiring:
    """Maker of the loops and components of one node. It makes each of its attributes once, at the first use.

    The fields of a component without a default are its dependencies. Each gets the part of the node, or the attribute
    of this class, that has its name.
    """

    announcements = _shared(AnnouncementHandler)
    backfill = _shared(BackfillLoop)
    evaluator = _shared(Evaluator)
    limits = _shared(BufferLimits)
    peer_table = _shared(PeerTable)
    pull = _shared(PullLoop)
    refusals = _shared(RefusalReporter)
    reporter = _shared(StepReporter)
    selection = _shared(StepSelection)
    served = _shared(PeerRequestHandler)
    step_shares = _shared(StepShares)
    swarm = _shared(SwarmReporter)

    deliver_loop = _shared(DeliverLoop)
    disk_space_loop = _shared(DiskSpaceLoop)
    follow_loop = _shared(FollowLoop)
    offer_loop = _shared(OfferLoop)
    peers_loop = _shared(PeersLoop)
    reannounce_loop = _shared(ReannounceLoop)
    shards_loop = _shared(ShardsLoop)

    def __init__(self, node: NodeComponents) -> None:
        self.node = node
        self.guard = node.gossip.guard
        self.takes_turns = node.arrangement.takes_turns
        self.end_ids = node.tokenizer.end_ids

    def make(self, kind: type[ComponentT], **given: Any) -> ComponentT:
        """Return a component. `given` are the dependencies that are not found by the name of their field."""
        needed = {each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING}
        found = {name: getattr(self.node if name in NODE_PARTS else self, name) for name in needed - given.keys()}
        return kind(**found, **given)

    @cached_property
    def arrivals(self) -> AwaitedSenders:
        return AwaitedSenders(patience_s=self.node.context.manifest.step.foreign_wait_s, now=time.monotonic())

    @cached_property
    def intake(self) -> IntakeLoop:
        return self.make(IntakeLoop, newest_offered=partial(newest_offered, self.node.context, self.node.learner))

    @cached_property
    def own_domain(self) -> OwnDomain | None:
        """Return the domain whose groups the node prefers; None if the run or this node has no preference."""
        share, domain = self.node.context.manifest.step.own_domain_fraction, self.node.about.domain
        return OwnDomain(part_names(domain), share) if share is not None and domain else None

    @cached_property
    def scored(self) -> asyncio.Queue[Group]:
        """Return the queue from the generate loop to the publish loop."""
        return asyncio.Queue(self.node.slots.capacity)

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

    @cached_property
    def generate_loop(self) -> GenerateLoop:
        return self.make(GenerateLoop, position=self.node.buffer.prompt_position())

    @cached_property
    def publish_loop(self) -> PublishLoop:
        node = self.node
        next_epoch = partial(node.disk, begin_epoch, node.home, node.buffer)
        return self.make(PublishLoop, last_number=node.buffer.last_number(), begin_epoch=next_epoch)

    @cached_property
    def exchange(self) -> GroupExchange:
        return self.make(GroupExchange, publish_scored=self.publish_loop.publish)

    @cached_property
    def check_loop(self) -> CheckLoop:
        return self.make(CheckLoop, next_own=self.intake.next_own)

    @cached_property
    def audit_loop(self) -> AuditLoop:
        audit = self.make(AuditLoop)
        self.intake.on_foreign = audit.offer
        return audit

    @cached_property
    def directory_loop(self) -> DirectoryLoop:
        """Return the loop. A generator pulls no groups, so it needs none of an earlier time either."""
        backfill = None if self.node.context.settings.role == "generator" else self.backfill
        directory = self.make(DirectoryLoop, backfill=backfill, stats=self.make(OwnStats))
        self.peers_loop.on_wake = directory.renew
        return directory

    def status_loop(self, *, watchdog: Watchdog | None = None, http_refused: Counter[str] | None = None) -> StatusLoop:
        watchdog = watchdog or Watchdog()
        return self.make(
            StatusLoop, watchdog=watchdog, http_refused=Counter() if http_refused is None else http_refused
        )

    def step_gate(self) -> TimedStepGate:
        return self.make(TimedStepGate, stored=self.intake.stored)

    def train_loop(self, gate: StepGate, *, last_step: int | None, deliver: DeliverWeights | None = None) -> TrainLoop:
        """Return the train loop. `deliver` takes new weights; None delivers them to this node's generation worker."""
        node = self.node
        update = partial(update_engine, generation=node.generation, events=node.context.events, failures=node.failures)
        return self.make(
            TrainLoop,
            gate=gate,
            deliver=deliver or update,
            peers=self.make(StepPeers),
            last_step=last_step,
        )
