"""Makes the parts of a node in the order in which they can fail cheaply, and takes them down in reverse.

    prepared (prepare.py) -> buffer opened -> workers and network started side by side
                          -> buffer and learner agree on the step -> the generator serves the learner's weights

What a user can have done wrong is found in the first of these, before anything slow or lasting happens.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.config.limits import KEPT_EVENT_FILES
from ftis_node.models import parameter_count
from ftis_node.node.context import Parts
from ftis_node.node.loops.disk_space import Room
from ftis_node.node.peers.confirmations import Confirmations
from ftis_node.node.peers.faults import fault_charger
from ftis_node.node.peers.manager import PeerBook
from ftis_node.node.peers.registry import PeerRegistry
from ftis_node.node.peers.serve import Served
from ftis_node.node.startup.factories import Ingredients
from ftis_node.node.startup.null_workers import NoGeneration, NoLearner
from ftis_node.node.startup.prepare import prepare
from ftis_node.node.startup.recovery import set_right, tell_unknown_steps
from ftis_node.node.state import NodeCounters, NodeState
from ftis_node.node.storage.cleanup import CHECKPOINT_PREFIX
from ftis_node.node.storage.quota import num_versions, version_bytes
from ftis_node.node.supervision.disk_thread import Disk
from ftis_node.node.supervision.shutdown import first_of_ours
from ftis_node.node.training.division import division_of
from ftis_node.node.training.evaluation import EvaluationHistory
from ftis_node.node.training.slots import Slots
from ftis_node.node.training.token_budget import generate_budget
from ftis_node.node.training.tracking import make_tracking
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.tasks.scoring.scorer import IsolatedScorer
from ftis_node.telemetry.events import EVENT_SCHEMA, EventTrail
from ftis_node.telemetry.progress import unwatched
from ftis_node.telemetry.status import EvalStatus
from ftis_node.telemetry.trail_summary import read_remembered
from ftis_node.workers.durable import remove_leftovers
from ftis_node.workers.weights.folder import weights_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ftis_node.config.home import Home
    from ftis_node.config.node import NodeSettings
    from ftis_node.gossip.interface import Gossip
    from ftis_node.models import ModelSource
    from ftis_node.node.context import Generation, Learning
    from ftis_node.node.startup.factories import Makers
    from ftis_node.node.startup.prepare import Prepared
    from ftis_node.node.startup.run_plan import RunPlan
    from ftis_node.telemetry.progress import OnProgress
    from ftis_node.telemetry.trail_summary import Remembered

log = logging.getLogger(__name__)

NAME_LENGTH = 8
LARGE_BYTES = 1e9


@asynccontextmanager
async def built_parts(
    settings: NodeSettings,
    plan: RunPlan,
    home: Home,
    makers: Makers | None = None,
    *,
    on_progress: OnProgress = unwatched,
) -> AsyncIterator[Parts]:
    """The running parts of a node; everything is stopped and saved when the block ends, however it ends.

    `makers` None: workers in processes of their own and a real network.

    Raises ModelError, TaskError, ConfigError, UsageError, NetworkError, MachineError, WorkerError.
    """
    makers, prepared = await prepare(settings, plan, home, makers, on_progress)
    async with AsyncExitStack() as stack:
        parts = _assembled(stack, prepared, makers)
        parts.guard.on_fault = fault_charger(parts)
        served = Served(parts)
        parts.gossip.serve(
            served.lookup,
            on_confirm=served.confirmed,
            answer=served.answer,
            lookup_text=served.retell,
            is_refused=parts.peers.is_banned,
            on_sent=served.sent,
            on_refusal=served.announcement_refused,
        )
        try:
            await _start(parts, on_progress)
            yield parts
        except Exception as error:
            first = first_of_ours(error)
            parts.events.write("failed", where="the node", error=f"{type(first).__name__}: {first}")
            raise
        finally:
            await _stop(parts)


def _assembled(stack: AsyncExitStack, prepared: Prepared, makers: Makers) -> Parts:
    """All parts, none of them started; `stack` closes the files that they keep open."""
    settings, manifest, home, identity = prepared.settings, prepared.manifest, prepared.home, prepared.identity
    source, step = prepared.source, prepared.manifest.step
    events = EventTrail(home.events, max_bytes=settings.limits.event_file_bytes, kept_files=KEPT_EVENT_FILES)
    stack.callback(events.close)
    peers = PeerBook(home.peers, own_id=identity.peer_id, settings=settings.admission, events=events)
    stack.callback(peers.close)
    disk = Disk()
    stack.callback(disk.close)
    buffer = ReplayBuffer(home.replay)
    stack.callback(buffer.close)
    reader = ReplayReader(home.replay)
    stack.callback(reader.close)
    remembered = read_remembered(home.events)
    set_right(buffer, remembered, events, peer_id=identity.peer_id)
    weights = stack.enter_context(
        weights_folder(
            home,
            version_bytes=version_bytes(settings, source),
            num_versions=num_versions(settings, prepared.arrangement.hand_over),
        )
    )
    ingredients = Ingredients(
        settings, manifest, home, identity, source, prepared.tokenizer, events, prepared.arrangement, weights
    )
    state, registry, evaluations = NodeState(step=remembered.step), PeerRegistry(), EvaluationHistory()
    for entry in _past_evaluations(remembered):
        evaluations.add(entry)
    generation, learner = _workers(makers, ingredients, state)
    made = reader.figures()
    name = settings.name or identity.peer_id[-NAME_LENGTH:]
    return Parts(
        settings=settings,
        manifest=manifest,
        home=home,
        identity=identity,
        name=name,
        source=source,
        tokenizer=prepared.tokenizer,
        task=prepared.task,
        domain=prepared.domain,
        eval_tasks=prepared.eval_tasks,
        scorer=IsolatedScorer(prepared.task, scored_only=prepared.eval_tasks),
        strangers_scorer=IsolatedScorer(prepared.task),  # its process starts with the first stranger's group
        generation=generation,
        evaluated=generation.newest,
        learner=learner,
        gossip=makers.gossip(ingredients),
        buffer=buffer,
        reader=reader,
        disk=disk,
        slots=Slots(step.num_generated * (1 + step.max_async_level), held=reader.own_held()),
        events=events,
        state=state,
        counters=NodeCounters(),
        registry=registry,
        confirmations=Confirmations(registry),
        evaluations=evaluations,
        peers=peers,
        arrangement=prepared.arrangement,
        training=prepared.training,
        room=Room(prepared.limit),
        budget=generate_budget(settings.budget, num_tokens=made.tokens_own, num_groups=made.groups_own),
        tracking=make_tracking(settings, manifest, home, name=name, peer_id=identity.peer_id, model=source.name),
        division=division_of(manifest, prepared.domain.name),
    )


def _workers(makers: Makers, ingredients: Ingredients, state: NodeState) -> tuple[Generation, Learning]:
    """Both, or what stands in the place of the one that the node's role does without."""
    settings = ingredients.settings
    learner: Learning = (
        makers.learner(ingredients) if settings.learns else NoLearner(parameter_count(ingredients.source))
    )
    ingredients = replace(ingredients, make_room=learner.give_memory_back, write_weights=learner.write_weights)
    generation: Generation = (
        makers.generation(ingredients) if settings.generates else NoGeneration(lambda: state.policy_version)
    )
    return generation, learner


