"""One device for both workers: the generator sleeps from before a step until it has new weights, or the step's end."""

from __future__ import annotations

import asyncio
import re
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import WorkerDiedError
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.ipc.weights import PublishedWeights, WeightProof
from ftis_node.lab.delay import NO_DELAY
from ftis_node.lab.in_process import InProcessGeneration, InProcessLearner, InProcessMakers
from ftis_node.learner.messages import LearnerState, StepReport, TrainReply
from ftis_node.node.build import built_parts
from ftis_node.node.figures import Figures
from ftis_node.node.node import run_loops
from ftis_node.node.placement import Arrangement
from ftis_node.node.plan import RunPlan
from ftis_node.node.train import TrainLoop
from ftis_node.swarm.peer_guard import PeerGuard
from ftis_node.telemetry.tracking import Tracking
from tests.node.support import MANIFEST
from tests.trained_models import trained_model

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = PublishedWeights(version=1, path="weights", num_bytes=1)
PROOF = WeightProof(version=1, probe_ids=(1, 2), logprobs=(-1.0,))
NEW = TrainReply(report=StepReport(step=1, policy_version=1, num_updates=1), weights=WEIGHTS, proof=PROOF)
NOTHING_NEW = TrainReply(report=StepReport(step=1, policy_version=0, refused="a loss was NaN"))
DIED = WorkerDiedError("the learner worker was killed")


class _Workers:
    """Generator and learner in one, and the order in which they are called; a train ends as it was told to."""

    tokens_per_s = 0.0

    def __init__(self, outcome: TrainReply | WorkerDiedError) -> None:
        self.calls: list[str] = []
        self._outcome = outcome

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def update_weights(self, weights: PublishedWeights, proof: WeightProof) -> None:
        self.calls.append("load")

    async def train(self, groups: Any, **how: Any) -> TrainReply:
        self.calls.append("train")
        if isinstance(self._outcome, WorkerDiedError):
            raise self._outcome
        return self._outcome

    async def start(self) -> LearnerState:
        self.calls.append("start")
        return LearnerState(0, 0, parameters=1, trainable_parameters=1, proof=PROOF)


async def _at_once(work: Any, *arguments: Any, **options: Any) -> Any:
    return work(*arguments, **options)


@pytest.mark.parametrize(
    ("outcome", "takes_turns", "calls"),
    [
        (NEW, True, ["sleep", "train", "load", "wake"]),
        (NOTHING_NEW, True, ["sleep", "train", "wake"]),
        (DIED, True, ["sleep", "train", "start", "wake"]),
        (NEW, False, ["train", "load"]),
    ],
)
async def test_the_order_of_a_step(outcome: TrainReply | WorkerDiedError, takes_turns: bool, calls: list[str]) -> None:
    workers = _Workers(outcome)
    nothing: Any = SimpleNamespace(
        release_step=lambda step, reason: None,
        prune=lambda **_: None,
        reconcile=lambda step, last_groups: 0,
        note_failed=lambda step: None,
        release_poisoned=list,
    )
    parts: Any = SimpleNamespace(
        guard=PeerGuard(),
        settings=NodeSettings(model="m", dtype="float32"),
        manifest=parse_manifest(MANIFEST.format(patience_s=1), source="test"),
        generation=workers,
        learner=workers,
        arrangement=Arrangement(takes_turns=takes_turns),
        disk=_at_once,
        buffer=nothing,
        reader=SimpleNamespace(own_held=lambda: 0),
        slots=SimpleNamespace(hold=lambda held: None),
        figures=Figures(),
        identity=SimpleNamespace(peer_id="me"),
        peers=SimpleNamespace(note=lambda peer_id, conduct: None),
        events=SimpleNamespace(write=lambda event, **fields: None),
        tracking=Tracking(()),
    )
    loop: Any = TrainLoop(parts, gate=None, last_step=None)  # type: ignore[arg-type]
    await loop._train_in_turn([])
    assert workers.calls == calls


class _Watched(InProcessMakers):
    """A node's engine and learner in this process; `asleep` has whether the engine slept in each step."""

    def __init__(self) -> None:
        super().__init__(LoopbackSwarm(), delay=NO_DELAY, seed=0)
        self.asleep: list[bool] = []
        self.tokens_in_step: list[int] = []

    def generation(self, of: Any) -> InProcessGeneration:
        self._generation = super().generation(of)
        return self._generation

    def learner(self, of: Any) -> InProcessLearner:
        learner = super().learner(of)
        train = learner.train

        async def watched(*arguments: Any, **options: Any) -> TrainReply:
            engine = self._generation._engines["newest"]
            before = engine.tokens_made
            await asyncio.sleep(0.1)  # long enough for a token, if it were awake
            self.asleep.append(engine.is_asleep)
            self.tokens_in_step.append(engine.tokens_made - before)
            return await train(*arguments, **options)

        learner.train = watched  # type: ignore[method-assign]
        return learner


@pytest.mark.timeout(120)
async def test_a_node_whose_workers_take_turns_does_its_steps(tmp_path: Path) -> None:
    shutil.copytree(trained_model("s", scale=0.01), tmp_path / "tiny")
    home, makers = Home(tmp_path / "home"), _Watched()
    home.create()
    settings = NodeSettings.model_validate(
        {
            "model": str(tmp_path / "tiny"),
            "engine": "torch",
            "device": "cpu",
            "memory": {"placement": "sleep"},
            "swarm": {"linger_s": 0.0},
        }
    )
    plan = RunPlan(parse_manifest(MANIFEST.format(patience_s=0.1), source="test"), "arithmetic", ())
    told: list[str] = []
    async with built_parts(settings, plan, home, makers, on_progress=lambda _, what: told.append(what)) as parts:
        assert told[0] == "looking for the model tiny"
        assert re.fullmatch(r"loading tiny \(0\.\d MB\) into generator and learner; connecting", told[-4])
        assert told[-1] == "", "nothing is waited for any more"
        await run_loops(parts, steps=3)
        assert parts.figures.step == 3
    assert (makers.asleep, makers.tokens_in_step) == ([True] * 3, [0] * 3)
