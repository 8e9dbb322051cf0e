"""Announced groups arrive although messages are lost: whole loops of light nodes over the loopback swarm."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from unittest.mock import AsyncMock

import pytest

from bench.stubs.stub_node import stub_group
from ftis_node.backoff import BackoffTable, doubling
from ftis_node.config.manifest import RunManifest
from ftis_node.gossip import Fetched, FetchOutcome, SwarmPhase
from ftis_node.node.daemon import serve_last_groups
from ftis_node.node.loops import announcement_backfill, announcement_shards, confirmations, pull
from ftis_node.node.loops.confirmations import BURST
from ftis_node.node.peers import outgoing_slots
from ftis_node.node.wiring import Wiring
from ftis_node.records.envelope import Announcement
from ftis_node.swarm.pull_queue import PullItem, PullRequest, PullSource
from ftis_node.swarm.rate_limits import TokenBucket
from ftis_node.swarm.topology import shard_of
from ftis_node.validation import Refusal, Refused
from tests.node.light_swarm import (
    ANNOUNCED,
    REQUESTED,
    RNG,
    LightSwarm,
    held,
    identity_of,
    manifest_of,
    own_announcement,
)
from tests.waiting import eventually

WINDOW_S = 2.0  # so that messages gather although a busy machine pauses between groups


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Make periods short enough for tests."""
    monkeypatch.setattr(announcement_backfill, "PERIOD_S", 0.1)
    monkeypatch.setattr(confirmations, "REANNOUNCE_PERIOD_S", 0.05)
    monkeypatch.setattr(announcement_shards, "SHARDS_INTERVAL_S", 0.3)


