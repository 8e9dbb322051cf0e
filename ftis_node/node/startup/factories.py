"""Factories of the heavy components of a node: workers in separate processes, and a real network.

An experiment replaces `NodeFactory` to run engines, learners and a network in its own process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import SAVE_LIMIT_S
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.gossip import Gossip, GossipLimits, NetworkSettings
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.messages import CheckpointEvent, CheckpointInProgress
from ftis_node.memory.placement import WorkerPlacement, arrange, place_single_worker, visible_gpus
from ftis_node.models import ModelSource, PromptTokenizer, pick_device
from ftis_node.node.startup.worker_boots import generation_boot, learner_boot
from ftis_node.node.storage.disk_space import HomeLimit
from ftis_node.node.supervision.shutdown import delay_forced_end
from ftis_node.node.supervision.waits import in_background
from ftis_node.node.worker_interfaces import Generation, Learning
from ftis_node.node.worker_settings import dtype_of, serves_adapters, threads_of
from ftis_node.records.addresses import Address
from ftis_node.records.envelope import MAX_ANNOUNCEMENT_BYTES
from ftis_node.records.identity import Identity
from ftis_node.tasks.base import Task
from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.secrets import read_secret
from ftis_node.workers.liveness import Timing
from ftis_node.workers.preload import Preload

log = logging.getLogger(__name__)
MAX_REQUESTS_PER_MINUTE = 1200.0  # of one peer for one service; a request of `ask` or `hello` counts as ten
# A start loads the model and compiles kernels. An engine with requests makes a step within `stall_timeout_s`.
GENERATION_TIMING = Timing(start_grace_s=1800.0, stall_timeout_s=300.0)
CPU_STALL_TIMEOUT_S = 1800.0  # a step of the learner, or one pass over the prompts of a large model, takes minutes
LEARNER_TIMING = Timing(stall_timeout_s=CPU_STALL_TIMEOUT_S, save_limit_s=SAVE_LIMIT_S)
LATER_LEARNER_TIMING = replace(  # it waits for the generator's base
    LEARNER_TIMING, start_grace_s=GENERATION_TIMING.start_grace_s + LEARNER_TIMING.start_grace_s
)


@dataclass(frozen=True, slots=True)
class NodeInputs:
    """The checked inputs of a node's components. `training` is one line: full weights or LoRA, with the reason."""

    settings: NodeSettings
    manifest: RunManifest
    home: Home
    identity: Identity
    source: ModelSource
    arrangement: WorkerPlacement
    training: str
    tokenizer: PromptTokenizer
    task: Task
    domain: Task
    eval_tasks: tuple[Task, ...]
    limit: HomeLimit


class NodeFactory(Protocol):
    """Abstract factory of components, none of them started. Call `arrange` first: it places the two workers.

    `weights` is the folder in which the learner publishes versions. The generation worker asks `learner` to free memory
    and to write weights.
    """

    async def arrange(
        self, settings: NodeSettings, manifest: RunManifest, source: ModelSource, *, others_count: bool = True
    ) -> WorkerPlacement: ...
    def learner(self, of: NodeInputs, *, events: EventLog, weights: Path) -> Learning: ...
    def generation(self, of: NodeInputs, *, events: EventLog, learner: Learning) -> Generation: ...
    def gossip(self, of: NodeInputs) -> Gossip: ...


