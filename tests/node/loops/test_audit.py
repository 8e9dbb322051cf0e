"""The audit loop: whom it compares, and what becomes of who lied."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.config.admission import ValidationSection
from ftis_node.learner.messages import AuditReply
from ftis_node.node.loops.audit import AuditLoop
from ftis_node.node.state import NodeCounters, NodeState
from ftis_node.records.envelope import seal_group
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import PeerGuard
from ftis_node.swarm.reputation.score import Behaviour, TrustLevel
from ftis_node.validation import Accepted
from tests.conftest import make_completion, make_group

if TYPE_CHECKING:
    from ftis_node.records.group import Completion

ANN = Identity.from_seed(bytes([2]) * 32)
MODEL = "org/tiny"


OURS = "our learner"


class Rig:
    """The parts that the loop touches; `noted`, `released` and `events` are what it did."""

    def __init__(self, kl: float | None, *, version: int = 0, model: str = MODEL, **door: Any) -> None:
        self.noted: list[tuple[str, Behaviour, str]] = []
        self.released: list[bytes] = []
        self.events: list[str] = []
        self.asked = 0
        self.peer = SimpleNamespace(refused=Counter[str]())
        self.standing = TrustLevel.GOOD
        self.is_stranger = False
        self.parts: Any = SimpleNamespace(
            guard=PeerGuard(),
            arrangement=SimpleNamespace(takes_turns=False),
            identity=SimpleNamespace(peer_id=OURS),
            source=SimpleNamespace(name=model),
            settings=SimpleNamespace(validation=ValidationSection.model_validate({"audit_fraction": 1.0, **door})),
            manifest=SimpleNamespace(step=SimpleNamespace(prompt_sharing="vertical")),
            state=NodeState(policy_version=version),
            counters=NodeCounters(),
            registry=SimpleNamespace(seen=lambda peer_id: self.peer),
            events=SimpleNamespace(write=lambda name, **fields: self.events.append(name)),
            learner=SimpleNamespace(audit=self._reply),
            buffer=SimpleNamespace(release_audited=lambda group_id: not self.released.append(group_id)),
            disk=self._at_once,
            peers=SimpleNamespace(
                standing=lambda peer_id: self.standing,
                is_stranger=lambda peer_id: self.is_stranger,
                note=lambda peer_id, conduct, *, reason, detail: self.noted.append((peer_id, conduct, reason)),
            ),
        )
        self._kl = kl
        self.intake: Any = SimpleNamespace(on_foreign=None)

    async def _reply(self, group: object) -> AuditReply:
        self.asked += 1
        return AuditReply(kl=self._kl, num_tokens=5)

    async def _at_once(self, work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    async def run(self, *offered: Accepted, dice: Any = None) -> None:
        loop = AuditLoop(self.parts, self.intake, dice=dice)
        for accepted in offered:
            self.intake.on_foreign(accepted)
        task = asyncio.create_task(loop.run())
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()


def accepted(*, model: str = MODEL, version: int = 0, completions: tuple[Completion, ...] | None = None) -> Accepted:
    changes: dict[str, Any] = {} if completions is None else {"completions": completions}
    group = make_group(ANN, model=model, versions=(version, version), **changes)
    envelope = seal_group(group, ANN)
    return Accepted(envelope, envelope.to_bytes(), group, (1, 2))


async def test_who_lied_is_noted_counted_and_its_group_released() -> None:
    rig = Rig(kl=0.2)
    liar = accepted()
    await rig.run(liar)
    assert rig.noted == [(ANN.peer_id, Behaviour.LIED, "audit")]
    assert rig.released == [liar.envelope.id]
    assert (rig.parts.counters.refused["audit"], rig.peer.refused["audit"]) == (1, 1)
    assert rig.events == ["audited", "released"]


@pytest.mark.parametrize("kl", [0.05, None])
async def test_a_little_difference_and_no_measurement_accuse_nobody(kl: float | None) -> None:
    rig = Rig(kl=kl)
    await rig.run(accepted())
    assert rig.asked == 1
    assert (rig.noted, rig.released) == ([], [])


async def test_only_what_claims_our_very_weights_is_compared() -> None:
    mean_only = replace(make_completion(10, 11), mean_logprob=-1.0)
    for group in (accepted(model="org/other"), accepted(version=1), accepted(completions=(mean_only, mean_only))):
        rig = Rig(kl=9.0)
        await rig.run(group)
        assert rig.asked == 0
    for rig in (Rig(kl=9.0, version=1), Rig(kl=9.0, audit_fraction=0.0)):
        await rig.run(accepted())
        assert rig.asked == 0


async def test_a_followers_group_is_compared_with_the_version_that_it_names() -> None:
    of_ours = accepted(model="any", version=3)
    of_ours = replace(of_ours, group=replace(of_ours.group, weights_of=OURS))
    for learner_version, asked in ((3, 1), (4, 0)):
        rig = Rig(kl=0.0, version=learner_version)
        await rig.run(of_ours)
        assert rig.asked == asked
    rig = Rig(kl=0.0, version=3)
    await rig.run(replace(of_ours, group=replace(of_ours.group, weights_of=ANN.peer_id)))
    assert rig.asked == 0


async def test_a_version_that_a_restarted_learner_made_again_accuses_nobody() -> None:
    claim = accepted(model="any", version=3)
    claim = replace(claim, group=replace(claim.group, weights_of=OURS))
    for reused, asked in ((2, 1), (3, 0)):
        rig = Rig(kl=9.0, version=3)
        rig.parts.state.last_reused_version = reused
        await rig.run(claim)
        assert rig.asked == asked


async def test_every_claim_of_our_weights_by_a_stranger_is_compared() -> None:
    claim = accepted(model="any", version=3)
    claim = replace(claim, group=replace(claim.group, weights_of=OURS))
    dice = SimpleNamespace(random=lambda: 0.99)
    for is_stranger, share, asked in ((True, 0.1, 2), (False, 0.1, 0), (True, 0.0, 0)):
        rig = Rig(kl=0.0, version=3, audit_fraction=share)
        rig.is_stranger = is_stranger
        await rig.run(claim, claim, dice=dice)
        assert rig.asked == asked


async def test_a_folders_name_is_no_proof_of_its_weights() -> None:
    rig = Rig(kl=9.0, model="model")
    await rig.run(accepted(model="model"))
    assert rig.asked == 0
    rig = Rig(kl=9.0, model="model", audit_folders=True)
    await rig.run(accepted(model="model"))
    assert rig.asked == 1


async def test_a_share_is_drawn_and_of_the_watched_all() -> None:
    throws = iter([0.05, 0.15, 0.99])
    dice = SimpleNamespace(random=lambda: next(throws))
    rig = Rig(kl=0.0, audit_fraction=0.1)
    await rig.run(accepted(), accepted(), dice=dice)
    assert rig.asked == 1
    rig.standing = TrustLevel.WATCHED
    await rig.run(accepted(), dice=dice)
    assert rig.asked == 2


async def test_a_flood_leaves_no_more_than_a_few_waiting() -> None:
    rig = Rig(kl=0.0)
    await rig.run(*[accepted()] * 100)
    assert rig.asked == 8
