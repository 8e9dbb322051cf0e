"""What the train loop makes of a step's report and of the learner's state: who is charged or credited, what goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.learner.messages import LearnerState, StepReport, TrainReply
from ftis_node.learner.senders import SenderStats
from ftis_node.memory.placement import Arrangement
from ftis_node.node.loops.train import TrainLoop, train_group
from ftis_node.node.peers.registry import RECENT_STEPS
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import StoredGroup
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.peer_guard import PeerGuard
from ftis_node.swarm.reputation.score import Behaviour
from ftis_node.telemetry.tracking import Tracking
from ftis_node.workers.weights.store import WeightProof
from tests.conftest import PROMPT_IDS, make_group
from tests.node.bookkeeping import bookkeeping
from tests.node.support import manifest_text

HONEST, LIAR = Identity.from_seed(bytes([1]) * 32), Identity.from_seed(bytes([2]) * 32)


def foreign(sender: Identity, number: int) -> StoredGroup:
    group = make_group(sender)
    return StoredGroup(
        bytes([number]) * 32, own=False, group=group, rewards=group.rewards, prompt_ids=tuple(PROMPT_IDS)
    )


@dataclass
class Told:
    """What the loop told the other parts of the node."""

    notes: list[tuple[str, Behaviour]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    released: list[tuple[int, ReleaseReason]] = field(default_factory=list)
    reconciled: list[int] = field(default_factory=list)


def loop_with(report: StepReport, *, step: int = 0) -> tuple[Any, Any, Told]:
    """A loop after `step`, its parts, and what it tells them; the learner answers with `report`."""
    told = Told()

    async def train(groups: Any, **how: Any) -> TrainReply:
        return TrainReply(report=report)

    def write(event: str, **fields: Any) -> None:
        told.events.append(event)
        if event == "step":
            told.steps.append(fields)

    async def at_once(work: Any, *arguments: Any, **options: Any) -> Any:
        return work(*arguments, **options)

    buffer = SimpleNamespace(
        release_step=lambda step, reason: told.released.append((step, reason)),
        reconcile=lambda step, last_groups: told.reconciled.append(step) or 0,
        release_poisoned=list,
        prune=lambda **_: None,
    )
    parts: Any = SimpleNamespace(
        guard=PeerGuard(),
        settings=NodeSettings(model="m", dtype="float32"),
        manifest=parse_manifest(manifest_text(foreign_wait_s=1), source="test"),
        generation=SimpleNamespace(tokens_per_s=0.0),
        learner=SimpleNamespace(train=train),
        arrangement=Arrangement(takes_turns=False),
        disk=at_once,
        buffer=buffer,
        reader=SimpleNamespace(own_held=lambda: 0),
        slots=SimpleNamespace(hold=lambda held: None),
        **bookkeeping(step=step, policy_version=step),
        identity=SimpleNamespace(peer_id="me"),
        peers=SimpleNamespace(note=lambda peer_id, conduct, **why: told.notes.append((peer_id, conduct))),
        events=SimpleNamespace(write=write),
        tracking=Tracking(()),
    )
    return TrainLoop(parts, gate=None, last_step=None), parts, told  # type: ignore[arg-type]


async def test_who_understates_is_charged_and_who_taught_is_credited() -> None:
    groups = [foreign(HONEST, 1), foreign(LIAR, 2)]
    report = StepReport(step=1, policy_version=1, num_updates=1, understated=(groups[1].id.hex(),))
    loop, parts, told = loop_with(report)
    await loop._train(groups)
    assert told.notes == [(HONEST.peer_id, Behaviour.TAUGHT), (LIAR.peer_id, Behaviour.LIED)]
    assert told.events.count("understated") == 1
    assert parts.counters.refused == parts.registry.seen(LIAR.peer_id).refused == {"understated": 1}
    assert told.released == [(1, ReleaseReason.TRAINED)]


async def test_a_lie_in_a_step_that_is_reported_again_is_charged_once() -> None:
    group = foreign(LIAR, 2)
    report = StepReport(step=1, policy_version=1, num_updates=1, understated=(group.id.hex(),), repeated=True)
    loop, parts, told = loop_with(report)
    await loop._train([group])
    assert (told.notes, told.events.count("understated"), dict(parts.counters.refused)) == ([], 0, {})


async def test_a_step_that_changed_nothing_credits_nobody() -> None:
    loop, _, told = loop_with(StepReport(step=1, policy_version=0, refused="the loss is not finite"))
    await loop._train([foreign(HONEST, 1)])
    assert told.notes == []
    assert told.released == [(1, ReleaseReason.REFUSED)]


async def test_a_learner_that_fell_back_is_followed() -> None:
    loop, parts, told = loop_with(StepReport(step=1, policy_version=1), step=5)
    proof = WeightProof(version=2, probe_ids=(1, 2), logprobs=(-1.0,))
    await loop.resume(LearnerState(3, 2, parameters=1, trainable_parameters=1, proof=proof))
    assert (loop.step, parts.state.saved_step, parts.state.policy_version) == (3, 3, 2)
    assert told.reconciled == [3]
    assert parts.state.last_reused_version == 6, "weights 6 were offered before their step was noted"


async def test_a_step_says_what_each_sender_was_worth() -> None:
    """The event has all senders, the peers' rows those that are peers, over their last steps."""
    bins = (1, *[0] * 10)
    ours = SenderStats("me", True, groups=4, completions=16, kept=16)
    theirs = SenderStats(
        HONEST.peer_id, False, groups=2, groups_with_signal=1, completions=8, negatives=4, kept=6, kept_negatives=2,
        taught=4, weight_sum=4.0, weight_square_sum=8.0, positive_log_ratios=bins, negative_log_ratios=bins,
    )  # fmt: skip
    rest = SenderStats("", False, groups=9)
    report = StepReport(step=1, policy_version=1, num_updates=1, by_sender=(ours, theirs, rest))
    loop, parts, told = loop_with(report)
    parts.registry.seen(LIAR.peer_id)
    seen_at = parts.registry.entry(HONEST.peer_id).last_seen
    for _ in range(RECENT_STEPS + 5):
        await loop._note(report)
    assert [each["sender"] for each in told.steps[0]["by_sender"]] == ["me", HONEST.peer_id, ""]
    assert told.steps[0]["by_sender"][1]["negative_log_ratios"] == bins
    assert set(parts.registry.peers) == {HONEST.peer_id, LIAR.peer_id}
    assert parts.registry.entry(HONEST.peer_id).last_seen == seen_at, "a group that is trained is no sign of life"
    row = parts.registry.peers[HONEST.peer_id].as_dict()["teaching"]
    assert (row["steps"], row["groups"], row["completions"]) == (RECENT_STEPS, 2 * RECENT_STEPS, 8 * RECENT_STEPS)
    assert (row["kept"], row["kept_negatives"], row["signal"], row["ess"]) == (0.75, 0.5, 0.5, 0.5)
    assert row["teaches"] == 0.25
    assert parts.registry.peers[LIAR.peer_id].as_dict()["teaching"] is None


