"""Invalid announcements and backfill replies of peers: whole loops over the loopback swarm."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.stubs.stub_node import StubNode
from ftis_node.backoff import BackoffTable, doubling
from ftis_node.gossip import Fetched, FetchOutcome, GossipMessage
from ftis_node.node.loops import announcement_backfill
from ftis_node.node.wiring import Wiring
from ftis_node.records.envelope import Announcement, Envelope, join_announcements, open_envelope
from ftis_node.records.peer_messages import BackfillRequest, open_backfill_request
from ftis_node.swarm.rate_limits import minute_buckets
from tests.node.light_swarm import LightSwarm, held, identity_of, manifest_of, own_announcement
from tests.node.loops.test_pull import quick
from tests.waiting import eventually

__all__ = ["quick"]  # a fixture of all tests here
PEER = identity_of(2).peer_id
REST_S = 1.0  # ten times the period of repeated announcements


def announced(number: int, *, ahead_s: float = 0.0) -> Announcement:
    return Announcement(number.to_bytes(32), number, 278, 5, bytes(8), 3, time.time() + ahead_s)


def pulling(
    node: StubNode, replies: list[bytes], *, outcome: FetchOutcome = FetchOutcome.COMPLETE
) -> tuple[Wiring, list[BackfillRequest]]:
    """Return loops whose backfill queries get these replies, and the list of the queries."""
    requests: list[BackfillRequest] = []

    async def reply(peer_id: str, query: bytes, **more: Any) -> Fetched:
        requests.append(open_backfill_request(query))
        return Fetched(tuple(replies), outcome)

    node.parts.gossip.request_backfill = reply  # type: ignore[method-assign]
    return Wiring(node.parts), requests


async def catch_up(wiring: Wiring, peer_id: str = PEER) -> None:
    """Query a member for what was missed, as the backfill loop does."""
    wiring.backfill.catch_up(peer_id)
    async with asyncio.TaskGroup() as tasks:
        wiring.backfill._begin_queries(tasks)


@pytest.mark.parametrize(("ahead_s", "num_requests"), [(0.0, 4), (3600.0, 1)])
async def test_a_peer_whose_replies_are_all_useless_is_not_queried_for_a_while(tmp_path, ahead_s, num_requests):
    """A learner with too few groups queries silent peers every few seconds; each reply would be a page to read."""
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        replies = [announced(number, ahead_s=ahead_s).to_bytes() for number in range(1, 9)]
        wiring, requests = pulling(alice, replies)
        await catch_up(wiring)  # for the groups of all senders
        requests.clear()
        for _ in range(4):
            await catch_up(wiring)
        assert len(requests) == num_requests


async def test_gaps_of_many_senders_need_one_look_at_each_member(tmp_path, monkeypatch):
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        wiring, _ = pulling(alice, [], outcome=FetchOutcome.BUSY)
        for sender in range(50):
            for number in (1, 3):
                wiring.announcements.tracker_of(f"sender-{sender}").note(number, at=0.0)
        looks = list[str]()
        monkeypatch.setattr(wiring.backfill, "_may_ask", lambda peer_id: looks.append(peer_id) or True)
        members = [f"member-{number}" for number in range(20)]
        async with asyncio.TaskGroup() as tasks:
            wiring.backfill._fill_gaps(tasks, members)
            assert (len(tasks._tasks), looks) == (announcement_backfill.MAX_AT_ONCE, members)


async def test_no_group_from_before_the_reset_of_the_buffer_is_requested(tmp_path):
    """Useless replies would pause the queries to the peers that send them."""
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        reset_at = int(time.time()) - 10
        alice.parts.store.buffer._db.execute("INSERT INTO totals (name, value) VALUES ('reset_at', ?)", (reset_at,))
        wiring, requests = pulling(alice, [])
        await catch_up(wiring)
        assert requests and all(request.since >= reset_at for request in requests)


async def test_a_last_number_from_the_directory_makes_a_valid_request(tmp_path):
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        wiring, requests = pulling(alice, [])
        wiring.announcements.tracker_of(PEER).note(1, at=0.0)
        wiring.announcements.tracker_of(PEER).note_tail(2**63 - 1)
        async with asyncio.TaskGroup() as tasks:
            wiring.backfill._fill_gaps(tasks, [PEER])
        assert [(request.first_number, request.last_number) for request in requests] == [(2**63 - 2**20 + 1, 2**63 - 1)]


async def test_each_group_of_a_batch_counts_in_the_rate_limit(tmp_path):
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        handler = alice.wiring.announcements
        handler._limiter = minute_buckets(3)
        (batch,) = join_announcements([announced(number) for number in range(1, 8)])
        handler._take(GossipMessage(PEER, batch.to_bytes()))
        assert (len(handler.queue), handler.tracker_of(PEER).highest) == (3, 3)
        assert alice.parts.context.counters.refused["announcement_flood"] == 1


async def test_old_announcements_published_again_neither_use_up_their_authors_rate_nor_cost_reputation(tmp_path):
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        handler, peers = alice.wiring.announcements, alice.parts.peers
        handler._limiter = minute_buckets(3)
        old = [
            announced(9, ahead_s=-1e6).to_bytes(),
            *(announced(number).to_bytes() for number in (1, 2)),
            b"\xff junk",
        ]
        for payload in old * 50:
            handler._take(GossipMessage(PEER, payload))
        assert handler.tracker_of(PEER).highest == 2 and len(handler.queue) == 2
        assert peers.row(PEER)["score"] == pytest.approx(-2.0, abs=0.01), "equal bytes are charged once"
        for number in range(3, 60):
            handler._take(GossipMessage(PEER, announced(number).to_bytes()))
        assert handler.tracker_of(PEER).highest == 3
        assert alice.parts.context.counters.refused["announcement_flood"] == 56
        assert peers.row(PEER)["score"] == pytest.approx(-2.0, abs=0.01)


async def test_only_usable_announcements_of_peers_that_are_not_banned_show_an_order(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of())
    banned = identity_of(3).peer_id
    async with swarm.node(1) as alice:
        handler = Wiring(alice.parts).announcements
        alice.parts.peers.ban(banned, 60.0)
        useless = (
            announced(1, ahead_s=-1e6),
            announced(2, ahead_s=1e6),
            replace(announced(3), envelope_bytes=1 << 31),
            replace(announced(4), sender=banned),
            replace(announced(5), attempt=1),
        )
        for one in (*useless, announced(6), replace(announced(7), sender=identity_of(4).peer_id)):
            handler.handle(PEER, one.to_bytes())
        noted = [alice.parts.peers.copies._announced.at(announced(number).id) is not None for number in range(1, 8)]
        assert noted == [False] * 5 + [True] * 2


def junk(alice: StubNode) -> Callable[[Any], Any]:
    async def give(ids: Any) -> list[bytes]:
        return [b"\xff junk"] * len(ids)

    return give


def oldest(alice: StubNode) -> Callable[[Any], Any]:
    async def give(ids: Any) -> list[bytes]:
        return [envelope for _, envelope in alice.parts.store.reader.all_groups()][:1]

    return give


@pytest.mark.parametrize(("serve", "reason"), [(junk, "parse"), (oldest, "unsolicited")])
async def test_one_fault_of_a_new_peer_is_charged_once_per_group(tmp_path, serve, reason):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    async with swarm.node(1) as alice, swarm.node(2) as bob:
        await swarm.publish(alice, 1)
        await eventually(lambda: held(bob) == 1)
        alice.parts.peers.confirmations.pending = BackoffTable[bytes](doubling(0.1))
        alice.gossip.serve(serve(alice))
        await swarm.publish(alice, 1)
        await eventually(lambda: bob.parts.context.counters.refused[reason])
        num_sent = alice.gossip.counters.envelopes_out
        await asyncio.sleep(REST_S)
        assert bob.parts.context.counters.refused[reason] == 1
        assert alice.gossip.counters.envelopes_out == num_sent
        assert bob.parts.peers.row(identity_of(1).peer_id)["reasons"] == {reason: 1}


@pytest.mark.parametrize("reason", ["signature", "unsolicited"])
async def test_an_invalid_copy_of_a_group_from_another_peer_does_not_block_the_group(tmp_path, reason):
    """A group's id is the hash of its body, so a copy with an invalid signature, or unrequested, has the same id."""
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    swarm.loses = lambda sender, receiver, kind, message: sender == 1 and kind == "announced"
    async with swarm.node(1) as alice, swarm.node(2, directory_period_s=150.0) as bob, swarm.node(3) as mallory:
        await asyncio.sleep(0.3)
        alice.parts.peers.confirmations.pending = BackoffTable[bytes](doubling(3600))
        await swarm.publish(alice, 1)
        announcement = own_announcement(alice)
        ((_, data),) = alice.parts.store.reader.all_groups()
        valid = open_envelope(data)
        copy = Envelope(valid.id, valid.body, bytes(64)).to_bytes() if reason == "signature" else data

        async def give(ids):
            return [copy]

        mallory.gossip.serve(give)
        claimed = announcement.to_bytes() if reason == "signature" else announced(7).to_bytes()
        await mallory.parts.gossip.announce(claimed)
        await eventually(lambda: bob.parts.context.counters.refused[reason])
        swarm.loses = lambda *_: False
        await alice.parts.gossip.announce(announcement.to_bytes())
        await eventually(lambda: held(bob) == 1)
        assert bob.parts.context.counters.refused[reason] == 1