async def _start(parts: Parts, on_progress: OnProgress) -> None:
    """The slow parts, side by side: two workers and the network."""
    model = f"{parts.source.name} ({_size_of(parts.source)})"
    waited_for = ["generation", "learner", "gossip"]

    async def start(name: str, part: Generation | Learning | Gossip) -> None:
        await part.start()
        waited_for.remove(name)
        on_progress(None, _waiting(waited_for, model))

    on_progress(None, _waiting(waited_for, model))
    parts.events.write(
        "start",
        schema=EVENT_SCHEMA,
        run=parts.manifest.run_id,
        peer=parts.identity.peer_id,
        model=parts.source.name,
    )
    log.info("%s; what they print is in %s", _who_starts(parts.settings), parts.home.logs)
    async with asyncio.TaskGroup() as tasks:
        for name, part in (("generation", parts.generation), ("learner", parts.learner), ("gossip", parts.gossip)):
            tasks.create_task(start(name, part), name=f"start-{name}")
    state = parts.learner.state
    assert state is not None, "a started learner has a state"
    if parts.settings.learns and state.step < parts.state.step:
        log.warning("step %d was done, and the newest checkpoint to be read is of %d", parts.state.step, state.step)
        parts.events.write("checkpoint_fallback", step=state.step, done=parts.state.step)
    if parts.settings.learns:
        tell_unknown_steps(state, done=parts.state.step, holds=parts.reader.held, events=parts.events)
    where = _begins_at(state.step) if parts.settings.learns else f"following {parts.settings.roles.follow}"
    log.info("%s: %s parameters, %s", parts.source.name, f"{state.parameters:,}", where)
    if not parts.settings.generates:
        log.info("generators take this learner's weights by --role generator --follow %s", parts.identity.peer_id)


def _waiting(waited_for: Sequence[str], model: str) -> str:
    """What is waited for: `loading m (3.2 MB) into generator and learner; connecting`; nothing where nothing is."""
    names = {"generation": "generator", "learner": "learner"}
    workers = " and ".join(names[name] for name in waited_for if name in names)
    doing = [f"loading {model} into {workers}"] if workers else []
    return "; ".join([*doing, *(["connecting"] if "gossip" in waited_for else [])])


def _size_of(source: ModelSource) -> str:
    num_bytes = sum(path.stat().st_size for path in source.weights_files)
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= LARGE_BYTES else f"{num_bytes / 1e6:.1f} MB"


def _who_starts(settings: NodeSettings) -> str:
    if not settings.learns:
        return "loading the model into the generator, which takes a minute or more"
    if not settings.generates:
        return "loading the model into the learner, which takes a minute or more"
    return "loading the model into the generator and the learner, which takes a minute or more"


def _begins_at(step: int) -> str:
    return f"goes on after step {step}" if step else "begins at step 0"


async def _stop(parts: Parts) -> None:
    """All at once; each has its own limit, and together they stay within the ten seconds that a stop may take."""
    results = await asyncio.gather(
        parts.generation.stop(),
        parts.learner.stop(),
        parts.gossip.close(),
        parts.scorer.close(),
        parts.strangers_scorer.close(),
        parts.tracking.close(),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            log.error("while stopping: %s", result)
    with suppress(OSError):  # of a learner that had to be killed; the next start would remove it
        remove_leftovers(parts.home.checkpoints, CHECKPOINT_PREFIX)
    tracked = {"tracked": parts.tracking.counts()} if parts.tracking else {}
    parts.events.write("stop", step=parts.state.step, **tracked)


def _past_evaluations(remembered: Remembered) -> list[EvalStatus]:
    """The evaluations of former starts, from the event trail; one whose line has lost a field is left out."""
    fields = EvalStatus.__struct_fields__
    whole = (event for event in remembered.evaluations if all(name in event for name in fields))
    return [EvalStatus(**{name: event[name] for name in fields}) for event in whole]
