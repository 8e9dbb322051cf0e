"""The behavior of the interface `Gossip`, over libp2p and in memory."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from ftis_node.gossip import FetchOutcome, Gossip, GossipLimits, GossipMessage, SwarmPhase
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.loopback import LoopbackGossip, LoopbackSwarm
from ftis_node.records.identity import Identity
from tests.gossip.helpers import BodyStore, announce_until_received, random_id, receive, settings
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = GossipLimits(
    max_envelope_bytes=400_000,
    max_request_bytes=700_000,
    max_ids_per_request=8,
    max_queued_announcements=16,
    max_streams_per_peer=2,
)
RUN = "run-a"


@dataclass
class FourNodes:
    """Three members of one run, and an outsider: a connected member of another run."""

    members: list[Gossip]
    outsider: Gossip


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["loopback", "libp2p"])
async def four(request, tmp_path_factory):
    identities = [Identity.generate() for _ in range(4)]
    runs = [RUN, RUN, RUN, "run-b"]
    nodes: list[Any] = []
    if request.param == "loopback":
        swarm = LoopbackSwarm()
        nodes = [swarm.join(one.peer_id, run_id=run, limits=LIMITS) for one, run in zip(identities, runs, strict=True)]
        for node in nodes:
            await node.start()
    else:
        folder = tmp_path_factory.mktemp("g")
        for number, (identity, run) in enumerate(zip(identities, runs, strict=True)):
            peers = tuple(nodes[0].addresses) if nodes else ()
            node = Libp2pGossip(
                settings(folder / str(number), peers=peers), identity=identity, run_id=run, limits=LIMITS
            )
            await node.start()
            nodes.append(node)
    four = FourNodes(members=nodes[:3], outsider=nodes[3])
    for node in four.members:
        await eventually(lambda node=node: node.state.state is SwarmPhase.CONNECTED)
        await announce_until_received(node, [other for other in four.members if other is not node], os.urandom(8))
    await eventually(four.outsider.connected_peers) if request.param == "libp2p" else None
    yield four
    await asyncio.gather(*(node.close() for node in nodes))


async def test_an_announcement_reaches_all_others_and_names_its_sender(four):
    sender, *others = four.members
    received = await announce_until_received(sender, others, b"group 1")
    assert {announcement.sender for announcement in received} == {sender.peer_id}


async def test_own_announcements_are_not_delivered(four):
    sender, other, _ = four.members
    await sender.announce(b"mine")
    await announce_until_received(sender, [other], b"also mine")
    received: list[GossipMessage] = []
    async with asyncio.timeout(10), aclosing(sender.announcements()) as announcements:
        await other.announce(b"theirs")
        async for announcement in announcements:
            received.append(announcement)
            if announcement.payload == b"theirs":
                break
    assert sender.peer_id not in {announcement.sender for announcement in received}


async def test_an_oversize_announcement_is_refused_before_it_is_sent(four):
    num_sent = four.members[0].counters.announcements_sent
    with pytest.raises(ValueError, match="1025 bytes"):
        await four.members[0].announce(bytes(1025))
    assert four.members[0].counters.announcements_sent == num_sent


async def test_a_full_queue_drops_the_oldest_and_counts_them(four):
    sender, receiver, _ = four.members
    await announce_until_received(sender, [receiver], b"empty the queue")
    num_received, num_dropped = receiver.counters.announcements_received, receiver.counters.announcements_dropped
    number = 0
    while receiver.counters.announcements_received < num_received + 40:  # gossipsub loses some on a busy machine
        await sender.announce(b"flood %d" % number)
        await asyncio.sleep(0.005)
        number += 1
    assert receiver.counters.announcements_dropped - num_dropped >= 40 - LIMITS.max_queued_announcements
    with pytest.raises(TimeoutError):
        await receive(receiver, b"flood 0", within_s=0.2)
    await announce_until_received(sender, [receiver], b"the next")


async def test_held_bodies_are_fetched_and_missing_ones_omitted(four):
    server, client, _ = four.members
    store = BodyStore(os.urandom(300_000), os.urandom(17), b"")
    server.serve(store.lookup)
    bytes_out, bytes_in = server.counters.envelope_bytes_out, client.counters.envelope_bytes_in
    fetched = await client.fetch(server.peer_id, [random_id(), *store.ids])
    assert fetched.outcome is FetchOutcome.COMPLETE
    assert sorted(fetched.items) == sorted(store.bodies.values())
    assert client.counters.envelope_bytes_in - bytes_in == server.counters.envelope_bytes_out - bytes_out == 300_017


async def test_text_groups_are_fetched_by_a_separate_request(four):
    server, client, _ = four.members
    exact, text = BodyStore(b"ids"), BodyStore(b"text")
    server.serve(exact.lookup, lookup_text=text.lookup)
    fetched = await client.fetch(server.peer_id, [*exact.ids, *text.ids], as_text=True)
    assert fetched == type(fetched)(items=(b"text",), outcome=FetchOutcome.COMPLETE)
    assert (await client.fetch(server.peer_id, [*exact.ids, *text.ids])).items == (b"ids",)
    server.serve(exact.lookup)
    assert (await client.fetch(server.peer_id, exact.ids, as_text=True)).items == ()


async def test_more_bytes_than_the_limits_are_not_accepted(four):
    server, client, _ = four.members
    for bodies in ([bytes(400_001)], [os.urandom(350_000), os.urandom(350_001)]):
        store = BodyStore(*bodies)
        server.serve(store.lookup)
        fetched = await client.fetch(server.peer_id, store.ids)
        assert fetched.outcome is FetchOutcome.TOO_LARGE
        assert sum(map(len, fetched.items)) <= 700_000


async def test_more_bodies_than_requested_are_not_accepted(four):
    server, client, _ = four.members

    async def lookup(ids):
        return [b"1", b"2", b"3"]

    server.serve(lookup)
    fetched = await client.fetch(server.peer_id, [random_id()])
    assert fetched == type(fetched)(items=(b"1",), outcome=FetchOutcome.TOO_LARGE)


async def test_a_fetch_from_a_slow_server_times_out(four):
    server, client, _ = four.members

    async def slow(ids):
        await asyncio.sleep(30)
        return []

    server.serve(slow)
    num_timed_out = client.counters.fetch_errors.get("timed_out", 0)
    fetched = await asyncio.wait_for(client.fetch(server.peer_id, [random_id()], timeout_s=0.5), 30)
    assert fetched.outcome is FetchOutcome.TIMED_OUT
    assert client.counters.fetch_errors["timed_out"] == num_timed_out + 1


async def test_a_server_without_a_free_slot_answers_busy_and_recovers(four):
    server, client, other = four.members
    store, gate, num_waiting = BodyStore(b"body"), asyncio.Event(), 0

    async def gated(ids):
        nonlocal num_waiting
        num_waiting += 1
        await gate.wait()
        return await store.lookup(ids)

    await eventually(lambda: _is_idle(server, client))
    server.serve(gated)
    first = [asyncio.create_task(client.fetch(server.peer_id, store.ids)) for _ in range(2)]
    await eventually(lambda: num_waiting == 2)
    assert (await client.fetch(server.peer_id, store.ids)).outcome is FetchOutcome.BUSY
    others = asyncio.create_task(other.fetch(server.peer_id, store.ids))
    await eventually(lambda: num_waiting == 3)  # the limit is per peer
    gate.set()
    assert [(await task).items for task in [*first, others]] == [(b"body",)] * 3
    await eventually(lambda: _is_idle(server, client))


async def _is_idle(server: Gossip, client: Gossip) -> bool:
    """Return whether the client has a free slot: earlier streams may still be closing."""
    server.serve(BodyStore().lookup)
    return (await client.fetch(server.peer_id, [random_id()])).outcome is FetchOutcome.COMPLETE


async def test_an_error_while_serving_ends_one_stream_only(four):
    server, client, _ = four.members

    async def failing(ids):
        raise KeyError("a bug")

    server.serve(failing)
    num_faults = server.counters.serve_errors.get("fault", 0)
    assert (await client.fetch(server.peer_id, [random_id()])).outcome is FetchOutcome.BROKEN
    assert server.counters.serve_errors["fault"] == num_faults + 1
    assert await _is_idle(server, client)


async def test_a_confirmation_reaches_the_sender_of_the_bodies(four):
    server, client, _ = four.members
    confirmed: list[tuple[str, Sequence[bytes]]] = []

    async def on_confirm(peer_id, ids):
        confirmed.append((peer_id, ids))

    server.serve(BodyStore().lookup, on_confirm=on_confirm)
    ids = [random_id(), random_id()]
    assert await client.confirm(server.peer_id, ids)
    assert confirmed == [(client.peer_id, ids)]


async def test_a_confirmation_that_the_server_failed_to_store_is_not_counted(four):
    server, client, _ = four.members

    async def on_confirm(peer_id, ids):
        raise OSError("disk full")

    server.serve(BodyStore().lookup, on_confirm=on_confirm)
    num_confirmed = client.counters.confirmed_out
    assert not await client.confirm(server.peer_id, [random_id()])
    assert client.counters.confirmed_out == num_confirmed


async def test_a_backfill_request_is_answered(four):
    server, client, _ = four.members

    async def answer(peer_id, request):
        return [peer_id.encode(), request]

    server.serve(BodyStore().lookup, answer=answer)
    answered = await client.request_backfill(server.peer_id, b"from 3 to 7")
    assert answered.items == (client.peer_id.encode(), b"from 3 to 7")


async def test_records_are_found_by_their_owner_and_expire(four):
    other, owner, reader = four.members
    assert await reader.get_record(other.peer_id) is None
    assert await owner.publish_record(b"speed 1", ttl_s=300.0)
    assert await reader.get_record(owner.peer_id) == b"speed 1"
    assert await owner.publish_record(b"speed 2", ttl_s=301.0)
    assert await reader.get_record(owner.peer_id) == b"speed 2"
    if isinstance(reader, LoopbackGossip):  # hivemind's DHT drops the entries of its nodes
        assert await other.publish_record(b"expires soon", ttl_s=0.1)
        assert await reader.get_record(other.peer_id) == b"expires soon"
        await asyncio.sleep(0.15)
        assert await reader.get_record(other.peer_id) is None


async def test_records_over_the_limits_are_refused(four):
    with pytest.raises(ValueError, match="2049 bytes"):
        await four.members[0].publish_record(bytes(2049), ttl_s=10)
    with pytest.raises(ValueError, match="601"):
        await four.members[0].publish_record(b"", ttl_s=601)


async def test_members_are_the_other_nodes_of_the_run(four):
    for node in four.members:
        others = {other.peer_id for other in four.members if other is not node}
        await eventually(lambda node=node, others=others: _has_members(node, others))
        assert node.state.state is SwarmPhase.CONNECTED
        assert "2 other members" in node.state.reason
    assert await four.outsider.members() == []
    assert four.outsider.state.state is SwarmPhase.STANDALONE


async def _has_members(node: Gossip, others: set[str]) -> bool:
    return set(await node.members()) == others


async def test_runs_do_not_mix(four):
    member, other, _ = four.members
    store = BodyStore(b"of run a")
    member.serve(store.lookup)
    assert await member.publish_record(b"of run a", ttl_s=10)
    num_received = four.outsider.counters.announcements_received
    await announce_until_received(member, [other], b"for run a")
    assert four.outsider.counters.announcements_received == num_received
    assert (await four.outsider.fetch(member.peer_id, store.ids)).outcome is FetchOutcome.UNREACHABLE
    assert not await four.outsider.confirm(member.peer_id, store.ids)
    assert await four.outsider.get_record(member.peer_id) is None


async def test_an_unknown_peer_is_unreachable(four):
    fetched = await four.members[0].fetch(Identity.generate().peer_id, [random_id()], timeout_s=20)
    assert fetched.outcome is FetchOutcome.UNREACHABLE