async def test_simultaneous_confirmations_are_sent_together(tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.node.loops.confirmations.WINDOW_S", WINDOW_S)
    swarm = LightSwarm(tmp_path, manifest_of())
    async with swarm.node(1) as alice, swarm.node(2) as bob:
        sent: list[int] = []
        confirm = bob.gossip.confirm

        async def confirm_and_record(peer_id, ids):
            sent.append(len(ids))
            return await confirm(peer_id, ids)

        bob.gossip.confirm = confirm_and_record  # type: ignore[method-assign]
        for _ in range(20):
            await swarm.publish(alice)
        await eventually(lambda: alice.parts.peers.confirmations.num_confirmed == 20)
        assert sum(sent) == held(bob) == alice.gossip.counters.envelopes_out == 20
        assert sent[0] == 1, "the first was delayed"
        assert BURST <= len(sent) <= 5 + BURST, "the others were not gathered"


async def test_a_node_that_ends_announces_the_groups_that_it_gathered_and_serves_them(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(), window_s=WINDOW_S)
    async with swarm.node(1, shutdown_serve_s=60) as alice, swarm.node(2) as bob:
        await swarm.publish(alice)
        await eventually(lambda: alice.parts.peers.confirmations.num_confirmed == 1)
        for _ in range(2):
            await alice.publish(stub_group(alice.parts.context.identity, swarm.manifest, RNG, num_tokens=4))
        assert alice.parts.context.counters.groups_sent == 1, "two groups do not wait for the end of the window"
        await serve_last_groups(alice.wiring)
        assert (
            alice.parts.peers.confirmations.num_confirmed == alice.parts.context.counters.groups_sent == held(bob) == 3
        )


async def test_simultaneous_announcements_are_sent_together(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(), window_s=WINDOW_S)
    async with swarm.node(1) as alice, swarm.node(2) as bob, swarm.node(3) as carol:
        await swarm.publish(alice, 20)
        await eventually(lambda: held(bob) == held(carol) == 20)
        assert alice.gossip.counters.announcements_sent <= 6


async def test_without_gathering_each_group_is_announced_at_once(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(), window_s=60.0)
    async with swarm.node(1) as alice, swarm.node(2) as bob:
        alice.wiring.publish_loop.may_gather = False
        await swarm.publish(alice, 4)
        await eventually(lambda: held(bob) == 4)
        assert alice.gossip.counters.announcements_sent == 4


async def test_a_new_member_gets_the_groups_of_an_absent_sender_from_others(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of())
    async with swarm.node(2) as bob:
        async with swarm.node(1) as alice:
            await swarm.publish(alice, 3)
            await eventually(lambda: held(bob) == 3)
        async with swarm.node(3) as carol:
            await eventually(lambda: held(carol) == 3)
            await eventually(lambda: carol.parts.context.counters.groups_repaired == 3)
            assert bob.gossip.counters.envelopes_out == 3


@pytest.mark.parametrize("lost", [{2}, {2, 3}], ids=["a gap", "the tail, found by the directory"])
async def test_groups_whose_announcements_are_lost_are_requested(tmp_path, lost):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    swarm.loses = lambda sender, receiver, kind, message: kind == ANNOUNCED and message.number in lost
    async with swarm.node(1) as alice, swarm.node(2) as bob:
        # Groups from before bob joined are requested by time, not by number.
        await eventually(lambda: bob.parts.peers.registry.peers)
        await asyncio.sleep(0.2)
        await swarm.publish(alice, 3)
        await eventually(lambda: held(bob) == 3)
        await eventually(lambda: bob.parts.context.counters.groups_repaired == len(lost))


async def test_groups_that_their_sender_does_not_send_are_pulled_from_another_member(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    swarm.loses = lambda sender, receiver, kind, message: kind == "request" and (sender, receiver) == (3, 1)
    async with swarm.node(1) as alice, swarm.node(2) as bob, swarm.node(3) as carol:
        await swarm.publish(alice, 2)
        await eventually(lambda: held(bob) == 2)
        await eventually(lambda: held(carol) == 2)
        assert bob.gossip.counters.envelopes_out == 2
        assert carol.parts.peers.registry.seen(identity_of(1).peer_id).failed_pulls > 0


async def test_the_rest_of_a_broken_reply_is_requested_again_from_its_sender(tmp_path, monkeypatch):
    monkeypatch.setattr(outgoing_slots, "FAILED_REST_S", 3600.0)
    monkeypatch.setattr(pull, "BUSY_REST_S", 0.01)
    swarm, broken = LightSwarm(tmp_path, manifest_of(foreign_groups=0)), []
    async with swarm.node(1) as alice, swarm.node(2, directory_period_s=150.0) as bob:
        fetch = bob.gossip.fetch

        async def fetch_and_break(peer_id, ids, **how):
            fetched = await fetch(peer_id, ids, **how)
            if len(fetched.items) < 2:
                return fetched
            broken.append(fetched.items[-1])
            return Fetched(fetched.items[:-1], FetchOutcome.BROKEN)

        monkeypatch.setattr(bob.gossip, "fetch", fetch_and_break)
        await swarm.publish(alice, 8)
        await eventually(lambda: held(bob) == 8)
        assert broken
        assert bob.parts.peers.registry.seen(identity_of(1).peer_id).failed_pulls == len(broken)
        assert bob.parts.peers.row(identity_of(1).peer_id)["reasons"] == {}


async def test_a_slow_peer_is_asked_for_as_many_groups_as_it_can_send(tmp_path, monkeypatch):
    """It sends a group in half of the time limit; the first pull ends at the limit with one."""
    monkeypatch.setattr(outgoing_slots, "FAILED_REST_S", 0.1)
    monkeypatch.setattr(pull, "PULL_TIMEOUT_S", 0.4)
    monkeypatch.setattr(pull, "GATHER_S", 0.3)
    swarm, ended, sizes = LightSwarm(tmp_path, manifest_of(foreign_groups=0)), list[int](), list[int]()
    async with swarm.node(1) as alice, swarm.node(2, directory_period_s=150.0) as bob:
        fetch = bob.gossip.fetch

        async def fetch_slowly(peer_id, ids, **how):
            fetched = await fetch(peer_id, ids, **how)
            if ended:
                sizes.append(len(ids))
            if ended or len(ids) > 1:  # the first pulls are of one group each
                await asyncio.sleep(0.2)
            if len(ids) == 1:
                return fetched
            ended.append(len(ids))
            return Fetched(fetched.items[:1], FetchOutcome.TIMED_OUT)

        monkeypatch.setattr(bob.gossip, "fetch", fetch_slowly)
        await swarm.publish(alice, 8)
        await eventually(lambda: held(bob) == 8)
        assert (set(sizes), bob.parts.peers.row(identity_of(1).peer_id)["reasons"]) == ({1}, {})
        assert not bob.wiring.pull._slots.backoff.has_failed(identity_of(1).peer_id)


async def test_an_unconfirmed_group_is_announced_again(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    swarm.loses = lambda sender, receiver, kind, message: (
        kind == REQUESTED or (kind == ANNOUNCED and message.attempt == 0)
    )
    async with swarm.node(1) as alice, swarm.node(2, directory_period_s=150.0) as bob:
        alice.parts.peers.confirmations.pending = BackoffTable[bytes](doubling(0.2))
        await swarm.publish(alice, 2)
        await eventually(lambda: held(bob) == 2)
        await eventually(lambda: alice.parts.peers.confirmations.num_confirmed == 2)
        assert len(alice.parts.peers.confirmations.pending) == 0


async def test_a_stored_group_that_is_announced_again_is_confirmed_again(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    alice_id = identity_of(1).peer_id
    async with swarm.node(2) as bob:
        confirm = bob.gossip.confirm

        async def lose(peer_id, ids):
            return False

        bob.gossip.confirm = lose  # type: ignore[method-assign]
        async with swarm.node(1) as alice:
            await swarm.publish(alice, 3)
            await eventually(lambda: held(bob) == 3)
            assert alice.parts.peers.confirmations.num_confirmed == 0
        bob.gossip.confirm = confirm  # type: ignore[method-assign]
        async with swarm.node(1) as alice:
            await eventually(lambda: alice.parts.peers.confirmations.num_confirmed == 3)
            await eventually(lambda: alice.parts.context.counters.groups_sent == 3)  # again after the restart
            assert len(alice.parts.peers.confirmations.pending) == 0
        assert bob.parts.peers.registry.seen(alice_id).accepted == 3


async def test_only_a_repeated_announcement_is_confirmed_again(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    async with swarm.node(1) as alice, swarm.node(2) as bob:
        await swarm.publish(alice, 1)
        await eventually(lambda: bob.gossip.counters.confirmed_out == 1)
        announcement = own_announcement(alice)
        await alice.gossip.announce(announcement.to_bytes(), shard=alice.parts.context.shard)
        await asyncio.sleep(0.3)
        assert bob.gossip.counters.confirmed_out == 1, (
            "a late first announcement is confirmed, although its sender has the confirmation"
        )
        await alice.gossip.announce(replace(announcement, attempt=1).to_bytes(), shard=alice.parts.context.shard)
        await eventually(lambda: bob.gossip.counters.confirmed_out == 2)


async def test_in_a_large_swarm_each_group_is_pulled_by_some_nodes_only(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(own_groups=2, foreign_groups=2))
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(swarm.node(number, pull_policy="needed")) for number in range(1, 9)]
        await asyncio.sleep(0.5)
        for node in nodes:
            node.parts.peers.confirmations.pending = BackoffTable[bytes](doubling(0.3))
            await swarm.publish(node, 2)
        await eventually(lambda: sum(node.parts.peers.confirmations.num_confirmed for node in nodes) == 16)
        await asyncio.sleep(0.5)
        pulled = [held(node) for node in nodes]
        assert max(pulled) < 14, "a node has all groups"
        assert sum(pulled) >= 16


async def test_shards_follow_the_budget_and_no_group_is_lost_when_they_change(tmp_path, monkeypatch):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=8))
    own = identity_of(2).peer_id
    other_number = next(n for n in range(3, 64) if shard_of(identity_of(n).peer_id, 8) != shard_of(own, 8))
    monkeypatch.setattr(announcement_shards, "ANNOUNCEMENTS_PER_S", 1.0)
    async with swarm.node(2, pull_policy="needed") as bob, swarm.node(other_number) as other:
        await eventually(lambda: len(bob.parts.context.state.read_shards) == 8)
        await swarm.publish(other, 12)
        await eventually(lambda: len(bob.parts.context.state.read_shards) < 8)
        assert shard_of(own, 8) in bob.parts.context.state.read_shards
        await eventually(lambda: len(bob.parts.context.state.read_shards) == 8)
        await eventually(lambda: held(bob) == 12)


async def test_new_and_failed_peers_leave_slots_to_others(tmp_path):
    async with LightSwarm(tmp_path, manifest_of()).node(1, pulls_in_flight=4) as alice:
        pull = alice.wiring.pull
        alice.parts.peers.registry.seen("proven").accepted = 1
        for peer in ("new1", "new2"):
            pull._slots.take(peer)
        assert not pull._slots.may_ask("new1"), "a second request to a new peer"
        assert pull._slots.may_ask("new3")
        pull._slots.take("new3")
        assert not pull._slots.may_ask("new4"), "the slot for proven peers is taken"
        assert pull._slots.may_ask("proven")
        for peer in ("new1", "new2", "new3"):
            pull._slots.release(peer, "new")
        for peer in ("slow1", "slow2"):
            pull._slots.backoff.failed(peer, now=-1e9)
        assert pull._slots.may_ask("slow1")
        assert pull._slots.take("slow1") == "failed"
        assert not pull._slots.may_ask("slow2"), "more than one slot for failed peers"
        pull._slots.backoff.failed("proven", now=-1e9)
        assert not pull._slots.may_ask("proven")


async def test_a_false_hint_about_a_peer_is_not_charged_to_that_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(pull, "RETRY_S", 0.05)
    swarm, asked = LightSwarm(tmp_path, manifest_of(foreign_groups=0)), list[str]()
    swarm.loses = lambda sender, receiver, kind, message: kind == "request" and (sender, receiver) == (2, 3)
    alice_id = identity_of(1).peer_id
    async with swarm.node(1), swarm.node(2, directory_period_s=150.0) as bob, swarm.node(3) as mallory:
        fetch = bob.gossip.fetch

        async def record(peer_id, ids, **how):
            fetched = await fetch(peer_id, ids, **how)
            asked.append(peer_id)
            return fetched

        monkeypatch.setattr(bob.gossip, "fetch", record)
        invented = Announcement(bytes(32), 7, 278, 5, bob.parts.context.about.tokenizer_prefix, 3, time.time())
        await mallory.gossip.announce(replace(invented, sender=alice_id).to_bytes())
        await eventually(lambda: asked.count(alice_id) > 1)
        assert bob.parts.peers.row(alice_id)["reasons"] == {}
        assert not bob.wiring.pull._slots.backoff.has_failed(alice_id)


async def test_invented_groups_beside_a_real_one_cost_their_announcer_and_no_other_peer(tmp_path, monkeypatch):
    """Mallory announces two ids of no group before each of its groups; carol announces groups, too."""
    monkeypatch.setattr(pull, "GATHER_S", 0.3)
    monkeypatch.setattr(pull, "RETRY_S", 0.05)
    monkeypatch.setattr(outgoing_slots, "FAILED_REST_S", 0.05)
    swarm, asked = LightSwarm(tmp_path, manifest_of(foreign_groups=0)), list[tuple[str, bytes]]()
    mallory_id = identity_of(3).peer_id
    async with swarm.node(1) as carol, swarm.node(2, directory_period_s=150.0) as bob, swarm.node(3) as mallory:
        fetch = bob.gossip.fetch

        async def record(peer_id, ids, **how):
            asked.extend((peer_id, one) for one in ids)
            return await fetch(peer_id, ids, **how)

        monkeypatch.setattr(bob.gossip, "fetch", record)
        invented = [bytes([number]) * 32 for number in range(4)]
        for at in (0, 2):
            for one in invented[at : at + 2]:
                about = bob.parts.context.about.tokenizer_prefix
                await mallory.gossip.announce(Announcement(one, 7, 278, 5, about, 3, time.time()).to_bytes())
            await swarm.publish(mallory)
            await swarm.publish(carol)
        await eventually(lambda: held(bob) == 4 and {one for _, one in asked} > set(invented))
        await asyncio.sleep(0.5)
        assert sorted(each for each in asked if each[1] in invented) == [(mallory_id, one) for one in invented]
        reasons = bob.parts.peers.row(mallory_id)["reasons"]
        assert 1 <= reasons["pull_complete"] <= len(invented)
        assert bob.parts.peers.row(identity_of(1).peer_id)["reasons"] == {}


@pytest.mark.parametrize(("as_text", "is_empty", "num_charged"), [(False, False, 1), (True, False, 0), (True, True, 1)])
async def test_an_answer_that_lacks_own_groups_is_charged_once(tmp_path, as_text, is_empty, num_charged):
    items = tuple(PullItem(bytes([n]) * 32, "p", n, 5, 1.0, as_text=as_text, is_own=True) for n in range(3))
    batch, missing = PullRequest(PullSource("p", as_text), items), [item.id for item in items[1:]]
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        for _ in range(2):
            alice.wiring.pull._note_outcome(batch, FetchOutcome.COMPLETE, missing=missing, is_empty=is_empty)
        assert alice.parts.peers.row("p")["reasons"].get("pull_complete", 0) == num_charged


async def test_a_pull_that_fails_while_this_nodes_own_network_is_down_costs_its_peer_nothing(tmp_path):
    batch = PullRequest(PullSource("p", as_text=False), (PullItem(bytes(32), "p", 1, 5, 1.0),))
    swarm = LightSwarm(tmp_path, manifest_of())
    async with swarm.node(1) as alice:
        note = partial(alice.wiring.pull._note_outcome, batch, missing=[], is_empty=True)
        for outcome in (FetchOutcome.UNREACHABLE, FetchOutcome.TIMED_OUT, FetchOutcome.BROKEN, FetchOutcome.TOO_LARGE):
            note(outcome)
        assert alice.parts.peers.row("p")["reasons"] == {"pull_too_large": 1}
        async with swarm.node(2):
            await eventually(lambda: alice.gossip.state.state is SwarmPhase.CONNECTED)
            note(FetchOutcome.TIMED_OUT)
        assert alice.parts.peers.row("p")["reasons"] == {"pull_too_large": 1, "pull_timed_out": 1}


@pytest.mark.parametrize(("outcome", "left"), [(FetchOutcome.BUSY, 1000), (FetchOutcome.BROKEN, 100)])
async def test_bytes_that_do_not_arrive_count_in_no_download_limit(tmp_path, monkeypatch, outcome, left):
    """An answer that breaks may have ended within an item, whose bytes count."""
    batch = PullRequest(PullSource("p", as_text=False), (PullItem(bytes(32), "p", 1, 900, 1.0),))
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        monkeypatch.setattr(alice.gossip, "fetch", AsyncMock(return_value=Fetched((), outcome)))
        pull, now = alice.wiring.pull, time.monotonic()
        pull._allowance = TokenBucket(rate_per_s=1e-6, burst=1000)
        pull._allowance.spend(900, now=now)  # as `_dispatch` does
        await pull._pull(batch)
        assert pull._allowance.left(now=now) == pytest.approx(left)


async def test_a_group_that_came_in_another_tokenizers_ids_is_requested_as_text(tmp_path):
    """Another peer may announce and serve the token ids of a group whose sender announces it as text."""
    alice_id, mallory_id, group_id = identity_of(1).peer_id, identity_of(3).peer_id, bytes(32)
    async with LightSwarm(tmp_path, manifest_of(other_tokenizers="text")).node(2) as bob:
        wiring = Wiring(bob.parts)
        handler, queue = wiring.announcements, wiring.announcements.queue
        theirs = Announcement(group_id, 7, 278, 5, b"another ", 3, time.time())
        own = bob.parts.context.about.tokenizer_prefix
        handler.handle(mallory_id, replace(theirs, tokenizer=own, sender=alice_id).to_bytes())
        handler.handle(alice_id, theirs.to_bytes())
        batch = queue.next_request(most=1, need=None, max_bytes=1 << 20)
        assert batch is not None and batch.source == (mallory_id, False)
        refused = Refused(Refusal("tokenizer", ""), alice_id, group_id, signed=True)
        assert wiring.pull._settle(batch, [refused]) == {group_id}
        batch = queue.next_request(most=1, need=None, max_bytes=1 << 20)
        assert batch is not None and batch.source == (alice_id, True)
        handler.handle(mallory_id, replace(theirs, tokenizer=own, sender=alice_id).to_bytes())
        assert len(queue) == 1


@pytest.mark.parametrize(("largest", "most"), [(1 << 20, 16), (4 << 20, 4)])
async def test_no_answer_of_allowed_groups_is_too_large(tmp_path, largest, most):
    """A peer may hold larger groups than another peer announced."""
    manifest = RunManifest(name="light", task="gsm8k", wire={"max_envelope_bytes": largest})
    async with LightSwarm(tmp_path, manifest).node(1) as alice:
        assert alice.wiring.pull._most == most
