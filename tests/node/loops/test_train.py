"""The train loop's reaction to a step's report and the learner's state: behavior of peers, groups, progress."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from ftis_node.config.manifest import RunManifest, parse_manifest
from ftis_node.errors import ModelError, WorkerCrashedError, WorkerDiedError, WorkerError, WorkerTaskError
from ftis_node.learner.messages import LearnerState, StepReport, TrainReply
from ftis_node.learner.senders import SenderStats
from ftis_node.node.context import NodeState
from ftis_node.node.loops.train import TrainLoop, WeightSync, update_engine
from ftis_node.node.peers.peer_registry import RECENT_STEPS
from ftis_node.node.training.step_groups import take_groups
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.node.worker_interfaces import NullGeneration, NullLearner
from ftis_node.records.identity import Identity
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.swarm.reputation import Behaviour
from ftis_node.telemetry.status import EvalStatus
from ftis_node.workers.weight_store import PublishedWeights, WeightProof
from tests.conftest import accept, make_group
from tests.node.nodes import ME, buffer_of, components, events_of, notes_of
from tests.node.support import manifest_text

HONEST, MALLORY = Identity.from_seed(bytes([1]) * 32), Identity.from_seed(bytes([2]) * 32)


def foreign(sender: Identity, number: int) -> StoredGroup:
    stored = StoredGroup.from_accepted(accept(make_group(sender), sender), own=False)
    return replace(stored, id=bytes([number]) * 32)


class Learner(NullLearner):
    """A learner that returns the same report for each step, after its failures."""

    def __init__(self, report: StepReport) -> None:
        super().__init__(parameters=1)
        self._report = report
        self.failures: list[WorkerError] = []

    async def train(self, groups: Any, **how: Any) -> TrainReply:
        if self.failures:
            raise self.failures.pop(0)
        return TrainReply(report=self._report)


@contextmanager
def loop_with(
    folder: Path, report: StepReport, *, step: int = 0, manifest: RunManifest | None = None
) -> Iterator[tuple[TrainLoop, NodeComponents]]:
    state = NodeState(step=step, policy_version=step)
    with components(folder, learner=Learner(report), state=state, manifest=manifest) as node:
        wiring = Wiring(node)
        yield wiring.train_loop(wiring.step_gate(), last_step=None), node


def behavior_of(node: NodeComponents) -> list[tuple[str, Behaviour]]:
    return [(peer_id, behaviour) for peer_id, behaviour, _ in notes_of(node)]


async def test_a_sender_that_understates_is_charged_and_an_honest_one_credited(tmp_path):
    groups = [foreign(HONEST, 1), foreign(MALLORY, 2)]
    report = StepReport(step=1, policy_version=1, num_updates=1, understated=(groups[1].id.hex(),))
    with loop_with(tmp_path, report) as (loop, node):
        await loop._train(groups)
        assert behavior_of(node) == [(HONEST.peer_id, Behaviour.CONTRIBUTED), (MALLORY.peer_id, Behaviour.FALSE_CLAIM)]
        assert len(events_of(node, "understated")) == 1
        of_sender = node.peers.registry.seen(MALLORY.peer_id).refused
        assert node.context.counters.refused == of_sender == {"understated_logprobs": 1}
        assert buffer_of(node).released == [(1, ReleaseReason.TRAINED)]


async def test_the_sender_of_a_body_that_the_learner_cannot_unpack_is_charged_once(tmp_path):
    groups = [foreign(HONEST, 1), foreign(MALLORY, 2)]
    report = StepReport(step=1, policy_version=1, num_updates=1, unreadable=(groups[1].id.hex(),))
    with loop_with(tmp_path / "a", report) as (loop, node):
        await loop._train(groups)
        assert behavior_of(node) == [(HONEST.peer_id, Behaviour.CONTRIBUTED), (MALLORY.peer_id, Behaviour.FAULT)]
        loop.step_peers.settle(report, groups, is_trained=True)  # as of a step that the learner lost and repeats
        assert behavior_of(node).count((MALLORY.peer_id, Behaviour.FAULT)) == 1
    with loop_with(tmp_path / "b", msgspec.structs.replace(report, repeated=True)) as (loop, node):
        await loop._train(groups)
        assert (MALLORY.peer_id, Behaviour.FAULT) not in behavior_of(node)


async def test_a_step_without_an_update_credits_no_sender(tmp_path):
    with loop_with(tmp_path, StepReport(step=1, policy_version=0, refused="the loss is not finite")) as (loop, node):
        await loop._train([foreign(HONEST, 1)])
        assert (notes_of(node), buffer_of(node).released) == ([], [(1, ReleaseReason.REFUSED)])


CRASH, REPORTED = WorkerCrashedError("the learner worker was ended by SIGSEGV"), WorkerTaskError("IndexError: 7")
KILLED, SHORT = WorkerDiedError("the learner worker was killed by SIGKILL"), WorkerTaskError("CUDA out of memory")


@pytest.mark.parametrize(
    ("errors", "senders", "num_charged"),
    [
        ((CRASH, CRASH, REPORTED), (HONEST,), 2),
        ((KILLED, CRASH, CRASH), (HONEST,), 0),  # the kernel kills for memory
        ((SHORT, CRASH, CRASH), (HONEST,), 0),
        ((CRASH, CRASH, CRASH), (HONEST, MALLORY), 0),  # one of two, nobody knows which
    ],
)
async def test_only_the_sender_that_must_have_broken_the_learner_is_charged(tmp_path, errors, senders, num_charged):
    with loop_with(tmp_path, StepReport(step=1, policy_version=1)) as (loop, node):
        for number in (1, 2):
            for sender in senders:
                node.store.buffer.admit(accept(make_group(sender, number=number), sender), own=False)
        loop.learner.failures = list(errors)
        for _ in errors:
            await loop._train(await take_groups(loop, 1, own=0, foreign=4, disk=node.store.disk))
        assert len(events_of(node, "released")) == 2 * len(senders), "a group that stays would break the learner again"
        assert behavior_of(node) == [(HONEST.peer_id, Behaviour.FAULT)] * num_charged


async def test_failures_before_a_restart_charge_no_sender(tmp_path, monkeypatch):
    """Their causes are not on disk: the kernel may have killed the learner for memory each time."""
    report = StepReport(step=1, policy_version=1)
    with loop_with(tmp_path, report) as (loop, node):
        node.store.buffer.admit(accept(make_group(HONEST), HONEST), own=False)
        loop.learner.failures = [KILLED, KILLED, KILLED]
        for _ in range(2):
            await loop._train(await take_groups(loop, 1, own=0, foreign=1, disk=node.store.disk))
        groups = await take_groups(loop, 1, own=0, foreign=1, disk=node.store.disk)
        monkeypatch.setattr(loop.learner, "start", AsyncMock(side_effect=KILLED))
        with pytest.raises(WorkerDiedError):
            await loop._train(groups)
    with loop_with(tmp_path, report) as (loop, node):
        await loop.resume(await loop.learner.start())
        assert [event["reason"] for event in events_of(node, "released")] == ["poisoned"]
        assert behavior_of(node) == []


def test_steps_without_an_update_do_not_make_groups_older():
    state = NodeState()
    assert state.version_lag(8) == 8
    for version in (100, 100, 100, 110, 111):  # a learner that resumed at 100 and skipped nine steps
        state.go_to(version)
    assert [state.version_lag(number) for number in (0, 1, 2, 3)] == [0, 1, 11, 12]
    state.go_to(110)  # the learner died and lost an update
    assert [state.version_lag(number) for number in (0, 1, 2)] == [0, 10, 11]


async def test_a_group_that_is_one_update_old_stays_after_skipped_steps(tmp_path):
    with loop_with(tmp_path, StepReport(step=110, policy_version=110, num_updates=1)) as (loop, node):
        proof = WeightProof(version=100, probe_ids=(1, 2), logprobs=(-1.0,))
        await loop.resume(LearnerState(100, 100, parameters=1, trainable_parameters=1, proof=proof))
        for number, version in ((1, 100), (2, 80)):
            node.store.buffer.admit(accept(make_group(ME, number=number, versions=(version, version)), ME), own=True)
        for step in range(101, 110):
            await loop.reporter.note(StepReport(step=step, policy_version=100, skipped="no signal"))
        await loop.reporter.note(StepReport(step=110, policy_version=110, num_updates=1))
        assert [one.policy_version for one in await node.store.release_stale()] == [80]


async def test_the_node_follows_a_learner_that_fell_back(tmp_path):
    with loop_with(tmp_path, StepReport(step=1, policy_version=1), step=5) as (loop, node):
        proof = WeightProof(version=2, probe_ids=(1, 2), logprobs=(-1.0,))
        for evaluated in (0, 3, 5):
            node.context.evaluations.add(EvalStatus(step=evaluated, task="sums", pass_at_1=0.5, n=8))
        await loop.resume(LearnerState(3, 2, parameters=1, trainable_parameters=1, proof=proof))
        assert (loop.step, node.context.state.saved_step, node.context.state.policy_version) == (3, 3, 2)
        assert buffer_of(node).reconciled == [3]
        assert [one.step for one in node.context.evaluations.entries] == [0, 3], "step 5 is evaluated again"
        assert node.context.state.last_reused_version == 6, (
            "weights 6 may have been offered before their step was noted"
        )


async def test_a_step_that_the_learner_lost_and_repeats_counts_once(tmp_path):
    with loop_with(tmp_path, StepReport(step=1, policy_version=1, num_updates=1)) as (loop, node):
        for groups in ([foreign(HONEST, 1)], [foreign(HONEST, 1), foreign(MALLORY, 2)]):
            await loop._train(groups)
            await loop.resume(await loop.learner.start())  # at step 0, as after a death
        assert behavior_of(node) == [(HONEST.peer_id, Behaviour.CONTRIBUTED), (MALLORY.peer_id, Behaviour.CONTRIBUTED)]


async def test_a_step_whose_last_update_was_not_done_credits_its_senders(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    report = StepReport(step=1, policy_version=1, num_updates=1, unfinished="update 2 of 2 was not done: stopped")
    with loop_with(tmp_path, report) as (loop, node):
        await loop._train([foreign(HONEST, 1)])
        assert behavior_of(node) == [(HONEST.peer_id, Behaviour.CONTRIBUTED)]
        assert buffer_of(node).released == [(1, ReleaseReason.TRAINED)]
        assert "step 1 ended after update 1: update 2 of 2 was not done: stopped" in caplog.text
        assert "changed nothing" not in caplog.text


async def test_a_step_event_has_the_statistics_of_each_sender(tmp_path):
    """The event has all senders. The rows of peers have their last steps."""
    own_stats = SenderStats("me", True, groups=4, completions=16, kept=16)
    peer_stats = SenderStats(
        HONEST.peer_id, False, groups=2, groups_with_signal=1, completions=8, negatives=4, kept=6, kept_negatives=2,
        trained=4, weight_sum=4.0, weight_square_sum=8.0,
    )  # fmt: skip
    other_stats = SenderStats("", False, groups=9)
    report = StepReport(step=1, policy_version=1, num_updates=1, by_sender=(own_stats, peer_stats, other_stats))
    with loop_with(tmp_path, report) as (loop, node):
        node.peers.registry.seen(MALLORY.peer_id)
        seen_at = node.peers.registry.entry(HONEST.peer_id).last_seen
        for _ in range(RECENT_STEPS + 5):
            await loop.reporter.note(report)
        steps = events_of(node, "step")
        assert [each["sender"] for each in steps[0]["by_sender"]] == ["me", HONEST.peer_id, ""]
        assert steps[0]["by_sender"][1]["weight_square_sum"] == 8.0
        assert set(node.peers.registry.peers) == {HONEST.peer_id, MALLORY.peer_id}
        assert node.peers.registry.entry(HONEST.peer_id).last_seen == seen_at, (
            "training on a group changes when its sender was last seen"
        )
        row = node.peers.registry.peers[HONEST.peer_id].as_dict()["training"]
        assert (row["steps"], row["groups"], row["completions"]) == (RECENT_STEPS, 2 * RECENT_STEPS, 8 * RECENT_STEPS)
        assert (row["kept"], row["kept_negatives"], row["signal"], row["ess"]) == (0.75, 0.5, 0.5, 0.5)
        assert row["effective"] == 0.25
        assert node.peers.registry.peers[MALLORY.peer_id].as_dict()["training"] is None


async def test_groups_of_a_peer_that_disagrees_weigh_less_from_the_next_step_on(tmp_path):
    agreement = {HONEST.peer_id: 0.5, MALLORY.peer_id: -0.5}
    report = StepReport(step=1, policy_version=1, num_updates=1, agreement=agreement, own_agreement=0.5)
    run = parse_manifest(manifest_text(foreign_wait_s=1), source="test")
    run = run.model_copy(update={"method": run.method.model_copy(update={"peer_weights": "agreement"})})
    with loop_with(tmp_path, report, manifest=run) as (loop, node):
        groups = [foreign(HONEST, 1), foreign(MALLORY, 2)]
        weights = []
        for _ in range(4):
            weights.append([each.weight for each in loop.step_peers.batch(groups)])
            await loop._train(groups)
        assert weights == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.02], [1.0, 0.02]]
        assert len(events_of(node, "peer_weights")) == 4


class Generator(NullGeneration):
    """A generator that refuses some versions, as if their files were removed."""

    def __init__(self, refused: set[int]) -> None:
        self._served, self._refused = 0, refused
        super().__init__(lambda: self._served)

    async def update_weights(self, weights: PublishedWeights, proof: Any = None) -> None:
        if weights.version in self._refused:
            raise ModelError(f"weights {weights.version} are incomplete")
        self._served = weights.version


@pytest.mark.parametrize(("refused", "ends_at"), [({1, 3, 4, 5}, None), ({1, 2, 3}, 3)])
async def test_weights_that_a_restarted_learner_removed_end_the_node_only_if_none_were_served(
    tmp_path, refused, ends_at
):
    generation = Generator(refused)
    with components(tmp_path) as node:
        for version in range(1, 7):
            weights = PublishedWeights(version=version, path="", num_bytes=0)
            with pytest.raises(ModelError) if version == ends_at else nullcontext():
                await update_engine(weights, None, context=node.context, generation=generation)
        assert generation.policy_version == 6
        assert [event["version"] for event in events_of(node, "served")] == sorted({*range(1, 7)} - refused)


async def test_a_step_that_a_restarted_learner_repeats_is_delivered_once():
    """It died while the step waited for disk space, after its weights and their proof."""
    weights, proof = PublishedWeights(version=1, path="", num_bytes=0), WeightProof(1, (1, 2), (-1.0,))
    delivered: list[Any] = []

    async def deliver(weights: PublishedWeights, proof: Any) -> None:
        delivered.append((weights, await proof))

    sync = WeightSync(deliver)
    for news in (weights, proof, weights, proof):
        sync.take(news)
    await sync.finish(TrainReply(report=StepReport(step=1, policy_version=1), weights=weights, proof=proof))
    assert delivered == [(weights, proof)]
