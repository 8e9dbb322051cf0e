"""A node's generation and learner within this process: the same engine, learner and protocol, without worker processes.

An experiment runs many small swarms. Each needs one core and no ports, and does not wait for processes to start.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.roles import Delay
from ftis_node.errors import EngineError, FtisError
from ftis_node.generation.client import OnPhase
from ftis_node.generation.engines import choose_engine
from ftis_node.generation.engines.base import Engine, GenerateRequest, GenerationResult
from ftis_node.generation.messages import GenerationBoot
from ftis_node.generation.weight_loader import PROOF_TOLERANCES, ProofToCome
from ftis_node.gossip.loopback import LoopbackGossip, LoopbackSwarm
from ftis_node.learner.client import OnPublished
from ftis_node.learner.messages import AuditReply, LearnerBoot, LearnerState, TrainGroup, TrainReply
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import ModelSource
from ftis_node.node.startup.factories import NodeInputs
from ftis_node.node.startup.worker_boots import generation_boot, learner_boot
from ftis_node.node.worker_interfaces import Learning
from ftis_node.node.worker_settings import dtype_of
from ftis_node.swarm.transit import VersionsInTransit
from ftis_node.telemetry.events import EventLog
from ftis_node.workers.supervisor import WorkerState
from ftis_node.workers.weight_store import WEIGHTS_FILE, PublishedWeights, WeightProof, find_difference

if TYPE_CHECKING:
    from ftis_node.learner.learner import Learner


class InProcessGeneration:
    """Replacement for `generation.client.GenerationClient` without a worker process.

    With a delay, a second engine has the newest weights. Evaluations use it: they alone are greedy.
    """

    def __init__(
        self,
        boot: GenerationBoot,
        source: ModelSource,
        *,
        transit: VersionsInTransit,
        held: Path,
        proof_tolerance: float,
    ) -> None:
        """Store the parameters. `held` is a folder for versions in transit; `proof_tolerance` is as in the client."""
        self._boot = boot
        self._source = source
        self._transit = transit
        self._held = held
        self._proof_tolerance = proof_tolerance
        self._engines: dict[str, Engine] = {}
        self.engine: str = boot.engine
        self.policy_version = 0
        self.restarts = 0
        self.tokens_per_s = 0.0
        self.weight_transfer = ""
        self._times_asked: Counter[str] = Counter()

    @property
    def worker_state(self) -> WorkerState:
        return WorkerState.READY if self._engines else WorkerState.STOPPED

    @property
    def is_alive(self) -> bool:
        """Return whether the engines are open. An engine failure needs no state, because it ends the experiment."""
        return bool(self._engines)

    async def start(self, on_phase: OnPhase | None = None) -> None:
        """Open the engines. Raises ModelError, EngineError, MachineError."""
        if self._engines:
            return
        self._held.mkdir(exist_ok=True)
        has_delay = self._transit.delay.most > 0
        for use in ("newest", "late") if has_delay else ("newest",):
            engine = await choose_engine(self._boot.engine)(self._source, self._boot.settings)
            self._engines[use], self.engine = engine, engine.name
        self._engines.setdefault("late", self._engines["newest"])

    async def run(self) -> None:
        """Do nothing: there is no process to supervise."""

    async def stop(self) -> None:
        for engine in set(self._engines.values()):
            await engine.close()

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        """Generate one unscored group. Without a seed in the request, the seed depends on prompt and version, and on
        how often the version was asked for this prompt before.

        So trials are repeatable. Greedy answers need no seed.
        """
        if request.sampling.temperature == 0:
            return await self._engines["newest"].generate(request)
        if request.seed is None:
            text = f"{self._boot.settings.seed}/{self.policy_version}/{list(request.prompt_ids)}"
            self._times_asked[text] += 1
            if self._times_asked[text] > 1:
                text += f"/{self._times_asked[text]}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
            request = replace(request, seed=seed)
        return await self._engines["late"].generate(request)

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        return await self._engines["newest"].probe(token_ids)

    async def check_start(self, proof: WeightProof) -> None:
        """Raise EngineError if the starting model's log-probs differ from the learner's."""
        if problem := await self._difference(proof):
            raise EngineError(f"the engine {self.engine} {problem}")

    async def _difference(self, proof: WeightProof) -> str | None:
        difference = proof.rms_difference(await self.probe(proof.probe_ids))
        if difference <= self._proof_tolerance:
            return None
        return f"differs from the learner by {difference:.2g} nats (RMS) on the probe"

    async def update_weights(self, weights: PublishedWeights, proof: ProofToCome | WeightProof | None = None) -> None:
        """Send the version into transit and serve the versions that have arrived. Raises FtisError if the weight check
        fails.
        """
        newest = self._engines["newest"]
        held = await newest.load_weights(Path(weights.path), weights.version)
        problem = find_difference(weights.checksums, held)
        if isinstance(proof, asyncio.Future):
            proof = await proof
        if proof is not None:
            problem = await self._difference(proof) or problem
        if problem is not None:
            raise FtisError(f"the generator {problem}")
        self.weight_transfer = weights.how()
        self._transit.send(weights.version, at=weights.version)
        if newest is not self._engines["late"]:
            shutil.copytree(Path(weights.path).parent, self._folder(weights.version), copy_function=os.link)
        arrived = self._transit.receive(weights.version)
        if arrived is not None:
            await self._serve_late(arrived)

    async def try_weights(self, weights: PublishedWeights, proof: WeightProof) -> None:
        """Call `update_weights`, because all weights are this node's own."""
        await self.update_weights(weights, proof)

    async def sleep(self, *, discard: bool = False) -> None:
        for engine in set(self._engines.values()):
            await engine.sleep()

    async def wake(self) -> None:
        for engine in set(self._engines.values()):
            await engine.wake()

    async def _serve_late(self, version: int) -> None:
        late = self._engines["late"]
        if late is not self._engines["newest"]:
            await late.load_weights(self._folder(version) / WEIGHTS_FILE, version)
            for folder in self._held.iterdir():
                if folder <= self._folder(version):
                    shutil.rmtree(folder)
        self.policy_version = version
        self._times_asked.clear()

    def _folder(self, version: int) -> Path:
        return self._held / f"{version:08d}"


