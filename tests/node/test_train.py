"""What the train loop makes of a step's report and of the learner's state: who is charged or credited, what goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.ipc.weights import WeightProof
from ftis_node.learner.messages import LearnerState, StepReport, TrainReply
from ftis_node.node.figures import Figures
from ftis_node.node.placement import Arrangement
from ftis_node.node.train import TrainLoop
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import StoredGroup
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.peer_guard import PeerGuard
from ftis_node.swarm.reputation import Conduct
from ftis_node.telemetry.tracking import Tracking
from tests.conftest import PROMPT_IDS, make_group
from tests.node.support import MANIFEST

HONEST, LIAR = Identity.from_seed(bytes([1]) * 32), Identity.from_seed(bytes([2]) * 32)


def foreign(sender: Identity, number: int) -> StoredGroup:
    group = make_group(sender)
    return StoredGroup(
        bytes([number]) * 32, own=False, group=group, rewards=group.rewards, prompt_ids=tuple(PROMPT_IDS)
    )


@dataclass
class Told:
    """What the loop told the other parts of the node."""

    notes: list[tuple[str, Conduct]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    released: list[tuple[int, ReleaseReason]] = field(default_factory=list)
    reconciled: list[int] = field(default_factory=list)


def loop_with(report: StepReport, *, step: int = 0) -> tuple[Any, Any, Told]:
    """A loop after `step`, its parts, and what it tells them; the learner answers with `report`."""
    told = Told()

    async def train(groups: Any, **how: Any) -> TrainReply:
        return TrainReply(report=report)

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
        manifest=parse_manifest(MANIFEST.format(patience_s=1), source="test"),
        generation=SimpleNamespace(tokens_per_s=0.0),
        learner=SimpleNamespace(train=train),
        arrangement=Arrangement(takes_turns=False),
        disk=at_once,
        buffer=buffer,
        reader=SimpleNamespace(own_held=lambda: 0),
        slots=SimpleNamespace(hold=lambda held: None),
        figures=Figures(step=step, policy_version=step),
        identity=SimpleNamespace(peer_id="me"),
        peers=SimpleNamespace(note=lambda peer_id, conduct, **why: told.notes.append((peer_id, conduct))),
        events=SimpleNamespace(write=lambda event, **fields: told.events.append(event)),
        tracking=Tracking(()),
    )
    return TrainLoop(parts, gate=None, last_step=None), parts, told  # type: ignore[arg-type]


async def test_who_understates_is_charged_and_who_taught_is_credited() -> None:
    groups = [foreign(HONEST, 1), foreign(LIAR, 2)]
    report = StepReport(step=1, policy_version=1, num_updates=1, understated=(groups[1].id.hex(),))
    loop, parts, told = loop_with(report)
    await loop._train(groups)
    assert told.notes == [(HONEST.peer_id, Conduct.TAUGHT), (LIAR.peer_id, Conduct.LIED)]
    assert told.events.count("understated") == 1
    assert parts.figures.refused == parts.figures.peer(LIAR.peer_id).refused == {"understated": 1}
    assert told.released == [(1, ReleaseReason.TRAINED)]


async def test_a_lie_in_a_step_that_is_reported_again_is_charged_once() -> None:
    group = foreign(LIAR, 2)
    report = StepReport(step=1, policy_version=1, num_updates=1, understated=(group.id.hex(),), repeated=True)
    loop, parts, told = loop_with(report)
    await loop._train([group])
    assert (told.notes, told.events.count("understated"), dict(parts.figures.refused)) == ([], 0, {})


async def test_a_step_that_changed_nothing_credits_nobody() -> None:
    loop, _, told = loop_with(StepReport(step=1, policy_version=0, refused="the loss is not finite"))
    await loop._train([foreign(HONEST, 1)])
    assert told.notes == []
    assert told.released == [(1, ReleaseReason.REFUSED)]


async def test_a_learner_that_fell_back_is_followed() -> None:
    loop, parts, told = loop_with(StepReport(step=1, policy_version=1), step=5)
    proof = WeightProof(version=2, probe_ids=(1, 2), logprobs=(-1.0,))
    await loop.resume(LearnerState(3, 2, parameters=1, trainable_parameters=1, proof=proof))
    assert (loop.step, parts.figures.saved_step, parts.figures.policy_version) == (3, 3, 2)
    assert told.reconciled == [3]
    assert parts.figures.last_reused_version == 6, "weights 6 were offered before their step was noted"
