"""The train loop after a pause, with workers that tests script."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.learner.messages import LearnerState
from ftis_node.node.context import NodeState
from ftis_node.node.loops.train import TrainLoop
from ftis_node.node.pausing import Decision, PauseGate
from ftis_node.node.startup.home_opening import replace_files
from ftis_node.node.training.step_groups import take_groups
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.node.worker_interfaces import NullLearner
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.workers.weight_store import PublishedWeights, WeightProof
from tests.node.nodes import buffer_of, components, events_of
from tests.replay.test_buffer import ANN, accepted
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


def at_step_5(folder: Path) -> AbstractContextManager[NodeComponents]:
    return components(folder, learner=Learner(), state=NodeState(step=5, policy_version=5))


async def pause(gate: PauseGate, *, is_in_effect: bool) -> None:
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


async def test_the_node_follows_a_learner_that_lost_steps_in_a_pause_before_it_has_groups(tmp_path):
    """With the version of the lost steps all own groups would be stale, and no step would ever start."""
    with at_step_5(tmp_path) as node:
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
    with at_step_5(tmp_path) as node:
        node.context.events.write("start", peer="")
        for number in (1, 2):
            node.store.buffer.admit(accepted(ANN, number), own=False)
        await take_groups(node, 5, own=0, foreign=2, disk=node.store.disk)
        node.store.buffer.release_step(5, ReleaseReason.TRAINED)
        async with training(node):
            node.learner.step = 4
            await pause(node.context.pause, is_in_effect=True)
            await eventually(lambda: node.store.reader.ready_counts() == (0, 2))
        assert [event["step"] for event in events_of(node, "step_lost")] == [5]
    replace_files(Home(tmp_path))
    with components(tmp_path) as node:
        assert node.store.reader.ready_counts() == (0, 2), "the next start discards the buffer"