class InProcessLearner:
    """Replacement for `learner.client.LearnerClient` without a worker process.

    Calls block, because the swarm shares one core.
    """

    def __init__(self, boot: LearnerBoot) -> None:
        self._boot = boot
        self._learner: Learner | None = None
        self.restarts = 0

    @property
    def worker_state(self) -> WorkerState:
        return WorkerState.READY if self._learner else WorkerState.STOPPED

    @property
    def state(self) -> LearnerState | None:
        return self._learner.state() if self._learner else None

    @property
    def _started(self) -> Learner:
        if self._learner is None:
            raise FtisError("the learner was not started")
        return self._learner

    async def start(self) -> LearnerState:
        """Load the model. Raises the errors of `learner.learner.Learner`."""
        from ftis_node.learner.learner import Learner

        self._learner = self._learner or Learner(self._boot)
        return self._learner.state()

    async def run(self) -> None:
        """Do nothing: there is no process to supervise."""

    async def stop(self) -> None:
        """Save the state that is not on disk yet, as the worker does."""
        if self._learner is not None:
            self._learner.save()

    def restart(self, how: str) -> None:
        """Drop all state except the checkpoint; the next `start` loads it."""
        self._learner = None

    async def train(
        self, groups: Sequence[TrainGroup], *, step: int, on_published: OnPublished | None = None
    ) -> TrainReply:
        """Train one step. It reports no progress, because in one process no other part could use it."""
        return self._started.train(groups, step=step)

    async def check(self, group: TrainGroup) -> None:
        """Measure the training-inference mismatch on a group of the current version."""
        self._started.offer_check(group)
        self._started.check()

    async def audit(self, group: TrainGroup) -> AuditReply:
        return self._started.audit(group)

    async def give_memory_back(self) -> None:
        if self._learner is not None:
            self._learner.give_memory_back(force=True)

    async def write_weights(self, refused: str = "") -> PublishedWeights | None:
        return None if self._learner is None else self._learner.write_weights(refused=refused)

    async def save(self) -> int:
        return self._started.save()

    def export(self, out: Path) -> None:
        from ftis_node.learner.checkpoint.export import export_policy

        export_policy(self._started.policy, out, merge=True)


class InProcessNodeFactory:
    """`startup.factories.NodeFactory` for one member of an experiment's swarm."""

    def __init__(self, swarm: LoopbackSwarm, *, delay: Delay, seed: int) -> None:
        self._swarm = swarm
        self._delay = delay
        self._seed = seed

    async def arrange(
        self, settings: NodeSettings, manifest: RunManifest, source: ModelSource, *, others_count: bool = True
    ) -> WorkerPlacement:
        """Return a placement without a memory plan, because all members share this process.

        Members take turns if the settings have time-shared placement.
        """
        return WorkerPlacement(takes_turns=settings.memory.placement == "time_shared")

    def generation(self, of: NodeInputs, *, events: EventLog, learner: Learning) -> InProcessGeneration:
        boot = generation_boot(of.settings, of.manifest, of.source, of.tokenizer, of.arrangement)
        return InProcessGeneration(
            replace(boot, settings=replace(boot.settings, seed=self._seed)),
            of.source,
            transit=VersionsInTransit(self._delay, random.Random(self._seed)),
            held=of.home.root / "held",
            proof_tolerance=PROOF_TOLERANCES[dtype_of(of.settings)],
        )

    def learner(self, of: NodeInputs, *, events: EventLog, weights: Path) -> InProcessLearner:
        boot = learner_boot(
            of.settings, of.manifest, of.source, of.home, of.arrangement, weights=of.home.weights, identity=of.identity
        )
        return InProcessLearner(boot)

    def gossip(self, of: NodeInputs) -> LoopbackGossip:
        return self._swarm.join(
            of.identity.peer_id, run_id=of.manifest.run_id, num_shards=of.manifest.wire.announcement_shards
        )
