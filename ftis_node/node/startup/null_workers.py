"""Null objects for the workers that a node's role lacks: they keep the protocol and do nothing.

So the loops and the status need not ask for their role. `daemon.py` lists the loops of each role. A call that only a
missing loop would make raises an error that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ftis_node.errors import FtisError
from ftis_node.learner.messages import LearnerState
from ftis_node.workers.weights.store import WeightProof

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
    from ftis_node.generation.weight_loader import ProofToCome
    from ftis_node.learner.client import OnPublished
    from ftis_node.learner.messages import AuditReply, TrainGroup, TrainReply
    from ftis_node.records.envelope import PeerRecord
    from ftis_node.workers.weights.store import PublishedWeights

OFF = "off"


class NullGeneration:
    """The generation of a learner node, which others do. Keeps the protocol `parts.Generation`."""

    engine = OFF
    state = OFF
    hand_over = ""
    is_alive = False
    restarts = 0
    tokens_per_s = 0.0

    def __init__(self, newest_version: Callable[[], int]) -> None:
        """`newest_version` is what those who generate for this node are offered."""
        self._newest_version = newest_version

    @property
    def policy_version(self) -> int:
        """The newest version that this node's generators could serve."""
        return self._newest_version()

    @property
    def newest(self) -> NullGeneration:
        """Nobody answers evaluations here."""
        return self

    async def start(self) -> None:
        """Nothing to start."""

    async def run(self) -> None:
        """Nothing to watch over."""

    async def stop(self) -> None:
        """Nothing to end."""

    async def sleep(self, *, discard: bool = False) -> None:
        """It takes no memory."""

    async def wake(self) -> None:
        """It needs none."""

    async def update_weights(self, weights: PublishedWeights, proof: ProofToCome | WeightProof | None = None) -> None:
        """Nobody here to serve them."""

    async def try_weights(self, weights: PublishedWeights, proof: WeightProof) -> None:
        """Nobody here to serve them."""

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        """Raise FtisError: the generate loop does not run in this role."""
        _refuse("generates nothing")


class NullLearner:
    """The learner of a generator node, which is elsewhere. Keeps the protocol `parts.Learning`."""

    worker_state = OFF
    restarts = 0

    def __init__(self, parameters: int) -> None:
        """`parameters` of the model that the node generates with."""
        self._state = LearnerState(
            step=0,
            policy_version=0,
            parameters=parameters,
            trainable_parameters=0,
            proof=WeightProof(version=0, probe_ids=(), logprobs=()),
        )

    @property
    def state(self) -> LearnerState:
        """No step was done; the model is as it came."""
        return self._state

    async def start(self) -> LearnerState:
        """Nothing to start."""
        return self._state

    async def run(self) -> None:
        """Nothing to watch over."""

    async def stop(self) -> None:
        """Nothing to end."""

    def restart(self, how: str) -> None:
        """Nothing to restart."""

    async def train(
        self, groups: Sequence[TrainGroup], *, step: int, on_published: OnPublished | None = None
    ) -> TrainReply:
        """Raise FtisError: the train loop does not run in this role."""
        _refuse("trains nothing")

    async def check(self, group: TrainGroup) -> None:
        """Nobody here to compare with."""

    async def audit(self, group: TrainGroup) -> AuditReply:
        """Raise FtisError: the audit loop does not run in this role."""
        _refuse("audits nothing")

    async def give_memory_back(self) -> None:
        """It has none."""

    async def write_weights(self, refused: str = "") -> PublishedWeights | None:
        """It has none."""
        return None

    async def save(self) -> int:
        """Nothing to save: the model is as it came."""
        return 0


class NullBackfill:
    """The pull loop of a generator node, which has no use for others' groups."""

    async def catch_up(self, peer_id: str) -> None:
        """Nothing was missed."""

    def note_record(self, record: PeerRecord) -> None:
        """No tail is missing."""


def _refuse(what: str) -> NoReturn:
    raise FtisError(f"a node of this role {what}")
