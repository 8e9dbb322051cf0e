"""The audit loop: the groups that it compares, and the consequences of a false claim."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.node import NodeSettings
from ftis_node.learner.messages import AuditReply, TrainGroup
from ftis_node.node.context import NodeState
from ftis_node.node.loops.audit import AuditLoop
from ftis_node.node.protocols import NullLearner
from ftis_node.node.wiring import NodeComponents
from ftis_node.records.envelope import seal_group
from ftis_node.records.group import Completion
from ftis_node.records.identity import Identity
from ftis_node.swarm.reputation import Behaviour, TrustLevel
from ftis_node.validation import Accepted
from tests.conftest import PROMPT_IDS, make_completion, make_group
from tests.node.nodes import ME, MODEL, components, events_of, notes_of
from tests.waiting import eventually

ANN = Identity.from_seed(bytes([2]) * 32)


class Learner(NullLearner):
    """A learner that returns the same KL for each audit."""

    def __init__(self, kl: float | None) -> None:
        super().__init__(parameters=1)
        self.num_audits = 0
        self._kl = kl

    async def audit(self, group: TrainGroup) -> AuditReply:
        self.num_audits += 1
        return AuditReply(kl=self._kl, num_tokens=5)


class FixedRandom(random.Random):
    """A generator that returns the given numbers; the last one repeats."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self._numbers = list(numbers)

    def random(self) -> float:
        return self._numbers.pop(0) if len(self._numbers) > 1 else self._numbers[0]


class Rig:
    """A node whose peers claim its weights; `num_audits`, `noted` and `events` show its reaction."""

    def __init__(self, node: NodeComponents, learner: Learner) -> None:
        self.node = node
        self.learner = learner

    @property
    def num_audits(self) -> int:
        return self.learner.num_audits

    @property
    def noted(self) -> list[tuple[str, Behaviour, str]]:
        return notes_of(self.node)

    @property
    def events(self) -> list[str]:
        return [event["event"] for event in events_of(self.node, "audited", "released", "audit_failed")]

    def loop(self, dice: random.Random | None = None) -> AuditLoop:
        node = self.node
        dice = dice or random.SystemRandom()
        return AuditLoop(node.context, node.learner, node.store, node.peers, node.gossip.guard, (), dice=dice)

    async def run(self, *offered: Accepted, dice: random.Random | None = None) -> None:
        loop, before = self.loop(dice), self.num_audits
        for group in offered:
            loop.offer(group)
        num_waiting = loop._waiting.qsize()
        num_finished, audit = 0, loop._audit

        async def audit_and_count(group: Accepted) -> None:
            nonlocal num_finished
            await audit(group)
            num_finished += 1

        loop._audit = audit_and_count  # type: ignore[method-assign]
        task = asyncio.create_task(loop.run())
        await eventually(lambda: num_finished == num_waiting)
        task.cancel()
        assert self.num_audits == before + num_waiting


MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Return a function that makes rigs, each in a separate folder."""
    with ExitStack() as stack:

        def make(kl: float | None, *, version: int = 0, model: str = MODEL, **limits: Any) -> Rig:
            settings = NodeSettings(model="m", validation={"audit_fraction": 1.0, **limits})
            folder, learner = Path(tempfile.mkdtemp(dir=tmp_path)), Learner(kl)
            node = components(
                folder, settings=settings, model=model, learner=learner, state=NodeState(policy_version=version)
            )
            return Rig(stack.enter_context(node), learner)

        yield make


def accepted(*, model: str = MODEL, version: int = 0, completions: tuple[Completion, ...] | None = None) -> Accepted:
    changes: dict[str, Any] = {} if completions is None else {"completions": completions}
    group = make_group(ANN, model=model, versions=(version, version), **changes)
    envelope = seal_group(group, ANN)
    return Accepted(envelope, envelope.to_bytes(), group, tuple(PROMPT_IDS))


async def test_a_false_claim_is_noted_and_counted_and_its_group_released(rig: MakeRig) -> None:
    made = rig(kl=0.2)
    false_claim = accepted()
    assert made.node.store.buffer.admit(false_claim, own=False)
    await made.run(false_claim)
    assert made.noted == [(ANN.peer_id, Behaviour.FALSE_CLAIM, "logprob_mismatch")]
    assert made.node.store.reader.ready_counts() == (0, 0), "its group is still in the buffer"
    assert (
        made.node.peers.counters.refused["logprob_mismatch"]
        == made.node.peers.registry.peers[ANN.peer_id].refused["logprob_mismatch"]
        == 1
    )
    assert made.events == ["audited", "released"]


@pytest.mark.parametrize("kl", [0.05, None])
async def test_a_small_difference_or_no_measurement_is_no_false_claim(rig: MakeRig, kl: float | None) -> None:
    made = rig(kl=kl)
    await made.run(accepted())
    assert made.num_audits == 1
    assert (made.noted, made.events[1:]) == ([], [])


async def test_only_groups_that_claim_the_nodes_weights_are_compared(rig: MakeRig) -> None:
    mean_only = replace(make_completion(10, 11), mean_logprob=-1.0)
    for group in (accepted(model="org/other"), accepted(version=1), accepted(completions=(mean_only, mean_only))):
        made = rig(kl=9.0)
        await made.run(group)
        assert made.num_audits == 0
    for made in (rig(kl=9.0, version=1), rig(kl=9.0, audit_fraction=0.0)):
        await made.run(accepted())
        assert made.num_audits == 0


async def test_a_followers_group_is_compared_with_the_version_that_it_names(rig: MakeRig) -> None:
    claim = accepted(model="any", version=3)
    claim = replace(claim, group=replace(claim.group, weights_of=ME.peer_id))
    for learner_version, num_audits in ((3, 1), (4, 0)):
        made = rig(kl=0.0, version=learner_version)
        await made.run(claim)
        assert made.num_audits == num_audits
    made = rig(kl=0.0, version=3)
    await made.run(replace(claim, group=replace(claim.group, weights_of=ANN.peer_id)))
    assert made.num_audits == 0


async def test_claims_of_a_version_that_a_restarted_learner_made_again_are_not_compared(rig: MakeRig) -> None:
    claim = accepted(model="any", version=3)
    claim = replace(claim, group=replace(claim.group, weights_of=ME.peer_id))
    for reused, num_audits in ((2, 1), (3, 0)):
        made = rig(kl=9.0, version=3)
        made.node.context.state.last_reused_version = reused
        await made.run(claim)
        assert made.num_audits == num_audits


async def test_every_claim_by_a_new_peer_is_compared(rig: MakeRig) -> None:
    claim = accepted(model="any", version=3)
    claim = replace(claim, group=replace(claim.group, weights_of=ME.peer_id))
    for is_new_peer, share, num_audits in ((True, 0.1, 2), (False, 0.1, 0), (True, 0.0, 0)):
        made = rig(kl=0.0, version=3, audit_fraction=share)
        for _ in range(0 if is_new_peer else 12):
            made.node.peers.note(ANN.peer_id, Behaviour.CONTRIBUTED)
        assert made.node.peers.is_new_peer(ANN.peer_id) is is_new_peer
        await made.run(claim, claim, dice=FixedRandom(0.99))
        assert made.num_audits == num_audits


async def test_models_in_folders_are_compared_only_if_the_setting_permits_it(rig: MakeRig) -> None:
    made = rig(kl=9.0, model="model")
    await made.run(accepted(model="model"))
    assert made.num_audits == 0
    made = rig(kl=9.0, model="model", audit_folders=True)
    await made.run(accepted(model="model"))
    assert made.num_audits == 1


async def test_a_fraction_is_drawn_and_all_groups_of_a_peer_on_probation(rig: MakeRig) -> None:
    dice = FixedRandom(0.05, 0.15, 0.99)
    made = rig(kl=0.0, audit_fraction=0.1)
    await made.run(accepted(), accepted(), dice=dice)
    assert made.num_audits == 1
    while made.node.peers.standing(ANN.peer_id) is TrustLevel.GOOD:
        made.node.peers.note(ANN.peer_id, Behaviour.REFUSED)
    assert made.node.peers.standing(ANN.peer_id) is TrustLevel.PROBATION
    await made.run(accepted(), dice=dice)
    assert made.num_audits == 2


async def test_the_number_of_waiting_audits_is_bounded(rig: MakeRig) -> None:
    made = rig(kl=0.0)
    await made.run(*[accepted()] * 100)
    assert made.num_audits == 8
