"""The train loop after a pause, with workers that tests script."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.errors import DiskFullError
from ftis_node.learner.messages import LearnerState, StepReport, TrainReply
from ftis_node.node.context import NodeState
from ftis_node.node.loops.train import TrainLoop
from ftis_node.node.pausing.gate import PauseGate
from ftis_node.node.pausing.policy import Decision
from ftis_node.node.protocols import NullLearner
from ftis_node.node.startup.recovery import rescue_files
from ftis_node.node.storage.disk_space import DiskSpace
from ftis_node.node.supervision.background import DiskThread
from ftis_node.node.training.step_gate import StepSelection
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.reputation import Behaviour
from ftis_node.workers.weight_store import PublishedWeights, WeightProof
from tests.node.nodes import buffer_of, components, events_of, notes_of
from tests.replay.test_buffer import ANN, ME, accepted
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(60)


class Learner(NullLearner):
    """A learner at `step`, of which the test sets another."""

    step = 5

    def __init__(self) -> None:
        super().__init__(parameters=1)

    async def start(self) -> LearnerState:
        weights = PublishedWeights(version=self.step, path="", num_bytes=0)
        proof = WeightProof(version=self.step, probe_ids=(), logprobs=())
        return LearnerState(self.step, self.step, parameters=1, trainable_parameters=1, proof=proof, weights=weights)


def at_step_5(folder: Path, learner: Learner, **parts: Any) -> AbstractContextManager[NodeComponents]:
    return components(folder, learner=learner, state=NodeState(step=5, policy_version=5), **parts)


async def pause(gate: PauseGate, *, is_in_effect: bool) -> None:
    """Begin a pause and end it."""
    await gate.begin(Decision("by command"))
    if is_in_effect:
        gate.take_effect()
    gate.end()


@asynccontextmanager
async def training(node: NodeComponents) -> AsyncIterator[tuple[TrainLoop, list[int]]]:
    """Run the train loop; yield it and the versions that it delivers, after its start."""
    delivered: list[int] = []

    async def deliver(weights: PublishedWeights, proof: Any) -> None:
        delivered.append(weights.version)

    wiring = Wiring(node)
    loop = wiring.train_loop(wiring.step_gate(), last_step=None, deliver=deliver)
    running = asyncio.create_task(loop.run())
    try:
        await eventually(lambda: buffer_of(node).reconciled == [5])
        await asyncio.sleep(0.1)
        yield loop, delivered
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def admit(node: NodeComponents, count: int) -> None:
    """Store this many own groups, and as many of a peer."""
    for number in range(1, count + 1):
        node.store.buffer.admit(accepted(ME, number), own=True)
        node.store.buffer.admit(accepted(ANN, number), own=False)


async def test_the_node_follows_a_learner_that_lost_steps_in_a_pause_before_it_has_groups(tmp_path):
    """With the version of the lost steps all own groups would be stale, and no step would ever start."""
    with at_step_5(tmp_path, Learner()) as node:
        async with training(node) as (loop, delivered):
            await pause(node.context.pause, is_in_effect=False)
            await asyncio.sleep(0.1)
            assert buffer_of(node).reconciled == [5], "the workers are the same"
            node.learner.step = 3
            await pause(node.context.pause, is_in_effect=True)
            await eventually(lambda: (loop.step, node.context.state.policy_version) == (3, 3))
            await asyncio.sleep(0.6)
            assert (buffer_of(node).reconciled, delivered) == ([5, 3], [5, 3])


async def test_groups_of_steps_that_a_pause_lost_are_kept_at_the_next_start(tmp_path):
    """The event log must say that they are READY again: otherwise the buffer looks as if it had lost commits."""
    with at_step_5(tmp_path, Learner()) as node:
        node.context.events.write("start", peer="")
        for number in (1, 2):
            node.store.buffer.admit(accepted(ANN, number), own=False)
        await StepSelection(node.context, node.store, node.peers).take(5, own=0, foreign=2)
        node.store.buffer.release_step(5, ReleaseReason.TRAINED)
        async with training(node):
            node.learner.step = 4
            await pause(node.context.pause, is_in_effect=True)
            await eventually(lambda: node.store.reader.ready_counts() == (0, 2))
        assert [event["step"] for event in events_of(node, "step_lost")] == [5]
    rescue_files(Home(tmp_path))
    with components(tmp_path) as node:
        assert node.store.reader.ready_counts() == (0, 2), "the next start discards the buffer"


class FullDiskLearner(Learner):
    """A learner whose disk refuses the weights of step 6."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[str] = []

    async def train(self, groups: Any, **how: Any) -> TrainReply:
        raise DiskFullError("weights 6 cannot be written; free disk space")

    def restart(self, how: str) -> None:
        self.killed.append(how)


@pytest.mark.parametrize("is_in_effect", [True, False])
async def test_a_pause_ends_a_step_that_waits_for_disk_space(tmp_path, *, is_in_effect):
    space, learner = DiskSpace(root=tmp_path), FullDiskLearner()
    with at_step_5(tmp_path, learner, space=space, disk=DiskThread(space)) as node:
        admit(node, 8)
        async with training(node):
            await eventually(lambda: space.why_full == "weights 6 cannot be written")
            assert node.store.reader.ready_counts() != (8, 8)
            await asyncio.wait_for(node.context.pause.begin(Decision("by command")), 30)
            await asyncio.sleep(0.1)
            assert buffer_of(node).reconciled == [5]
            if is_in_effect:
                node.context.pause.take_effect()
            node.context.pause.end()
            await eventually(lambda: buffer_of(node).reconciled == [5, 5])
            assert [event["step"] for event in events_of(node, "step_lost")] == [6]
            assert learner.killed == ([] if is_in_effect else ["interrupted step"])
            await eventually(lambda: space.why_full)  # the same step again, with its groups


class DoneLearner(FullDiskLearner):
    """A learner that does each step, and cannot unpack the first group of a peer."""

    async def train(self, groups: Any, **how: Any) -> TrainReply:
        self.step += 1
        unreadable = next(group.group_id for group in groups if not group.own)
        return TrainReply(StepReport(step=self.step, policy_version=self.step, num_updates=1, unreadable=(unreadable,)))


async def test_a_pause_between_a_step_and_its_last_write_loses_no_credit_or_charge(tmp_path, monkeypatch):
    def release_step(step: int, reason: ReleaseReason) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    space = DiskSpace(root=tmp_path)
    with at_step_5(tmp_path, DoneLearner(), space=space, disk=DiskThread(space)) as node:
        admit(node, 4)
        monkeypatch.setattr(node.store.buffer, "release_step", release_step)
        async with training(node):
            await eventually(lambda: space.why_full)
            await asyncio.wait_for(node.context.pause.begin(Decision("by command")), 30)
            node.context.pause.take_effect()
            node.context.pause.end()
            await eventually(lambda: buffer_of(node).reconciled == [5, 6])
            behaviors = [behaviour for peer_id, behaviour, _ in notes_of(node) if peer_id == ANN.peer_id]
            assert behaviors == [Behaviour.CONTRIBUTED] * (len(behaviors) - 1) + [Behaviour.FAULT]
            assert len(behaviors) > 1
            assert events_of(node, "step_lost") == []
