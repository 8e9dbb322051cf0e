"""The parts that the loops share, made once by `assemble.py` and handed to each loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ftis_node.generation.evaluate import Generator
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.node.loops.disk_space import Room
from ftis_node.node.training.token_budget import GenerateBudget
from ftis_node.swarm.pulling.domains import OwnDomain
from ftis_node.tasks import part_names
from ftis_node.telemetry.tracking import Tracking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings
    from ftis_node.generation.client import ProofToCome
    from ftis_node.gossip.interface import Gossip
    from ftis_node.learner.client import OnPublished
    from ftis_node.learner.messages import AuditReply, LearnerState, TrainGroup, TrainReply
    from ftis_node.models import ModelSource, PromptTokenizer
    from ftis_node.node.peers.confirmations import Confirmations
    from ftis_node.node.peers.manager import PeerBook
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.node.state import NodeCounters, NodeState
    from ftis_node.node.supervision.disk_thread import Disk
    from ftis_node.node.training.division import Division
    from ftis_node.node.training.evaluation import EvaluationHistory
    from ftis_node.node.training.slots import Slots
    from ftis_node.records.identity import Identity
    from ftis_node.replay.buffer import ReplayBuffer
    from ftis_node.replay.reader import ReplayReader
    from ftis_node.swarm.peer_guard import PeerGuard
    from ftis_node.tasks.base import Task
    from ftis_node.tasks.scoring.scorer import IsolatedScorer
    from ftis_node.telemetry.events import EventTrail
    from ftis_node.workers.weights.store import PublishedWeights, WeightProof


class Generation(Generator, Protocol):
    """What the loops want of generation: `generation.client.GenerationClient`, an engine in this process, or none.

    A `state` is a `WorkerState`, or "off" where the node has no such worker (`null_workers.py`).

    `newest` is what evaluations ask: the part itself, unless it serves old weights on purpose.
    """

    @property
    def engine(self) -> str: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def newest(self) -> Generator: ...
    @property
    def state(self) -> str: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def hand_over(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    @property
    def tokens_per_s(self) -> float: ...
    async def start(self) -> None: ...
    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    async def sleep(self, *, discard: bool = False) -> None: ...
    async def wake(self) -> None: ...
    async def update_weights(
        self, weights: PublishedWeights, proof: ProofToCome | WeightProof | None = None
    ) -> None: ...
    async def try_weights(self, weights: PublishedWeights, proof: WeightProof) -> None: ...


class Learning(Protocol):
    """What the loops want of the learner: `learner.client.LearnerClient`, a learner in this process, or none."""

    @property
    def worker_state(self) -> str: ...
    @property
    def state(self) -> LearnerState | None: ...
    @property
    def restarts(self) -> int: ...
    async def start(self) -> LearnerState: ...
    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    def restart(self, how: str) -> None: ...
    async def train(
        self, groups: Sequence[TrainGroup], *, step: int, on_published: OnPublished | None = None
    ) -> TrainReply: ...
    async def check(self, group: TrainGroup) -> None: ...
    async def audit(self, group: TrainGroup) -> AuditReply: ...
    async def give_memory_back(self) -> None: ...
    async def write_weights(self, refused: str = "") -> PublishedWeights | None: ...
    async def save(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a node consists of. Rooms do not know each other; the loops connect them.

    `task` is the run's, with all problems that a group may be about; `domain` has those that this node generates for:
    the same where it has no domain of its own.
    """

    settings: NodeSettings
    manifest: RunManifest
    home: Home
    identity: Identity
    name: str
    source: ModelSource
    tokenizer: PromptTokenizer
    task: Task
    domain: Task
    eval_tasks: tuple[Task, ...]
    scorer: IsolatedScorer
    strangers_scorer: IsolatedScorer
    generation: Generation
    evaluated: Generator
    learner: Learning
    gossip: Gossip
    buffer: ReplayBuffer
    reader: ReplayReader
    disk: Disk
    slots: Slots
    events: EventTrail
    state: NodeState
    counters: NodeCounters
    registry: PeerRegistry
    confirmations: Confirmations
    evaluations: EvaluationHistory
    peers: PeerBook
    arrangement: WorkerPlacement = WorkerPlacement()
    training: str = ""
    room: Room = field(default_factory=Room)
    budget: GenerateBudget = field(default_factory=GenerateBudget)
    tracking: Tracking = field(default_factory=Tracking)
    division: Division | None = None

    @property
    def guard(self) -> PeerGuard:
        """Catches what work for one peer raises."""
        return self.gossip.guard

    @property
    def domain_name(self) -> str:
        """The canonical SPEC of the node's domain; "" where it generates for the whole task."""
        return "" if self.domain is self.task else self.domain.name

    @property
    def own_domain(self) -> OwnDomain | None:
        """What is preferred of others' groups; None where the run or this node has no preference."""
        share = self.manifest.step.own_domain_fraction
        if share is None or not self.domain_name:
            return None
        return OwnDomain(part_names(self.domain_name), share)
