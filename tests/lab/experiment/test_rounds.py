"""Rounds of a swarm whose members end one by one, and delays in steps, of all nodes or of the last one."""

import asyncio
import random

import pytest

from ftis_node.config.roles import Delay, parse_delay
from ftis_node.config.step import StepSection
from ftis_node.errors import UsageError
from ftis_node.lab.experiment.rounds import Rate, RoundBarrier, RoundGate, RoundMember, RoundQuota, Rounds, Validator
from ftis_node.lab.experiment.specs import NO_DELAY, delay_alone, parse_delays
from ftis_node.node.context import NodeCounters, NodeState
from ftis_node.node.peers.peer_registry import PeerRegistry
from ftis_node.node.training.generation_limits import SlotPool
from tests.conftest import raises_line

ROUNDS = Rounds(own=2, foreign=4, last_steps=(1, 2, 3))


def test_remaining_members_share_the_groups_of_those_that_left():
    assert [ROUNDS.shares(step) for step in (1, 2, 3, 4)] == [(2, 4), (3, 3), (6, 0), (0, 0)]
    assert [ROUNDS.due(step) for step in (0, 1, 2, 3)] == [0, 2, 5, 11]


def test_a_slow_member_generates_the_groups_of_a_step_over_its_rounds():
    rate = Rate(steps=3, rounds=8)
    assert [rate.round_of(step) for step in (0, 1, 2, 3)] == [0, 3, 6, 8]
    quota = RoundQuota(Rounds(own=4, foreign=0, last_steps=(8, 8)), rate, plans=True)
    quota.plan(2, 6)
    assert [quota.due(number) for number in range(9)] == [0, 1, 2, 4, 6, 8, 10, 12, 14]
    assert [quota.is_known(number) for number in (6, 7)] == [True, False]


def member(
    peer_id: str, validator: Validator | None = None, *, last_step: int, quota: RoundQuota | None = None, sent: int = 0
) -> RoundMember:
    return RoundMember(peer_id, NodeCounters(groups_sent=sent), last_step, quota or RoundQuota(ROUNDS), validator)


class RecordedRounds(RoundBarrier):
    """Rounds that wait for no other member. `seen` has each wait with the free slots, `arrived` each arrival."""

    def __init__(
        self, rounds: Rounds, *, slots: SlotPool | None = None, due: dict[tuple[str, int], int] | None = None
    ) -> None:
        super().__init__(rounds)
        self._slots, self._due_groups = slots or SlotPool(8), due or {}
        self.seen: list[tuple[str, int, int]] = []
        self.arrived: list[tuple[str, int]] = []

    def due(self, peer_id: str, step: int) -> int:
        return self._due_groups[peer_id, step]

    def arrive(self, peer_id: str, step: int) -> None:
        self.arrived.append((peer_id, step))

    async def begin(self, step: int) -> None:
        self.seen.append(("begin", step, self._slots.capacity))

    async def wait(self, step: int) -> None:
        self.seen.append(("wait", step, self._slots.capacity))


class Swarm:
    """Three members of synchronous rounds, whose counters a test sets."""

    def __init__(self) -> None:
        self.lockstep = RoundBarrier(ROUNDS)
        self.validators = [Validator(NodeState(), PeerRegistry()) for _ in "abc"]
        each = zip("abc", self.validators, ROUNDS.last_steps, strict=True)
        self.members = [member(name, validator, last_step=last_step) for name, validator, last_step in each]
        for one in self.members:
            self.lockstep.enter(one)

    def set_accepted(self, receiver: int, sender: int, accepted: int) -> None:
        self.validators[receiver].registry.seen(self.members[sender].peer_id).accepted = accepted

    def is_complete(self, step: int) -> bool:
        return self.lockstep._is_complete(step)


def test_a_round_waits_for_its_present_members_only():
    swarm = Swarm()
    for one in swarm.members:
        one.counters.groups_sent = 2
    for receiver in range(3):
        for sender in {0, 1, 2} - {receiver}:
            assert not swarm.is_complete(1)
            swarm.set_accepted(receiver, sender, 2)
    assert swarm.is_complete(1)
    swarm.members[1].counters.groups_sent = swarm.members[2].counters.groups_sent = 5
    swarm.set_accepted(1, 2, 5)
    assert not swarm.is_complete(2)  # c has not validated b's second round
    swarm.set_accepted(2, 1, 5)
    assert swarm.is_complete(2)  # a has left
    assert not swarm.is_complete(3)
    swarm.members[2].counters.groups_sent = 11
    assert swarm.is_complete(3)


