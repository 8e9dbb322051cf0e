"""The audit loop: the groups that it compares, and the consequences of a false claim."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.config.node import NodeSettings
from ftis_node.learner.messages import AuditReply, TrainGroup
from ftis_node.node.context import NodeState
from ftis_node.node.training.step_groups import TrainGroupBuilder
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.node.worker_interfaces import NullLearner
from ftis_node.records.codec import hash_prompt
from ftis_node.records.group import Completion
from ftis_node.records.identity import Identity
from ftis_node.swarm.reputation import Behaviour, TrustLevel
from ftis_node.validation import Accepted
from tests.conftest import accept, make_completion, make_group
from tests.node.nodes import ME, MODEL, components, events_of, notes_of

ANN = Identity.from_seed(bytes([2]) * 32)
REASON = "logprob_mismatch"


class Learner(NullLearner):
    """A learner that returns the same KL for each audit."""

    def __init__(self, kl: float | None) -> None:
        super().__init__(parameters=1)
        self.num_audits = 0
        self._kl = kl

    async def audit(self, group: TrainGroup) -> AuditReply:
        self.num_audits += 1
        return AuditReply(kl=self._kl, num_tokens=5)


async def audited(
    folder: Path,
    *offered: Accepted,
    kl: float | None = 0.0,
    version: int = 0,
    model: str = MODEL,
    prepare: Callable[[NodeComponents], object] = lambda node: None,
    dice: Callable[[], float] = lambda: 0.0,
    observation_form: tuple[int, ...] = (),
    **limits: Any,
) -> tuple[int, list[tuple[str, Behaviour, str]], list[str]]:
    """Offer groups to a node whose peers claim its weights; return the number of audits, noted conduct and events."""
    generation = {"engine_options": {"quantization": "fp8"}} if limits.pop("quantized", False) else {}
    settings = NodeSettings(model="m", validation={"audit_fraction": 1.0, **limits}, generation=generation)
    learner, state = Learner(kl), NodeState(policy_version=version)
    folder = Path(tempfile.mkdtemp(dir=folder))
    with components(folder, settings=settings, model=model, learner=learner, state=state) as node:
        prepare(node)
        loop: Any = Wiring(node).audit_loop
        loop.builder, loop.dice = TrainGroupBuilder("vertical", (), observation_form), SimpleNamespace(random=dice)
        num_noted = len(notes_of(node))
        for group in offered:
            loop.offer(group)
        while not loop._waiting.empty():
            await loop._audit(loop._waiting.get_nowait())
        if REASON in node.context.counters.refused:
            assert node.peers.registry.peers[ANN.peer_id].refused == {REASON: 1}
            assert node.store.reader.ready_counts() == (0, 0), "its group is still in the buffer"
        events = [event["event"] for event in events_of(node, "audited", "released", "audit_failed")]
        return learner.num_audits, notes_of(node)[num_noted:], events


def accepted(*, model: str = MODEL, version: int = 0, completions: tuple[Completion, ...] | None = None) -> Accepted:
    changes: dict[str, Any] = {} if completions is None else {"completions": completions}
    return accept(make_group(ANN, model=model, versions=(version, version), **changes), ANN)


async def test_a_false_claim_is_noted_and_counted_and_its_group_released(tmp_path):
    false_claim = accepted()
    _, noted, events = await audited(
        tmp_path, false_claim, kl=0.2, prepare=lambda node: node.store.buffer.admit(false_claim, own=False)
    )
    assert noted == [(ANN.peer_id, Behaviour.FALSE_CLAIM, REASON)]
    assert events == ["audited", "released"]


@pytest.mark.parametrize("kl", [0.05, None])
async def test_a_small_difference_or_no_measurement_is_no_false_claim(tmp_path, kl):
    num_audits, noted, events = await audited(tmp_path, accepted(), kl=kl)
    assert (num_audits, noted, events[1:]) == (1, [], [])


def followers(group: Accepted, *, of: Identity = ME) -> Accepted:
    return replace(group, group=replace(group.group, weights_of=of.peer_id))


def reused(version: int) -> Callable[[NodeComponents], None]:
    """Return a function that makes versions up to this one known as made again by a restarted learner."""

    def note(node: NodeComponents) -> None:
        node.context.state.last_reused_version = version

    return note


MEAN_ONLY = replace(make_completion(10, 11), mean_logprob=-1.0)
CLAIM = followers(accepted(model="any", version=3))


@pytest.mark.parametrize(
    ("group", "node", "num_audits"),
    [
        (accepted(), {}, 1), (accepted(model="org/other"), {}, 0), (accepted(version=1), {}, 0),
        (accepted(completions=(MEAN_ONLY, MEAN_ONLY)), {}, 0), (accepted(), {"version": 1}, 0),
        (accepted(), {"audit_fraction": 0.0}, 0), (CLAIM, {"version": 3}, 1), (CLAIM, {"version": 4}, 0),
        (followers(CLAIM, of=ANN), {"version": 3}, 0), (CLAIM, {"version": 3, "prepare": reused(2)}, 1),
        (CLAIM, {"version": 3, "prepare": reused(3)}, 0), (accepted(model="folder"), {"model": "folder"}, 0),
        (accepted(model="folder"), {"model": "folder", "audit_folders": True}, 1),
        (accepted(), {"quantized": True}, 0), (accepted(model=f"quantized {MODEL}"), {}, 0),
        (accepted(model=f"quantized {MODEL}"), {"quantized": True, "audit_folders": True}, 0),
    ],
)  # fmt: skip
async def test_only_groups_that_claim_the_nodes_weights_are_compared(tmp_path, group, node, num_audits):
    assert (await audited(tmp_path, group, **node))[0] == num_audits


@pytest.mark.parametrize(("form", "num_audits"), [((5, 6), 1), ((5,), 0), ((), 0)])
async def test_an_episode_is_compared_if_its_observations_have_the_same_form(tmp_path, form, num_audits):
    group = accepted()
    lengths = tuple((int(length),) for length in group.group.tokens.lengths)
    played = replace(
        group.group, turn_lengths=lengths, end_ids=(), prompt_hash=hash_prompt(group.prompt_ids, observation_form=form)
    )
    assert (await audited(tmp_path, replace(group, group=played), observation_form=(5, 6)))[0] == num_audits


def _make_known(node: NodeComponents) -> None:
    for _ in range(12):
        node.peers.note(ANN.peer_id, Behaviour.CONTRIBUTED)


def _put_on_probation(node: NodeComponents) -> None:
    while node.peers.trust_level(ANN.peer_id) is TrustLevel.GOOD:
        node.peers.note(ANN.peer_id, Behaviour.REFUSED)
    assert node.peers.trust_level(ANN.peer_id) is TrustLevel.PROBATION


async def test_every_claim_by_a_new_peer_is_compared(tmp_path):
    for prepare, share, num_audits in ((lambda node: None, 0.1, 2), (_make_known, 0.1, 0), (lambda node: None, 0.0, 0)):
        how: dict[str, Any] = {"version": 3, "audit_fraction": share, "prepare": prepare, "dice": lambda: 0.99}
        assert (await audited(tmp_path, CLAIM, CLAIM, **how))[0] == num_audits


async def test_a_fraction_is_drawn_and_all_groups_of_a_peer_on_probation(tmp_path):
    pair, share = (accepted(), accepted()), {"audit_fraction": 0.1}
    assert (await audited(tmp_path, *pair, dice=iter((0.05, 0.15)).__next__, **share))[0] == 1
    assert (await audited(tmp_path, *pair, dice=lambda: 0.99, prepare=_put_on_probation, **share))[0] == 2


async def test_the_number_of_waiting_audits_is_bounded(tmp_path):
    assert (await audited(tmp_path, *[accepted()] * 100))[0] == 8