async def test_who_disagrees_counts_less_from_the_next_step_on() -> None:
    agreement = {HONEST.peer_id: 0.5, LIAR.peer_id: -0.5}
    report = StepReport(step=1, policy_version=1, num_updates=1, agreement=agreement, own_agreement=0.5)
    loop, parts, told = loop_with(report)
    parts.manifest = parts.manifest.model_copy(
        update={"method": parts.manifest.method.model_copy(update={"peer_weights": "agreement"})}
    )
    groups = [foreign(HONEST, 1), foreign(LIAR, 2)]
    weights = []
    for _ in range(4):
        weights.append([each.weight for each in loop._batch(groups)])
        await loop._train(groups)
    assert weights == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.02], [1.0, 0.02]]
    assert told.events.count("peer_weights") == 4


async def test_without_the_setting_nobody_counts_less() -> None:
    report = StepReport(step=1, policy_version=1, num_updates=1, agreement={LIAR.peer_id: -0.5}, own_agreement=0.5)
    loop, _, told = loop_with(report)
    for _ in range(4):
        await loop._train([foreign(LIAR, 2)])
    assert [each.weight for each in loop._batch([foreign(LIAR, 2)])] == [1.0]
    assert "peer_weights" not in told.events


def test_a_group_names_its_sender() -> None:
    assert train_group(foreign(HONEST, 1), share="vertical").sender == HONEST.peer_id
