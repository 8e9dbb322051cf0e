"""One device for both workers: the generator sleeps during a step and wakes with new weights, or at the step's end."""

import asyncio
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.errors import EngineError, WorkerDiedError
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.in_process import InProcessGeneration, InProcessLearner, InProcessNodeFactory
from ftis_node.lab.experiment.specs import NO_DELAY
from ftis_node.learner.messages import LearnerState, StepReport, TrainReply
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.node.daemon import run_node
from ftis_node.node.loops.train import TrainLoop
from ftis_node.node.wiring import Wiring
from ftis_node.node.worker_interfaces import NullGeneration, NullLearner
from ftis_node.workers.weight_store import PublishedWeights, WeightProof
from tests.node.loops.test_train import HONEST, foreign
from tests.node.nodes import components, whole_node
from tests.trained_models import trained_model

WEIGHTS = PublishedWeights(version=1, path="weights", num_bytes=1)
PROOF = WeightProof(version=1, probe_ids=(1, 2), logprobs=(-1.0,))
NEW = TrainReply(report=StepReport(step=1, policy_version=1, num_updates=1), weights=WEIGHTS, proof=PROOF)
NOTHING_NEW = TrainReply(report=StepReport(step=1, policy_version=0, refused="a loss was NaN"))
DIED = WorkerDiedError("the learner worker was killed")


class _Generation(NullGeneration):
    def __init__(self, calls: list[str]) -> None:
        super().__init__(lambda: 0)
        self._calls = calls
        self.error: EngineError | None = None

    async def check_start(self, proof: WeightProof) -> None:
        self._calls.append(f"check of version {proof.version}")
        if self.error is not None:
            raise self.error

    async def sleep(self, *, discard: bool = False) -> None:
        self._calls.append("sleep, discarding" if discard else "sleep")

    async def wake(self) -> None:
        self._calls.append("wake")

    async def update_weights(self, weights: PublishedWeights, proof: Any = None) -> None:
        self._calls.append("load")


class _Learner(NullLearner):
    """A learner that records the order of its calls; `train` ends with `outcome`."""

    def __init__(self, outcome: TrainReply | WorkerDiedError, calls: list[str]) -> None:
        super().__init__(parameters=1)
        self._outcome = outcome
        self._calls = calls

    async def train(self, groups: Any, **how: Any) -> TrainReply:
        self._calls.append("train")
        if isinstance(self._outcome, WorkerDiedError):
            raise self._outcome
        return self._outcome

    async def start(self) -> LearnerState:
        self._calls.append("start")
        return LearnerState(0, 0, parameters=1, trainable_parameters=1, proof=PROOF)


@contextmanager
def _loop(
    folder: Path, outcome: TrainReply | WorkerDiedError, calls: list[str], *, takes_turns: bool = True
) -> Iterator[TrainLoop]:
    arrangement = WorkerPlacement(takes_turns=takes_turns)
    with components(
        folder, generation=_Generation(calls), learner=_Learner(outcome, calls), arrangement=arrangement
    ) as node:
        wiring = Wiring(node)
        yield wiring.train_loop(wiring.step_gate(), last_step=None)


@pytest.mark.parametrize(
    ("outcome", "takes_turns", "calls"),
    [
        (NEW, True, ["sleep", "train", "load", "wake"]), (NOTHING_NEW, True, ["sleep", "train", "wake"]),
        (DIED, True, ["sleep", "train", "start", "wake"]), (NEW, False, ["train", "load"]),
    ],
)  # fmt: skip
async def test_the_order_of_calls_in_a_step(tmp_path, outcome, takes_turns, calls):
    recorded: list[str] = []
    with _loop(tmp_path, outcome, recorded, takes_turns=takes_turns) as loop:
        await loop._train_in_turn([])
    assert recorded == calls


async def test_an_engine_that_computes_another_model_ends_the_node_before_the_first_step(tmp_path):
    recorded: list[str] = []
    with _loop(tmp_path, NEW, recorded) as loop:
        loop.generation.error = EngineError("the engine vllm differs from the learner")
        with pytest.raises(EngineError, match="differs from the learner"):
            await loop.run()
    assert recorded == ["start", "check of version 1"]


@pytest.mark.parametrize(("num_groups", "call"), [(1, "sleep, discarding"), (0, "sleep")])
async def test_weights_are_discarded_before_a_step_that_makes_new_ones(tmp_path, monkeypatch, num_groups, call):
    """A step without groups makes no new weights."""
    calls: list[str] = []

    async def train(loop, taken):
        calls.append(f"train on {len(taken)}")

    monkeypatch.setattr(TrainLoop, "_train", train)
    with _loop(tmp_path, NEW, calls) as loop:
        await loop._train_in_turn([foreign(HONEST, 1)] * num_groups)
    assert calls == [call, f"train on {num_groups}", "wake"]


class _WatchingFactory(InProcessNodeFactory):
    """A factory of engine and learner in this process; `asleep` records whether the engine slept in each step."""

    def __init__(self) -> None:
        super().__init__(LoopbackSwarm(), delay=NO_DELAY, seed=0)
        self.asleep: list[bool] = []
        self.tokens_in_step: list[int] = []

    def generation(self, of: Any, **parts: Any) -> InProcessGeneration:
        self._generation = super().generation(of, **parts)
        return self._generation

    def learner(self, of: Any, **parts: Any) -> InProcessLearner:
        learner = super().learner(of, **parts)
        train = learner.train

        async def watch_and_train(*arguments: Any, **options: Any) -> TrainReply:
            engine = self._generation._engines["newest"]
            before = engine.tokens_made
            await asyncio.sleep(0.1)  # an engine that is awake samples a token meanwhile
            self.asleep.append(engine.is_asleep)
            self.tokens_in_step.append(engine.tokens_made - before)
            return await train(*arguments, **options)

        learner.train = watch_and_train  # type: ignore[method-assign]
        return learner


@pytest.mark.timeout(120)
async def test_a_node_whose_workers_take_turns_trains(tmp_path):
    shutil.copytree(trained_model("s", scale=0.01), tmp_path / "tiny")
    home, factory = Home(tmp_path / "home"), _WatchingFactory()
    home.create()
    progress: list[str] = []
    options = {"memory": {"placement": "time_shared"}, "on_progress": lambda _, what: progress.append(what)}
    async with whole_node(home, tmp_path / "tiny", factory, **options) as parts:
        assert progress[0] == "looking for the model tiny"
        assert re.fullmatch(r"loading tiny \(\d+ kB\) into generator and learner; connecting", progress[-4])
        assert progress[-1] == "", "the node still waits for something"
        await run_node(parts, steps=2)
        assert parts.context.state.step == 2
    assert (factory.asleep, factory.tokens_in_step) == ([True] * 2, [0] * 2)
