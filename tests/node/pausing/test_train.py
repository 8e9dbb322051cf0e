"""The train loop after a pause, with workers that tests script."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.errors import DiskFullError
from ftis_node.learner.messages import LearnerState, StepReport, TrainReply
from ftis_node.node.context import NodeState
from ftis_node.node.pausing.gate import PauseGate
from ftis_node.node.pausing.policy import Decision
from ftis_node.node.protocols import NullLearner
from ftis_node.node.startup.recovery import replace_files
from ftis_node.node.storage.disk_space import DiskSpace
from ftis_node.node.supervision.background import DiskThread
from ftis_node.node.training.step_gate import StepSelection
from ftis_node.node.wiring import Wiring
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.reputation import Behaviour
from ftis_node.workers.weight_store import PublishedWeights, WeightProof
from tests.node.nodes import buffer_of, components, events_of, notes_of
from tests.replay.test_buffer import ANN, ME, accepted
from tests.waiting import eventually


class Learner(NullLearner):
    """A learner at `step`, of which the test sets another."""

    step = 5

    def __init__(self) -> None:
        super().__init__(parameters=1)

    async def start(self) -> LearnerState:
        weights = PublishedWeights(version=self.step, path="", num_bytes=0)
        proof = WeightProof(version=self.step, probe_ids=(), logprobs=())
        return LearnerState(self.step, self.step, parameters=1, trainable_parameters=1, proof=proof, weights=weights)


async def pause(gate: PauseGate, *, is_in_effect: bool) -> None:
    """Begin a pause and end it."""
    await gate.begin(Decision("by command"))
    if is_in_effect:
        gate.take_effect()
    gate.end()


@pytest.mark.timeout(60)
async def test_the_node_follows_a_learner_that_lost_steps_in_a_pause_before_it_has_groups(tmp_path: Path) -> None:
    """With the version of the lost steps all own groups would be stale, and no step would ever start."""
    delivered: list[int] = []

    async def deliver(weights: PublishedWeights, proof: Any) -> None:
        delivered.append(weights.version)

    with components(tmp_path, learner=Learner(), state=NodeState(step=5, policy_version=5)) as node:
        wiring = Wiring(node)
        loop = wiring.train_loop(wiring.step_gate(), last_step=None, deliver=deliver)
        running = asyncio.create_task(loop.run())
        await eventually(lambda: buffer_of(node).reconciled == [5])
        await asyncio.sleep(0.1)
        await pause(node.context.pause, is_in_effect=False)
        await asyncio.sleep(0.1)
        assert buffer_of(node).reconciled == [5], "the workers are the same"
        node.learner.step = 3  # type: ignore[attr-defined]
        await pause(node.context.pause, is_in_effect=True)
        await eventually(lambda: (loop.step, node.context.state.policy_version) == (3, 3))
        await asyncio.sleep(0.6)
        assert (buffer_of(node).reconciled, delivered) == ([5, 3], [5, 3])
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.timeout(60)
async def test_groups_of_steps_that_a_pause_lost_are_kept_at_the_next_start(tmp_path: Path) -> None:
    """The event log must say that they are READY again: otherwise the buffer looks as if it had lost commits."""

    async def deliver(weights: PublishedWeights, proof: Any) -> None:
        pass

    with components(tmp_path, learner=Learner(), state=NodeState(step=5, policy_version=5)) as node:
        node.context.events.write("start", peer="")
        wiring = Wiring(node)
        loop = wiring.train_loop(wiring.step_gate(), last_step=None, deliver=deliver)
        for number in (1, 2):
            node.store.buffer.admit(accepted(ANN, number), own=False)
        await StepSelection(node.context, node.store, node.peers).take(5, own=0, foreign=2)
        node.store.buffer.release_step(5, ReleaseReason.TRAINED)
        running = asyncio.create_task(loop.run())
        await eventually(lambda: buffer_of(node).reconciled == [5])
        await asyncio.sleep(0.1)
        node.learner.step = 4  # type: ignore[attr-defined]
        await pause(node.context.pause, is_in_effect=True)
        await eventually(lambda: node.store.reader.ready_counts() == (0, 2))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert [event["step"] for event in events_of(node, "step_lost")] == [5]
    replace_files(Home(tmp_path))
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_in_effect", [True, False])
async def test_a_pause_ends_a_step_that_waits_for_disk_space(tmp_path: Path, *, is_in_effect: bool) -> None:
    async def deliver(weights: PublishedWeights, proof: Any) -> None:
        pass

    space, learner = DiskSpace(root=tmp_path), FullDiskLearner()
    parts = {"learner": learner, "space": space, "disk": DiskThread(space)}
    with components(tmp_path, state=NodeState(step=5, policy_version=5), **parts) as node:
        for number in range(1, 9):
            node.store.buffer.admit(accepted(ME, number), own=True)
            node.store.buffer.admit(accepted(ANN, number), own=False)
        wiring = Wiring(node)
        loop = wiring.train_loop(wiring.step_gate(), last_step=None, deliver=deliver)
        running = asyncio.create_task(loop.run())
        await eventually(lambda: space.why_full == "weights 6 cannot be written")
        assert node.store.reader.ready_counts() != (8, 8)
        await asyncio.wait_for(node.context.pause.begin(Decision("by command")), 30)
        await asyncio.sleep(0.1)
        assert buffer_of(node).reconciled == [5] and not running.done()
        if is_in_effect:
            node.context.pause.take_effect()
        node.context.pause.end()
        await eventually(lambda: buffer_of(node).reconciled == [5, 5])
        assert [event["step"] for event in events_of(node, "step_lost")] == [6]
        assert learner.killed == ([] if is_in_effect else ["interrupted step"])
        await eventually(lambda: space.why_full)  # the same step again, with its groups
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class DoneLearner(FullDiskLearner):
    """A learner that does each step, and cannot unpack the first group of a peer."""

    async def train(self, groups: Any, **how: Any) -> TrainReply:
        self.step += 1
        unreadable = next(group.group_id for group in groups if not group.own)
        return TrainReply(StepReport(step=self.step, policy_version=self.step, num_updates=1, unreadable=(unreadable,)))


@pytest.mark.timeout(60)
async def test_a_pause_between_a_step_and_its_last_write_loses_no_credit_or_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deliver(weights: PublishedWeights, proof: Any) -> None:
        pass

    def release_step(step: int, reason: ReleaseReason) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    space = DiskSpace(root=tmp_path)
    parts = {"learner": DoneLearner(), "space": space, "disk": DiskThread(space)}
    with components(tmp_path, state=NodeState(step=5, policy_version=5), **parts) as node:
        for number in range(1, 5):
            node.store.buffer.admit(accepted(ME, number), own=True)
            node.store.buffer.admit(accepted(ANN, number), own=False)
        monkeypatch.setattr(node.store.buffer, "release_step", release_step)
        wiring = Wiring(node)
        loop = wiring.train_loop(wiring.step_gate(), last_step=None, deliver=deliver)
        running = asyncio.create_task(loop.run())
        await eventually(lambda: space.why_full)
        await asyncio.wait_for(node.context.pause.begin(Decision("by command")), 30)
        node.context.pause.take_effect()
        node.context.pause.end()
        await eventually(lambda: buffer_of(node).reconciled == [5, 6])
        behaviors = [behaviour for peer_id, behaviour, _ in notes_of(node) if peer_id == ANN.peer_id]
        assert behaviors == [Behaviour.CONTRIBUTED] * (len(behaviors) - 1) + [Behaviour.FAULT] and len(behaviors) > 1
        assert events_of(node, "step_lost") == []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