async def test_a_false_announcement_as_text_does_not_block_the_group(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0, other_tokenizers="text"))
    swarm.loses = lambda sender, receiver, kind, message: sender == 1 and kind == "announced"
    alice_id = identity_of(1).peer_id
    async with swarm.node(1) as alice, swarm.node(2, directory_period_s=150.0) as bob, swarm.node(3) as mallory:
        await asyncio.sleep(0.3)
        alice.parts.peers.confirmations.pending = BackoffTable[bytes](doubling(3600))
        await swarm.publish(alice, 1)
        announcement = own_announcement(alice)
        await mallory.parts.gossip.announce(replace(announcement, tokenizer=b"another ").to_bytes())
        await eventually(lambda: bob.parts.peers.row(identity_of(3).peer_id)["reasons"] == {"pull_complete": 1})
        swarm.loses = lambda *_: False
        await alice.parts.gossip.announce(announcement.to_bytes())
        await eventually(lambda: held(bob) == 1)
        assert bob.parts.peers.row(alice_id)["reasons"] == {}


async def test_no_peer_makes_another_a_refused_sender(tmp_path):
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        handler, theirs = Wiring(alice.parts).announcements, replace(announced(1), tokenizer=b"another ")
        for number in range(1, 20):
            handler.handle(PEER, replace(theirs, number=number, sender=identity_of(3).peer_id).to_bytes())
        assert alice.parts.peers.refused_senders() == []
        for number in range(1, 20):
            handler.handle(PEER, replace(theirs, number=number).to_bytes())
        assert [sender.peer_id for sender in alice.parts.peers.refused_senders()] == [PEER]