class ProcessNodeFactory:
    """The factory of `ftis-node join`: two worker processes and libp2p."""

    def __init__(self, settings: NodeSettings, home: Home) -> None:
        """Raise ConfigError for a malformed address, and for a secret file that is missing, short or not private."""
        secret_file = settings.swarm.secret_file
        self._secret = read_secret(Path(secret_file).expanduser(), name="swarm.secret_file") if secret_file else None
        self._network = NetworkSettings(
            sockets_dir=home.sockets / "net", listen=settings.listen, announce=settings.announce, peers=settings.peers
        )
        self.preload = preload_of(settings, home)

    @property
    def listen_addresses(self) -> tuple[Address, ...]:
        return self._network.listen_addresses

    async def arrange(
        self, settings: NodeSettings, manifest: RunManifest, source: ModelSource, *, others_count: bool = True
    ) -> WorkerPlacement:
        """Apply the memory plan; `others_count` as in `inspect_machine`.

        The plan divides the memory between two workers. A single worker gets all memory that the settings allow.
        Raise MachineError if the model does not fit, ConfigError for GPUs.
        """
        return await in_background(partial(_place, settings, manifest, source, others_count=others_count))

    def generation(self, of: NodeInputs, *, events: EventLog, learner: Learning) -> GenerationClient:
        borrower = learner if of.arrangement.shares_base and isinstance(learner, LearnerClient) else None
        is_on_cpu = pick_device(of.settings.device) == "cpu"
        client = GenerationClient(
            generation_boot(
                of.settings, of.manifest, of.source, of.tokenizer, of.arrangement, adapters=serves_adapters(of.settings)
            ),
            sockets_dir=of.home.sockets,
            log_path=of.home.logs / "generation.log",
            num_threads=threads_of(of.settings.generation.threads),
            proof_tolerance=PROOF_TOLERANCES[dtype_of(of.settings)],
            timing=replace(GENERATION_TIMING, stall_timeout_s=CPU_STALL_TIMEOUT_S) if is_on_cpu else GENERATION_TIMING,
            environment=visible_gpus(of.arrangement.generator_gpus),
            on_problem=lambda problem: events.write("weight_check_failed", problem=problem),
            free_memory=learner.give_memory_back if borrower is None else None,  # it starts after the generator
            write_weights=learner.write_weights,
            on_fall_back=lambda reason: events.write("weight_sync_fallback", reason=reason),
            preload=self.preload,
            borrower=borrower,
        )
        if borrower is not None:
            borrower.share_base = client.share_base
        return client

    def learner(self, of: NodeInputs, *, events: EventLog, weights: Path) -> LearnerClient:
        return LearnerClient(
            learner_boot(
                of.settings,
                of.manifest,
                of.source,
                of.home,
                of.arrangement,
                weights=weights,
                identity=of.identity,
                adapters=serves_adapters(of.settings),
            ),
            sockets_dir=of.home.sockets,
            log_path=of.home.logs / "learner.log",
            timing=LATER_LEARNER_TIMING if of.arrangement.shares_base else LEARNER_TIMING,
            environment=visible_gpus(of.arrangement.learner_gpus),
            on_event=lambda event: _report_learner_event(events, event),
            on_slow_stop=lambda: delay_forced_end("the learner's computation in progress"),
            preload=self.preload,
        )

    def gossip(self, of: NodeInputs) -> Gossip:
        from ftis_node.gossip.libp2p import Libp2pGossip

        return Libp2pGossip(
            self._network,
            identity=of.identity,
            run_id=of.manifest.run_id,
            limits=gossip_limits(of.settings, of.manifest),
            num_shards=of.manifest.wire.announcement_shards,
            secret=self._secret,
        )


def preload_of(settings: NodeSettings, home: Home) -> Preload | None:
    """Return the process that imports the libraries of both workers; None unless both use as many threads."""
    num_threads = threads_of(settings.generation.threads)
    if not (settings.generates and settings.learns) or settings.learner.num_ranks > 1:
        return None
    if num_threads != threads_of(settings.learner.threads):
        return None
    return Preload({"OMP_NUM_THREADS": str(num_threads)}, home.logs / "preload.log")


def _place(
    settings: NodeSettings, manifest: RunManifest, source: ModelSource, *, others_count: bool
) -> WorkerPlacement:
    if not settings.generates and not settings.learns:
        return WorkerPlacement()
    if not (settings.generates and settings.learns):
        return place_single_worker(settings)
    return arrange(settings, manifest, source, others_count=others_count)


def gossip_limits(settings: NodeSettings, manifest: RunManifest) -> GossipLimits:
    return GossipLimits(
        max_announcement_bytes=MAX_ANNOUNCEMENT_BYTES,
        max_envelope_bytes=manifest.wire.max_envelope_bytes,
        max_upload_bytes_per_s=settings.swarm.max_upload_bytes_per_s,
        max_requests_per_minute=MAX_REQUESTS_PER_MINUTE,
    )


def _report_learner_event(events: EventLog, event: CheckpointEvent) -> None:
    if isinstance(event, CheckpointInProgress):
        delay_forced_end(f"the checkpoint of step {event.step}, which is being written")
        return
    log.warning("checkpoint %s is skipped: %s", event.name, event.reason)
    events.write("checkpoint_skipped", name=event.name, reason=event.reason)
