"""Slots of groups, the order of prompts, and the conditions under which a step starts."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.stubs.stub_node import FINGERPRINT
from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.step import StepSection
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.node.loops.generate import PromptOrder
from ftis_node.node.training.generation_limits import GenerateBudget, SlotPool
from ftis_node.node.training.step_gate import RECHECK_INTERVAL_S, StepInputs, may_start
from ftis_node.node.training.step_shares import ForeignShortfall, substitute_foreign
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.records.envelope import PeerRecord
from ftis_node.records.identity import Identity
from tests.node.nodes import ME, components
from tests.node.support import manifest_text
from tests.replay.test_buffer import accepted

ANN = Identity.from_seed(bytes([2]) * 32)


async def test_no_more_groups_are_in_progress_than_there_are_slots():
    slots = SlotPool(3, held=1)
    await slots.charge()
    await slots.charge()
    third = asyncio.create_task(slots.charge())
    await asyncio.sleep(0)
    assert not third.done()
    slots.fill()
    await asyncio.sleep(0)
    assert not third.done(), "a stored group freed its slot"
    slots.set_held(1)
    await asyncio.wait_for(third, 30)
    assert slots.in_generation == 2


async def test_the_time_per_group_is_without_the_time_in_which_no_slot_is_free():
    now = 100.0
    slots = SlotPool(2, clock=lambda: now)
    assert slots.seconds_per_group == 0.0
    for _ in range(100):
        await slots.charge()
        assert slots.try_charge()
        now += 6.0  # both groups are generated side by side
        slots.fill()
        slots.fill()
        now += 1000.0  # the step waits
        slots.set_held(0)
    assert slots.seconds_per_group == pytest.approx(3.0, rel=0.05)
    await slots.charge()
    slots.cancel()
    assert slots.seconds_per_group == pytest.approx(3.0, rel=0.05)


def test_each_problem_of_a_data_file_comes_once_per_pass():
    order = PromptOrder(100, seed=0, peer_id="a")
    assert sorted(order.index(k) for k in range(100)) == list(range(100))
    assert sorted(order.index(k) for k in range(100, 200)) == list(range(100))
    assert [order.index(k) for k in range(100)] != [order.index(k) for k in range(100, 200)]


def test_each_node_has_its_order_and_repeats_it():
    first = [PromptOrder(2**31, seed=0, peer_id="a").index(k) for k in range(50)]
    assert first == [PromptOrder(2**31, seed=0, peer_id="a").index(k) for k in range(50)]
    for other in (PromptOrder(2**31, seed=1, peer_id="a"), PromptOrder(2**31, seed=0, peer_id="b")):
        assert not set(first) & {other.index(k) for k in range(50)}
    assert all(0 <= index < 2**31 for index in first)


NEEDS = StepSection(own_groups=4, foreign_groups=4, foreign_wait_s=30.0)
FULL = StepInputs(own_ready=4, foreign_ready=4, waited_s=0.0, uptime_s=100.0, awaits_sender=True)


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, True), ({"own_ready": 3}, False), ({"own_ready": 3, "waited_s": 99.0}, False),
        ({"foreign_ready": 3}, False), ({"foreign_ready": 3, "waited_s": 30.0}, True),
        ({"foreign_ready": 0, "awaits_sender": False}, True),
        ({"foreign_ready": 0, "awaits_sender": False, "uptime_s": 5.0}, False),
        ({"foreign_ready": 0, "awaits_sender": False, "uptime_s": 5.0, "waited_s": 30.0}, True),
    ],
)  # fmt: skip
def test_a_step_waits_for_foreign_groups_at_most_the_set_time(changes, starts):
    assert may_start(NEEDS, replace(FULL, **changes)) is starts


@pytest.mark.parametrize(
    ("ready", "waited_s", "starts"),
    [(3, 99.0, False), (4, 0.0, False), (4, 30.0, True), (7, 29.0, False), (8, 0.0, True)],
)
def test_a_learner_alone_waits_for_foreign_groups_instead_of_own_ones(ready, waited_s, starts):
    own, foreign = substitute_foreign(ready, needs=NEEDS)
    assert own + foreign == ready
    assert may_start(NEEDS, replace(FULL, own_ready=own, foreign_ready=foreign, waited_s=waited_s)) is starts


def test_an_empty_step_never_starts():
    needs = StepSection(own_groups=0, foreign_groups=4, foreign_wait_s=0.0)
    assert not may_start(needs, StepInputs(0, 0, waited_s=99.0, uptime_s=99.0, awaits_sender=False))


def test_missing_groups_are_divided_among_all_senders():
    shortfall = ForeignShortfall()
    assert shortfall.shares(4, 12) == (4, 12)
    shortfall.note(12, ["a"] * 4 + ["b"] * 4)
    assert shortfall.shares(4, 12) == (6, 10), "4 are missing, so each of three nodes makes 2 more, rounded up"
    shortfall.note(10, ["a"] * 6 + ["b"] * 6)
    assert shortfall.extra == 2, "2 too many arrived, less than one for each of three nodes"
    shortfall.note(10, ["a"] * 7 + ["b"] * 8)
    assert shortfall.extra == 1, "13 arrived since the last step"
    shortfall.note(11, [])
    assert shortfall.shares(4, 12) == (16, 0), "no peer sends: at most the foreign share"


@asynccontextmanager
async def _node(
    folder: Path, *, foreign_wait_s: float, has_peer: bool = False, fills: bool = False
) -> AsyncIterator[NodeComponents]:
    """Yield a node in a swarm, with or without another member."""
    text = manifest_text(foreign_wait_s=foreign_wait_s)
    text = text.replace("foreign_wait_s", "backfill_with_own = true\nforeign_wait_s") if fills else text
    manifest, swarm = parse_manifest(text, source="test"), LoopbackSwarm()
    gossip, peer = (swarm.join(one.peer_id, run_id=manifest.run_id) for one in (ME, ANN))
    with components(folder, manifest=manifest, gossip=gossip) as node:
        await gossip.start()
        if has_peer:
            await peer.start()
        yield node


def _store(node: NodeComponents, identity: Identity, *numbers: int) -> None:
    for number in numbers:
        assert node.store.buffer.admit(accepted(identity, number, created_at=time.time()), own=identity is ME)


@pytest.mark.parametrize(
    ("role", "own_left", "shares"),
    [("full", 0, (0, 8)), ("full", 3, (3, 5)), ("full", 5, (4, 4)), ("learner", 0, (0, 8)), ("exchange", 0, (4, 4))],
)
def test_a_step_of_a_node_that_generates_no_more_takes_foreign_groups(tmp_path, role, own_left, shares):
    budget = GenerateBudget(1, num_tokens=1, num_groups=1)
    with components(tmp_path, settings=NodeSettings(model="m", role=role), budget=budget) as node:
        _store(node, ME, *range(1, own_left + 1))
        assert Wiring(node).step_shares.of_next_step() == shares


async def test_with_backfill_the_next_step_replaces_missing_foreign_groups(tmp_path):
    async with _node(tmp_path, foreign_wait_s=0, has_peer=True, fills=True) as node:
        _store(node, ME, 1, 2, 3, 4)
        _store(node, ANN, 1)
        gate = Wiring(node).step_gate()
        assert await asyncio.wait_for(gate.wait(1), 30)
        assert gate.shares(1) == (4, 4), "the present step must not wait for more own groups"
        assert node.slots.capacity == 2 * 6, "3 are missing, so each of two nodes makes 2 more"
        _store(node, ME, 5)
        _store(node, ANN, 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gate.wait(2), 0.2)
        _store(node, ME, 6)
        assert await asyncio.wait_for(gate.wait(2), 30)
        assert gate.shares(2) == (6, 2)


async def test_a_gate_that_is_cancelled_while_a_group_arrives_is_cancelled(tmp_path):
    """Both happen in one iteration of the loop, as when a signal and an admission coincide."""
    async with _node(tmp_path, foreign_wait_s=60) as node:
        wiring = Wiring(node)
        waiting = asyncio.create_task(wiring.step_gate().wait(1))
        await asyncio.sleep(0.1)
        wiring.intake.stored.set()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=30)
        assert waiting.cancelled()


def _ban(node: NodeComponents, wiring: Wiring) -> None:
    node.peers.ban(ANN.peer_id)


def _has_record(tokenizer: str, role: str) -> Callable[[NodeComponents, Wiring], None]:
    def note(node: NodeComponents, wiring: Wiring) -> None:
        node.peers.registry.seen(ANN.peer_id).record = PeerRecord(
            run_id=node.context.manifest.run_id, peer_id=ANN.peer_id, name="", model="", parameters=0,
            tokenizer=tokenizer, role=role, last_number=0, policy_version=0, tokens_per_s=0.0, created_at=0.0,
            software="",
        )  # fmt: skip

    return note


def _wait_in_vain(node: NodeComponents, wiring: Wiring) -> None:
    wiring.awaited_senders.waited([ANN.peer_id], 60.0)


@pytest.mark.parametrize(
    ("change", "waits"),
    [
        (lambda node, wiring: None, True),
        (_ban, False),
        (_has_record("ab" * 16, "full"), False),
        (_has_record(FINGERPRINT, "learner"), False),
        (_wait_in_vain, False),
    ],
    ids=["useful", "banned", "other tokenizer", "learner", "silent"],
)
async def test_a_step_waits_only_for_senders_whose_groups_can_come(tmp_path, change, waits):
    async with _node(tmp_path, foreign_wait_s=60, has_peer=True) as node:
        _store(node, ME, 1, 2, 3, 4)
        wiring = Wiring(node)
        gate = wiring.step_gate()
        gate._started_at -= 61
        assert await asyncio.wait_for(gate.wait(1), 30), "it waits for a member that has sent nothing"
        for ago_s in (2.0, 1.0, 0.0):
            wiring.awaited_senders.arrived(ANN.peer_id, now=time.monotonic() - ago_s)
        gate._train_s = 60.0  # in which the sender makes more than the quota
        change(node, wiring)
        opening = asyncio.create_task(gate.wait(2))
        await asyncio.wait({opening}, timeout=2 * RECHECK_INTERVAL_S if waits else 30)
        assert opening.done() is not waits
        opening.cancel()
