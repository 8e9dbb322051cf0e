"""Composition of a node: the parts that `startup/assemble.py` opens, and the loops and components made of them.

Only the composition root (this file, `startup/`, `daemon.py`, experiments and tests) holds these two classes. A
component gets the four parts of `NodePart`, and each other part that it uses as a separate argument.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.generation.client import GenerationClient
from ftis_node.gossip import Gossip
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import ModelSource, PromptTokenizer
from ftis_node.node.context import NodeContext
from ftis_node.node.exchange.offered_groups import OfferedGroups
from ftis_node.node.exchange.trainer_exchange import TrainerExchange
from ftis_node.node.loops.announcement_backfill import BackfillLoop
from ftis_node.node.loops.announcement_shards import ShardsLoop
from ftis_node.node.loops.confirmations import DeliverLoop, ReannounceLoop
from ftis_node.node.loops.directory import DirectoryLoop
from ftis_node.node.loops.disk_cleanup import DiskCleanupLoop
from ftis_node.node.loops.generate import GenerateLoop
from ftis_node.node.loops.intake import IntakeLoop
from ftis_node.node.loops.logprob_checks import AuditLoop, MismatchLoop
from ftis_node.node.loops.pause import PauseLoop
from ftis_node.node.loops.publish import PublishLoop
from ftis_node.node.loops.pull import PullLoop
from ftis_node.node.loops.status import StatusLoop
from ftis_node.node.loops.train import DeliverWeights, TrainLoop, update_engine
from ftis_node.node.loops.upkeep import UpkeepLoop
from ftis_node.node.loops.weight_follow import FollowLoop
from ftis_node.node.loops.weight_offer import OfferLoop, newest_offered
from ftis_node.node.peers.announcements import AnnouncementHandler
from ftis_node.node.peers.group_requests import PeerRequestHandler
from ftis_node.node.peers.own_record import OwnRecord
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.peers.swarm_log import RefusalReporter
from ftis_node.node.peers.swarm_reporter import SwarmReporter
from ftis_node.node.storage.node_store import Store
from ftis_node.node.supervision.machine_observer import MachineObserver
from ftis_node.node.supervision.watchdog import Watchdog
from ftis_node.node.training.evaluator import Evaluator
from ftis_node.node.training.generation_limits import GenerateBudget, SlotPool
from ftis_node.node.training.step_gate import StepGate, TimedStepGate
from ftis_node.node.training.step_groups import TrainGroupBuilder
from ftis_node.node.training.step_peers import StepPeers
from ftis_node.node.training.step_reporter import StepReporter
from ftis_node.node.training.step_shares import StepShares
from ftis_node.node.worker_interfaces import Generation, Learning
from ftis_node.records.group import Group
from ftis_node.swarm.arrivals import AwaitedSenders
from ftis_node.tasks.base import Task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.tracking import Tracking
from ftis_node.workers.supervisor import WorkerClient


@dataclass(frozen=True, slots=True)
class NodeComponents:
    """The parts of a node that have files, processes or connections, and what its settings chose.

    `task` is the run's task, with the problems of all nodes. `domain` has the problems that this node generates for. It
    is the same object as `task` if the node has no separate domain. `published` is the folder of the learner's weights;
    None: that in the home.
    """

    context: NodeContext
    store: Store
    source: ModelSource
    tokenizer: PromptTokenizer
    task: Task
    domain: Task
    eval_tasks: tuple[Task, ...]
    scorer: IsolatedScorer
    new_peers_scorer: IsolatedScorer
    generation: Generation
    learner: Learning
    gossip: Gossip
    slots: SlotPool
    peers: PeerManager
    arrangement: WorkerPlacement = WorkerPlacement()
    budget: GenerateBudget = field(default_factory=GenerateBudget)
    tracking: Tracking = field(default_factory=Tracking)
    published: Path | None = None

    @property
    def home(self) -> Home:
        return self.store.home


class Wiring:
    """Maker of the loops and components of one node, each once. It makes those that read the home at the first use."""

    def __init__(self, node: NodeComponents) -> None:
        self.node, manifest = node, node.context.manifest
        self.context, self.store, self.gossip, self.peers = node.context, node.store, node.gossip, node.peers
        self._parts = parts = (node.context, node.store, node.gossip, node.peers)  # as `NodePart` has them
        self.served = PeerRequestHandler(*parts, node.tokenizer)
        self.refusals = RefusalReporter(*parts)
        self.swarm = SwarmReporter(*parts, self.refusals)
        self.step_shares = StepShares(node.context, node.budget, node.slots, node.store.reader)
        self.awaited_senders = AwaitedSenders(longest_wait_s=manifest.step.foreign_wait_s, now=time.monotonic())
        self.scored = asyncio.Queue[Group](node.slots.capacity)  # from the generate loop to the publish loop
        self.reannounce_loop = ReannounceLoop(*parts)
        self.deliver_loop = DeliverLoop(*parts, node.slots)
        self.offer_loop = OfferLoop(*parts, node.source)
        self.disk_cleanup_loop = DiskCleanupLoop(node.store)
        workers = node.generation, node.eval_tasks, node.tokenizer, node.scorer
        self.evaluator = Evaluator(node.context, *workers, node.tracking)
        self.follow_loop = FollowLoop(*parts, node.source, node.tokenizer, node.generation, self.evaluator)
        observation_form = node.tokenizer.observation_form if manifest.episode else ()
        self._builder = TrainGroupBuilder(manifest.step.prompt_sharing, node.tokenizer.end_ids, observation_form)
        self.audit_loop = AuditLoop(*parts, node.learner, self._builder)

    def serve_peers(self) -> None:
        """Answer the requests of peers from now on."""
        served = self.served
        self.gossip.serve(
            served.lookup,
            on_confirm=served.confirmed,
            answer=served.answer,
            lookup_text=served.encode_as_text,
            is_refused=self.peers.is_banned,
            is_new=self.peers.is_new_peer,
            on_sent=served.sent,
            on_refusal=lambda peer_id, error: self.peers.refuse_message(peer_id, "announcement", error),
        )

    @cached_property
    def generate_loop(self) -> GenerateLoop:
        node = self.node
        workers = node.scorer, node.generation
        return GenerateLoop(*self._parts, self.scored, node.domain, node.tokenizer, *workers, node.slots, node.budget)

    @cached_property
    def publish_loop(self) -> PublishLoop:
        return PublishLoop(*self._parts, self.scored, self.intake, self.node.slots)

    @cached_property
    def announcements(self) -> AnnouncementHandler:
        return AnnouncementHandler(*self._parts)

    @cached_property
    def backfill(self) -> BackfillLoop:
        return BackfillLoop(*self._parts, self.announcements, self.step_shares)

    @cached_property
    def shards_loop(self) -> ShardsLoop:
        return ShardsLoop(*self._parts, self.announcements, self.backfill)

    @cached_property
    def pull(self) -> PullLoop:
        return PullLoop(*self._parts, self.intake, self.announcements, self.backfill, self.step_shares)

    @cached_property
    def intake(self) -> IntakeLoop:
        node, settings = self.node, self.context.settings
        may_audit = settings.learns and not node.arrangement.takes_turns  # with turns, the learner has no GPU memory
        return IntakeLoop(
            *self._parts,
            node.tokenizer,
            node.scorer,
            node.new_peers_scorer,
            self.awaited_senders,
            newest_offered=partial(newest_offered, self.context, node.learner),
            on_foreign=self.audit_loop.offer if may_audit else None,
        )

    @cached_property
    def mismatch_loop(self) -> MismatchLoop:
        return MismatchLoop(*self._parts, self.node.learner, self._builder, next_own=self.intake.next_own)

    @cached_property
    def reporter(self) -> StepReporter:
        node = self.node
        return StepReporter(self.context, self.peers, node.generation, self.swarm, node.tracking)

    def step_gate(self) -> TimedStepGate:
        shares, awaited = self.step_shares, self.awaited_senders
        return TimedStepGate(*self._parts, self.node.slots, shares, awaited, self.intake.stored)

    def train_loop(self, gate: StepGate, *, last_step: int | None, deliver: DeliverWeights | None = None) -> TrainLoop:
        """Return the train loop. `deliver` takes new weights; None delivers them to this node's generation worker."""
        node = self.node
        return TrainLoop(
            *self._parts,
            node.learner,
            node.generation,
            node.slots,
            StepPeers(self.context, self.peers, self._builder),
            self.reporter,
            self.evaluator,
            gate=gate,
            deliver=deliver or partial(update_engine, context=self.context, generation=node.generation),
            takes_turns=node.arrangement.takes_turns,
            last_step=last_step,
        )

    @cached_property
    def exchange(self) -> TrainerExchange:
        node = self.node
        offered = OfferedGroups(self.context, node.task, self.intake.own.context)
        return TrainerExchange(*self._parts, node.slots, offered, publish_scored=self.publish_loop.publish)

    @cached_property
    def directory_loop(self) -> DirectoryLoop:
        """Return the loop. A generator pulls no groups, so it needs none of an earlier time either."""
        record = OwnRecord(*self._parts, self.node.generation, self.node.learner)
        backfill = None if self.context.settings.role == "generator" else self.backfill
        return DirectoryLoop(*self._parts, record, backfill, self.refusals)

    @cached_property
    def upkeep_loop(self) -> UpkeepLoop:
        return UpkeepLoop(*self._parts, on_wake=self.directory_loop.renew)

    @cached_property
    def pause_loop(self) -> PauseLoop:
        node = self.node
        workers = tuple(each.supervisor for each in (node.generation, node.learner) if isinstance(each, WorkerClient))
        observer = MachineObserver(self.context.settings.schedule, gpus=node.arrangement.gpus)
        published = node.published or node.home.weights
        parts = (self.context, node.home)
        if node.arrangement.shares_base:  # the learner needs the generator's process, which loads the last adapter
            return PauseLoop(*parts, workers[::-1], lambda: None, None, node.budget, observer)
        return PauseLoop(*parts, workers, self._sync_weights, published, node.budget, observer)

    def _sync_weights(self) -> None:
        """Let the generator begin with the learner's weights: those of the former learner may be gone."""
        generation, state = self.node.generation, self.node.learner.state
        if isinstance(generation, GenerationClient) and state is not None:
            generation.begin_with(state.weights, state.proof)

    def status_loop(self, *, watchdog: Watchdog | None = None, http_refused: Counter[str] | None = None) -> StatusLoop:
        node = self.node
        counter = Counter() if http_refused is None else http_refused
        workers = node.generation, node.learner
        return StatusLoop(*self._parts, *workers, self.swarm, node.slots, watchdog or Watchdog(), counter)
