"""Makes the parts of a node in the order in which they can fail cheaply, and takes them down in reverse.

    model and tokenizer found -> task loaded -> buffer opened -> workers and network started side by side
                              -> buffer and learner agree on the step -> the generator serves the learner's weights

What a user can have done wrong (model, task, port, address) is found before anything slow or lasting happens.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from ftis_node.generation.client import PROOF_TOLERANCES, GenerationClient
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.messages import GenerationBoot
from ftis_node.gossip import GossipLimits, NetworkSettings
from ftis_node.ipc.spec import Timing
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.messages import LearnerBoot, LoraSettings
from ftis_node.models import load_tokenizer, pick_device, resolve_model
from ftis_node.node.background import in_background
from ftis_node.node.disk import Disk
from ftis_node.node.figures import Figures
from ftis_node.node.parts import Parts
from ftis_node.node.serve import Served
from ftis_node.node.slots import Slots
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.tasks import load_task
from ftis_node.tasks.scoring import IsolatedScorer
from ftis_node.telemetry.events import EventTrail, read_events
from ftis_node.telemetry.status import EvalStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings
    from ftis_node.learner.messages import CheckpointSkipped
    from ftis_node.models import ModelSource, PromptTokenizer
    from ftis_node.node.plan import RunPlan

log = logging.getLogger(__name__)

NAME_LENGTH = 8


@asynccontextmanager
async def built_parts(settings: NodeSettings, plan: RunPlan, home: Home) -> AsyncIterator[Parts]:
    """The running parts of a node; everything is stopped and saved when the block ends, however it ends.

    Raises ModelError, TaskError, ConfigError, UsageError, NetworkError, MachineError, WorkerError.
    """
    network = _network_settings(settings, home)  # a malformed address is found before anything starts
    identity = Identity.load_or_create(home.identity)
    source = await in_background(resolve_model, settings.model)
    tokenizer = await in_background(load_tokenizer, source)
    task, eval_task = await in_background(_load_tasks, plan)
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
        parts = Parts(
            settings=settings,
            manifest=manifest,
            home=home,
            identity=identity,
            name=settings.name or identity.peer_id[-NAME_LENGTH:],
            source=source,
            tokenizer=tokenizer,
            task=task,
            eval_task=eval_task,
            scorer=IsolatedScorer(*(known for known in (task, eval_task) if known is not None)),
            generation=GenerationClient(
                _generation_boot(settings, source, tokenizer),
                sockets_dir=home.sockets,
                log_path=home.logs / "generation.log",
                num_threads=threads_of(settings.generation.threads),
                request_timeout_s=settings.generation.request_timeout_s,
                proof_tolerance=PROOF_TOLERANCES[_dtype(settings)],
                on_problem=lambda problem: events.write("proof_failed", problem=problem),
            ),
            learner=LearnerClient(
                learner_boot(settings, manifest, source, home),
                sockets_dir=home.sockets,
                log_path=home.logs / "learner.log",
                timing=Timing(stall_timeout_s=settings.learner.stall_timeout_s),
                on_checkpoint_skipped=lambda skipped: _report_skipped(events, skipped),
            ),
            gossip=_make_gossip(network, identity, manifest),
            buffer=buffer,
            reader=reader,
            disk=disk,
            slots=Slots(step.own_groups * (1 + step.steps_ahead), held=reader.own_held()),
            events=events,
            figures=Figures(evaluations=_past_evaluations(home), step=_last_noted_step(home)),
        )
        served = Served(parts)
        parts.gossip.serve(served.lookup, on_confirm=served.confirmed, answer=served.answer)
        try:
            await _start(parts)
            yield parts
        finally:
            await _stop(parts)


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
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            log.error("while stopping: %s", result)
    parts.events.write("stop", step=parts.figures.step)


def _load_tasks(plan: RunPlan) -> tuple[Any, Any]:
    """The task to train on and the held-out one to evaluate on."""
    task = load_task(plan.task_spec, split="train")
    return task, load_task(plan.eval_spec, split="test") if plan.eval_spec else None


def _network_settings(settings: NodeSettings, home: Home) -> NetworkSettings:
    return NetworkSettings(sockets_dir=home.sockets / "net", listen=settings.listen, peers=settings.peers)


def _make_gossip(network: NetworkSettings, identity: Identity, manifest: RunManifest) -> Any:
    from ftis_node.gossip.libp2p import Libp2pGossip

    limits = GossipLimits(max_body_bytes=manifest.wire.max_envelope_bytes)
    return Libp2pGossip(network, identity=identity, run_id=manifest.run_id, limits=limits)


def _generation_boot(settings: NodeSettings, source: ModelSource, tokenizer: PromptTokenizer) -> GenerationBoot:
    return GenerationBoot(
        model=str(source.folder),
        engine=settings.engine,
        eos_ids=tokenizer.eos_ids,
        settings=EngineSettings(
            vocab_size=tokenizer.vocab_size,
            device=settings.device,
            dtype=_dtype(settings),
            max_batch=settings.generation.max_batch,
        ),
    )


def learner_boot(settings: NodeSettings, manifest: RunManifest, source: ModelSource, home: Home) -> LearnerBoot:
    adapter, optimizer = settings.lora_adapter, manifest.optimizer
    return LearnerBoot(
        model=str(source.folder),
        model_name=source.name,
        run_id=manifest.run_id,
        checkpoints_dir=str(home.checkpoints),
        weights_dir=str(home.weights),
        method=manifest.method.name,
        method_params=dict(manifest.method.loss_parameters()),
        advantage_scale=manifest.method.advantage_scale,
        temperature=manifest.sampling.temperature,
        learning_rate=optimizer.lora_learning_rate if settings.lora else optimizer.learning_rate,
        max_grad_norm=optimizer.max_grad_norm,
        updates_per_batch=optimizer.updates_per_batch,
        micro_batch_tokens=settings.learner.micro_batch_tokens,
        lora=LoraSettings(rank=adapter.rank, alpha=adapter.alpha, dropout=adapter.dropout) if settings.lora else None,
        dtype=_dtype(settings),
        device=settings.device,
        seed=settings.seed,
        num_threads=threads_of(settings.learner.threads),
        keep_checkpoints=settings.learner.keep_checkpoints,
        checkpoint_every_steps=settings.learner.checkpoint_every_steps,
        recompute_activations=settings.learner.recompute_activations,
    )


def _dtype(settings: NodeSettings) -> Any:
    """The format the weights are computed in: what was asked for, else float32 on a CPU and bfloat16 on a GPU."""
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if pick_device(settings.device) == "cpu" else "bfloat16"


def threads_of(asked: int) -> int:
    """Threads of one worker: two workers share the cores."""
    return asked or max(1, (os.cpu_count() or 2) // 2)


def _past_evaluations(home: Home) -> list[EvalStatus]:
    """The evaluations of former starts, from the event trail."""
    fields = EvalStatus.__struct_fields__
    return [EvalStatus(**{name: event[name] for name in fields}) for event in read_events(home.events, name="eval")]


def _last_noted_step(home: Home) -> int:
    """The newest step in the event trail; the learner may have done one more."""
    return max((event["step"] for event in read_events(home.events, name="step")), default=0)


def _report_skipped(events: EventTrail, skipped: CheckpointSkipped) -> None:
    log.warning("checkpoint %s is skipped: %s", skipped.name, skipped.reason)
    events.write("checkpoint_skipped", name=skipped.name, reason=skipped.reason)