def test_a_group_refused_after_validation_is_counted_once():
    registry, rounds = PeerRegistry(), Rounds(own=2, foreign=2, last_steps=(1, 1))
    lockstep = RoundBarrier(rounds)
    for name, validator in (("receiver", Validator(NodeState(), registry)), ("sender", None)):
        lockstep.enter(member(name, validator, last_step=1, quota=RoundQuota(rounds), sent=2))
    peer = registry.seen("sender")
    peer.accepted, peer.refused["understated_logprobs"] = 1, 1  # one group, accepted and later refused
    assert not lockstep._is_complete(1)
    peer.refused["reward_mismatch"] = 1
    assert lockstep._is_complete(1)


def test_a_round_waits_for_the_plans_of_its_members():
    swarm = Swarm()
    quota = RoundQuota(ROUNDS, plans=True)
    swarm.lockstep.enter(member("d", last_step=3, quota=quota, sent=9))
    for one in swarm.members:
        one.counters.groups_sent = 11
    for receiver in range(3):
        for sender in range(3):
            swarm.set_accepted(receiver, sender, 11)
    assert not swarm.is_complete(2)
    quota.plan(2, 4)
    assert (quota.shares(2), quota.due(2), swarm.lockstep.due("d", 2)) == ((4, 2), 6, 6)
    assert swarm.is_complete(2)
    assert not swarm.is_complete(3)


async def test_a_gate_plans_its_next_round_by_the_groups_missing_in_this_one():
    """Groups of the next round that arrived early do not count as groups of this round."""
    rounds = Rounds(own=2, foreign=4, last_steps=(3, 3, 3))
    due = {("a", 1): 2, ("a", 2): 5}
    quota = RoundQuota(rounds, plans=True)
    ready = [("a", 1), ("a", 2), ("a", 3)]
    gate = _gate(RecordedRounds(rounds, due=due), SlotPool(8), ready, fill=True, quota=quota)
    await gate.wait(1)
    assert (gate.shares(1), gate.shares(2)) == ((2, 4), (3, 3))
    await gate.wait(2)
    assert gate.shares(3) == (3, 3)


def _gate(rounds, slots, ready, *, fill: bool, quota: RoundQuota | None = None) -> RoundGate:
    own, settings = member("own", last_step=3, quota=quota), StepSection(backfill_with_own=fill)
    return RoundGate(rounds, own, settings=settings, slots=slots, ready_foreign=lambda: ready)


async def test_a_gate_has_slots_only_between_the_begin_and_the_end_of_a_round():
    slots = SlotPool(8)
    rounds = RecordedRounds(ROUNDS, slots=slots)
    gate = _gate(rounds, slots, [], fill=False)
    for step in (1, 2):
        await gate.wait(step)
    assert rounds.seen == [("begin", 1, 2), ("wait", 1, 2), ("begin", 2, 0), ("wait", 2, 3)]
    assert (rounds.arrived, slots.capacity) == ([("own", 1), ("own", 2)], 0)
    assert gate.shares(2) == (3, 3)


async def test_a_round_waits_for_the_last_step_of_a_leaving_member():
    lockstep, (slow, leaver) = RoundBarrier(ROUNDS), [Validator(NodeState(), PeerRegistry()) for _ in "ab"]
    lockstep.enter(member("slow", slow, last_step=3))
    lockstep.enter(member("leaver", leaver, last_step=1))
    slow.state.step = 2
    lockstep.arrive("slow", 3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lockstep.begin(3), 0.05)
    leaver.state.step = 1
    await asyncio.wait_for(lockstep.begin(3), 30)


def test_a_delay_is_a_whole_number_of_steps():
    drawn = {parse_delay("lognormal:1-16").draw(random.Random(seed)) for seed in range(100)}
    assert len(drawn) > 2 and drawn <= set(range(1, 17))


def test_a_delay_applies_to_all_nodes_or_to_the_last():
    for spec, of_all, of_last, alone in (
        ("none", NO_DELAY, None, "none"),
        ("fixed:3", Delay(3, 3), None, "fixed:3"),
        ("fixed:3@peer", NO_DELAY, Delay(3, 3), "none"),
        ("lognormal:1-64@peer", NO_DELAY, Delay(1, 64), "none"),
    ):
        assert (parse_delays(spec), delay_alone(spec)) == ((of_all, of_last), alone)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("later", "invalid delay 'later': use none, fixed:K or lognormal:MIN-MAX, in steps; DELAY@peer"),
        ("fixed:3@pear", "invalid delay 'fixed:3@pear'"),
        ("lognormal:9-8@peer", "0 < MIN <= MAX"),
        ("@peer", "invalid delay ''"),
        ("none@peer", "'none@peer': a late peer needs a delay above 0"),
    ],
)
def test_an_invalid_delay_of_a_peer_is_refused_in_one_line(spec, words):
    with raises_line(UsageError, words):
        parse_delays(spec)
