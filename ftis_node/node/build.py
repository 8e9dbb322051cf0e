"""Makes the parts of a node in the order in which they can fail cheaply, and takes them down in reverse.

    model found -> memory planned -> tokenizer and task loaded -> buffer opened
                -> workers and network started side by side -> buffer and learner agree on the step
                -> the generator serves the learner's weights

What a user can have done wrong (model, memory, task, port, address) is found before anything slow or lasting happens.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from ftis_node.models import load_tokenizer, parameter_count, read_shape, resolve_model
from ftis_node.node.background import in_background
from ftis_node.node.disk import Disk
from ftis_node.node.figures import Figures
from ftis_node.node.makers import Ingredients, ProcessMakers, dtype_of, serves_adapters
from ftis_node.node.parts import Parts
from ftis_node.node.serve import Served
from ftis_node.node.slots import Slots
from ftis_node.node.tracking import make_tracking
from ftis_node.node.weights_folder import weights_folder
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.tasks import load_task
from ftis_node.tasks.scoring import IsolatedScorer
from ftis_node.telemetry.events import EventTrail, read_events
from ftis_node.telemetry.status import EvalStatus
from ftis_node.telemetry.trackers import check_installed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ftis_node.config.home import Home
    from ftis_node.config.node import NodeSettings
    from ftis_node.models import ModelSource
    from ftis_node.node.makers import Makers
    from ftis_node.node.plan import RunPlan
    from ftis_node.tasks.base import Task

log = logging.getLogger(__name__)

NAME_LENGTH = 8
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@asynccontextmanager
async def built_parts(
    settings: NodeSettings, plan: RunPlan, home: Home, makers: Makers | None = None
) -> AsyncIterator[Parts]:
    """The running parts of a node; everything is stopped and saved when the block ends, however it ends.

    `makers` None: workers in processes of their own and a real network.

    Raises ModelError, TaskError, ConfigError, UsageError, NetworkError, MachineError, WorkerError.
    """
    makers = makers or ProcessMakers(settings, home)  # a malformed address is found before anything starts
    check_installed(settings.tracking.to)
    identity = Identity.load_or_create(home.identity)
    name = settings.name or identity.peer_id[-NAME_LENGTH:]
    source = await in_background(resolve_model, settings.model)
    arrangement = await in_background(makers.arrange, settings, plan.manifest, source)
    tokenizer = await in_background(load_tokenizer, source)
    task, eval_tasks = await in_background(load_tasks, plan)
    home.run_toml.write_text(plan.manifest.to_toml())
    home.settings.write_text(settings.model_dump_json(indent=1))
    async with AsyncExitStack() as stack:
        events = EventTrail(home.events)
        stack.callback(events.close)
        disk = Disk()
        stack.callback(disk.close)
        buffer = ReplayBuffer(home.replay)
        stack.callback(buffer.close)
        reader = ReplayReader(home.replay)
        stack.callback(reader.close)
        manifest, step = plan.manifest, plan.manifest.step
        weights = stack.enter_context(weights_folder(home, version_bytes=_version_bytes(settings, source)))
        ingredients = Ingredients(settings, manifest, home, identity, source, tokenizer, events, arrangement, weights)
        generation = makers.generation(ingredients)
        parts = Parts(
            settings=settings,
            manifest=manifest,
            home=home,
            identity=identity,
            name=name,
            source=source,
            tokenizer=tokenizer,
            task=task,
            eval_tasks=eval_tasks,
            scorer=IsolatedScorer(task, *eval_tasks),
            generation=generation,
            evaluated=generation.newest,
            learner=makers.learner(ingredients),
            gossip=makers.gossip(ingredients),
            buffer=buffer,
            reader=reader,
            disk=disk,
            slots=Slots(step.own_groups * (1 + step.steps_ahead), held=reader.own_held()),
            events=events,
            figures=Figures(evaluations=_past_evaluations(home), step=_last_noted_step(home)),
            arrangement=arrangement,
            tracking=make_tracking(settings, manifest, home, name=name, peer_id=identity.peer_id, model=source.name),
        )
        served = Served(parts)
        parts.gossip.serve(served.lookup, on_confirm=served.confirmed, answer=served.answer, retell=served.retell)
        try:
            await _start(parts)
            yield parts
        finally:
            await _stop(parts)


def _version_bytes(settings: NodeSettings, source: ModelSource) -> int:
    """What one hand-over of new weights takes."""
    if serves_adapters(settings):
        num_values = read_shape(source).adapter_parameters(settings.lora_adapter.rank)
    else:
        num_values = parameter_count(source)
    return num_values * DTYPE_BYTES[dtype_of(settings)]


async def _start(parts: Parts) -> None:
    """The slow parts, side by side: two workers and the network."""
    parts.events.write("start", run=parts.manifest.run_id, peer=parts.identity.peer_id, model=parts.source.name)
    async with asyncio.TaskGroup() as tasks:
        for name, part in (("generation", parts.generation), ("learner", parts.learner), ("gossip", parts.gossip)):
            tasks.create_task(part.start(), name=f"start-{name}")
    state = parts.learner.state
    assert state is not None, "a started learner has a state"
    log.info("%s: %s parameters, resumed at step %d", parts.source.name, f"{state.parameters:,}", state.step)


async def _stop(parts: Parts) -> None:
    """All at once; each has its own limit, and together they stay within the ten seconds that a stop may take."""
    results = await asyncio.gather(
        parts.generation.stop(),
        parts.learner.stop(),
        parts.gossip.close(),
        parts.scorer.close(),
        parts.tracking.close(),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            log.error("while stopping: %s", result)
    tracked = {"tracked": parts.tracking.counts()} if parts.tracking else {}
    parts.events.write("stop", step=parts.figures.step, **tracked)


def load_tasks(plan: RunPlan) -> tuple[Task, tuple[Task, ...]]:
    """The task to train on and the held-out ones to evaluate on."""
    return load_task(plan.task_spec, split="train"), tuple(load_task(spec, split="test") for spec in plan.eval_specs)


def _past_evaluations(home: Home) -> list[EvalStatus]:
    """The evaluations of former starts, from the event trail."""
    fields = EvalStatus.__struct_fields__
    return [EvalStatus(**{name: event[name] for name in fields}) for event in read_events(home.events, name="eval")]


def _last_noted_step(home: Home) -> int:
    """The newest step in the event trail; the learner may have done one more."""
    return max((event["step"] for event in read_events(home.events, name="step")), default=0)
