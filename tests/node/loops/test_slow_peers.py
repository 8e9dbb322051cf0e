"""Peers that reply slowly or not at all delay no request to others: the backfill loop over the loopback swarm."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from bench.stubs.stub_node import StubNode
from ftis_node.gossip import Fetched, FetchOutcome
from ftis_node.node.loops import announcement_backfill
from ftis_node.node.peers import outgoing_slots
from ftis_node.node.peers.outgoing_slots import Pace, QuerySlots
from tests.node.light_swarm import REQUESTED, LightSwarm, held, identity_of, manifest_of
from tests.waiting import eventually

REPLY_S = 1.8
SLOW = [identity_of(number).peer_id for number in range(10, 26)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Make periods short enough for tests."""
    monkeypatch.setattr(announcement_backfill, "PERIOD_S", 0.05)
    monkeypatch.setattr(announcement_backfill, "SILENCE_S", 0.2)
    monkeypatch.setattr(outgoing_slots, "QUICK_S", 0.2)
    monkeypatch.setattr(outgoing_slots, "SLOW_S", 2.0)


def add_slow_members(node: StubNode, monkeypatch: pytest.MonkeyPatch, slow: Sequence[str]) -> Counter[str]:
    """Add members to a node's list, which send empty replies after `REPLY_S`. Return the number of replies by peer."""
    request, members, replies = node.gossip.request_backfill, node.gossip.members, Counter[str]()

    async def request_backfill(peer_id: str, query: bytes, **how: Any) -> Fetched:
        if peer_id not in slow:
            return await request(peer_id, query, **how)
        limit_s = how["timeout_s"]
        await asyncio.sleep(min(limit_s, REPLY_S))
        replies[peer_id] += limit_s > REPLY_S
        return Fetched((), FetchOutcome.COMPLETE if limit_s > REPLY_S else FetchOutcome.TIMED_OUT)

    async def with_slow() -> list[str]:
        return [*slow, *await members()]

    monkeypatch.setattr(node.gossip, "request_backfill", request_backfill)
    monkeypatch.setattr(node.gossip, "members", with_slow)
    return replies


def add_stuck_confirmation(node: StubNode, monkeypatch: pytest.MonkeyPatch, stuck: str) -> list[str]:
    """Make confirmations to the peer `stuck` hang. Return the list of the peers that were sent one."""
    confirm, sent = node.gossip.confirm, list[str]()

    async def confirm_or_hang(peer_id: str, ids: Sequence[bytes]) -> bool:
        sent.append(peer_id)
        if peer_id == stuck:
            await asyncio.sleep(3600)
        return await confirm(peer_id, ids)

    monkeypatch.setattr(node.gossip, "confirm", confirm_or_hang)
    return sent


async def test_a_silent_member_is_queried_again_and_again_beside_many_slow_ones(tmp_path, monkeypatch):
    """The slow members are silent too, and twice as many as the concurrent queries."""
    swarm, queried = LightSwarm(tmp_path, manifest_of()), Counter[str]()

    def decide(sender, receiver, kind, message):
        queried["alice"] += kind == REQUESTED and (sender, receiver) == (2, 1)
        return False

    swarm.loses = decide
    async with swarm.node(1, directory_period_s=150), swarm.node(2, directory_period_s=150) as bob:
        await eventually(lambda: bob.parts.peers.registry.peers)
        replies = add_slow_members(bob, monkeypatch, SLOW)
        await eventually(lambda: min(replies[peer_id] for peer_id in SLOW) >= 1)
        num_before, queried["alice"] = replies.total(), 0
        await eventually(lambda: queried["alice"] >= 5)
        assert replies.total() - num_before <= 24, "a slow member was queried in every slot before"


async def test_a_sender_that_does_not_reply_to_a_confirmation_holds_no_slot_of_the_pulls(tmp_path, monkeypatch):
    swarm, stuck = LightSwarm(tmp_path, manifest_of(foreign_groups=0)), identity_of(1).peer_id
    async with swarm.node(1) as alice, swarm.node(3) as carol, swarm.node(2, pulls_in_flight=1) as bob:
        sent = add_stuck_confirmation(bob, monkeypatch, stuck)
        await swarm.publish(alice, 1)
        await eventually(lambda: stuck in sent)
        await swarm.publish(carol, 1)
        await eventually(lambda: carol.parts.peers.confirmations.num_confirmed == 1)
        await eventually(lambda: held(bob) == 2)


async def test_records_that_hang_in_the_directory_delay_neither_others_nor_the_own_record(tmp_path, monkeypatch):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    async with swarm.node(1) as alice, swarm.node(2) as bob:
        add_slow_members(bob, monkeypatch, SLOW)
        get_record, publish_record, published = bob.gossip.get_record, bob.gossip.publish_record, list[float]()

        async def get_or_hang(peer_id):
            return await (asyncio.Future() if peer_id in SLOW else get_record(peer_id))

        async def publish(value, *, ttl_s):
            published.append(ttl_s)
            return await publish_record(value, ttl_s=ttl_s)

        monkeypatch.setattr(bob.gossip, "get_record", get_or_hang)
        monkeypatch.setattr(bob.gossip, "publish_record", publish)
        await eventually(lambda: all(peer_id in bob.parts.peers.registry.peers for peer_id in SLOW))
        num_before = len(published)
        await eventually(lambda: len(published) >= num_before + 5)
        await swarm.publish(alice, 1)
        record_of = bob.parts.peers.registry.record_of
        await eventually(lambda: (record := record_of(identity_of(1).peer_id)) is not None and record.last_number == 1)


def test_the_pace_of_a_peer_is_that_of_its_last_query():
    slots = QuerySlots(2)
    assert slots.pace_of("p") is Pace.UNKNOWN
    for took_s, is_answered, pace in (
        (0.01, True, Pace.QUICK),
        (outgoing_slots.QUICK_S, False, Pace.SLOW),
        (0.01, False, Pace.UNKNOWN),  # an early failure shows no pace
        (9.0, True, Pace.SLOW),
    ):
        slots.note("p", took_s=took_s, is_answered=is_answered)
        assert slots.pace_of("p") is pace


def test_each_pace_has_separate_slots():
    slots = QuerySlots(1)
    slots.note("quick", took_s=0.0, is_answered=True)
    slots.note("slow", took_s=9.0, is_answered=True)
    peers = ("slow", "slow", "quick", "new", "newer")
    assert [slots.take(peer) for peer in peers] == [True, False, True, True, False]
    limits = [slots.limit_s(peer) for peer in ("slow", "quick", "new")]
    assert limits == [outgoing_slots.SLOW_S, outgoing_slots.QUICK_S, outgoing_slots.QUICK_S]
    slots.release("new")
    assert slots.take("newer")


def test_the_number_of_remembered_paces_is_bounded(monkeypatch):
    monkeypatch.setattr(outgoing_slots, "MAX_PEERS", 3)
    slots = QuerySlots(1)
    for peer_id in "abcd":
        slots.note(peer_id, took_s=9.0, is_answered=True)
    assert [slots.pace_of(peer_id) for peer_id in "abd"] == [Pace.UNKNOWN, Pace.SLOW, Pace.SLOW]
