"""Interfaces of the two workers for the loops, and null objects for the workers that a node's role lacks.

So the loops and the status do not depend on the role. A method that only a missing loop calls raises FtisError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from ftis_node.errors import FtisError
from ftis_node.generation.client import OnPhase
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.generation.evaluate import Generator
from ftis_node.generation.weight_loader import ProofToCome
from ftis_node.learner.client import OnPublished
from ftis_node.learner.messages import AuditReply, LearnerState, TrainGroup, TrainReply
from ftis_node.workers.weight_store import PublishedWeights, WeightProof

OFF = "off"


class NullGeneration:
    """Null object for the generation worker of a learner node. Implements `Generation`."""

    engine = OFF
    worker_state = OFF
    weight_transfer = ""
    is_alive = False
    restarts = 0
    tokens_per_s = 0.0

    def __init__(self, newest_version: Callable[[], int]) -> None:
        """`newest_version` returns the newest version that this node offers to its generators."""
        self._newest_version = newest_version

    @property
    def policy_version(self) -> int:
        """Return the newest version that this node's generators can serve."""
        return self._newest_version()

    async def _do_nothing(self, *args: Any, **options: Any) -> None:
        """Do nothing: there is no worker to supervise, no GPU memory to free and no engine to update."""

    start = run = stop = sleep = wake = check_start = update_weights = try_weights = _do_nothing

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        raise FtisError("a node of this role generates nothing")


class NullLearner:
    """Null object for the learner worker of a generator node. Implements `Learning`."""

    worker_state = OFF
    restarts = 0

    def __init__(self, parameters: int) -> None:
        """`parameters` is the parameter count of the model that the node generates with."""
        self.state: LearnerState | None = LearnerState(
            step=0,
            policy_version=0,
            parameters=parameters,
            trainable_parameters=0,
            proof=WeightProof(version=0, probe_ids=(), logprobs=()),
        )

    async def start(self) -> LearnerState:
        """Return the state of the initial model at step 0."""
        assert self.state is not None
        return self.state

    async def _do_nothing(self, *args: Any, **options: Any) -> None:
        """Do nothing: there is no worker to supervise, no memory to free and no log-probs to compare."""

    run = stop = check = give_memory_back = _do_nothing

    async def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise FtisError("a node of this role trains nothing")

    train = audit = _refuse

    def restart(self, how: str) -> None:
        """Do nothing."""

    async def write_weights(self, refused: str = "") -> PublishedWeights | None:
        return None

    async def save(self) -> int:
        """Return step 0: there are no trained weights to save."""
        return 0


class Generation(Generator, Protocol):
    """Generation worker: `generation.client.GenerationClient`, an engine in this process, or a null object.

    `worker_state` is a `WorkerState`, or "off" if the node has no such worker.
    """

    @property
    def engine(self) -> str: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def worker_state(self) -> str: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def weight_transfer(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    @property
    def tokens_per_s(self) -> float: ...
    async def start(self, on_phase: OnPhase | None = None) -> None: ...
    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    async def sleep(self, *, discard: bool = False) -> None: ...
    async def wake(self) -> None: ...
    async def check_start(self, proof: WeightProof) -> None: ...
    async def update_weights(
        self, weights: PublishedWeights, proof: ProofToCome | WeightProof | None = None
    ) -> None: ...
    async def try_weights(self, weights: PublishedWeights, proof: WeightProof) -> None: ...


class Learning(Protocol):
    """Learner worker: `learner.client.LearnerClient`, a learner in this process, or a null object."""

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
