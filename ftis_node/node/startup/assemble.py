"""Builds the components of a node from checked inputs: opens its files, and creates its workers and its network."""

from __future__ import annotations

from contextlib import AsyncExitStack, closing

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.config.step import StepSection
from ftis_node.models import parameter_count
from ftis_node.node.context import NodeContext, NodeCounters, NodeDescription, NodeState
from ftis_node.node.peers.own_record import own_releases
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.startup.factories import NodeFactory, NodeInputs
from ftis_node.node.startup.home_opening import release_damaged
from ftis_node.node.startup.previous_run import read_last_status
from ftis_node.node.storage.disk_space import DiskSpace
from ftis_node.node.storage.home_size import num_versions, version_bytes
from ftis_node.node.storage.node_store import DiskThread, Store, begin_epoch
from ftis_node.node.training.generation_limits import GenerateBudget, SlotPool
from ftis_node.node.wiring import NodeComponents
from ftis_node.node.worker_interfaces import Generation, Learning, NullGeneration, NullLearner
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.swarm.receipts import step_limits
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.history import last_logged_step
from ftis_node.telemetry.tracking import TrackedRun, Tracking
from ftis_node.workers.weight_store import weights_folder

NAME_LENGTH = 8
EXCHANGE_SLOTS = 64  # a trainer's batch has its own size, whatever the run's step is


def assemble(stack: AsyncExitStack, inputs: NodeInputs, factory: NodeFactory) -> NodeComponents:
    """Return all components, not started. `stack` closes the files that they keep open."""
    settings, manifest, home, identity = inputs.settings, inputs.manifest, inputs.home, inputs.identity
    source, step = inputs.source, inputs.manifest.step
    events = stack.enter_context(closing(EventLog(home.events)))
    releases, counters = own_releases(inputs.task, inputs.tokenizer), NodeCounters()
    manager = PeerManager(
        home.peers,
        own_id=identity.peer_id,
        settings=settings.access,
        events=events,
        counters=counters,
        releases=releases,
        limits=step_limits(manifest),
    )
    peers = stack.enter_context(closing(manager))
    space = DiskSpace(inputs.limit, root=home.root)
    disk = stack.enter_context(closing(DiskThread(space)))
    buffer = stack.enter_context(closing(ReplayBuffer(home.replay)))
    reader = stack.enter_context(closing(ReplayReader(home.replay)))
    begin_epoch(home, buffer)
    release_damaged(buffer, events)
    weights = stack.enter_context(
        weights_folder(
            home,
            version_bytes=version_bytes(settings, source),
            num_versions=num_versions(settings, inputs.arrangement.transfer),
        )
    )
    name = settings.name or identity.peer_id[-NAME_LENGTH:]
    about = NodeDescription(
        name=name,
        model=source.name,
        tokenizer=inputs.tokenizer.fingerprint,
        domain="" if inputs.domain is inputs.task else inputs.domain.name,
        training=inputs.training,
        releases=releases,
    )
    state = NodeState(step=last_logged_step(home.events))
    context = NodeContext(settings, manifest, identity, events, state, about, counters)
    for entry in read_last_status(home).eval:
        context.evaluations.add(entry)
    learner: Learning = NullLearner(parameter_count(source))
    if settings.learns:
        learner = factory.learner(inputs, events=events, weights=weights)
    generation: Generation = NullGeneration(lambda: state.policy_version)
    if settings.generates:
        generation = factory.generation(inputs, events=events, learner=learner)
    done = reader.figures()
    return NodeComponents(
        context=context,
        store=Store(context, home, buffer, reader, disk, space),
        source=source,
        tokenizer=inputs.tokenizer,
        task=inputs.task,
        domain=inputs.domain,
        eval_tasks=inputs.eval_tasks,
        scorer=IsolatedScorer(inputs.task, scored_only=inputs.eval_tasks),
        new_peers_scorer=IsolatedScorer(inputs.task),  # starts its process with the first group of an unknown peer
        generation=generation,
        learner=learner,
        gossip=factory.gossip(inputs),
        slots=SlotPool(_num_slots(settings, step), held=reader.own_held(), clock=context.pause.clock),
        peers=peers,
        arrangement=inputs.arrangement,
        budget=GenerateBudget(settings.budget.generate_tokens, num_tokens=done.tokens_own, num_groups=done.groups_own),
        tracking=_tracking(context, home),
        published=weights,
    )


def _tracking(context: NodeContext, home: Home) -> Tracking:
    """Return the trackers that the settings name. `prepare.py` checks that they are installed."""
    manifest, peer_id, about = context.manifest, context.peer_id, context.about
    facts = {"run": manifest.model_dump(mode="json"), "run_id": manifest.run_id, "model": about.model, "peer": peer_id}
    run = TrackedRun(
        name=about.name,
        id=f"{manifest.run_id}-{peer_id}",
        folder=home.root.absolute(),
        settings=facts,
    )
    return Tracking.to(context.settings.tracking.to, run)


def _num_slots(settings: NodeSettings, step: StepSection) -> int:
    """Return the number of own groups between generation and training; in an exchange node until a peer has them."""
    num_slots = step.num_generated * (1 + step.max_async_level)
    return max(num_slots, EXCHANGE_SLOTS) if settings.role == "exchange" else num_slots
