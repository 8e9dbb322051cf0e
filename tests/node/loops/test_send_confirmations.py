"""Confirmations that a group arrived: that of a new peer counts only if the peer was sent the group or can show it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from bench.stubs.stub_node import stub_group
from ftis_node.backoff import BackoffTable, doubling
from ftis_node.config.node import NodeSettings
from ftis_node.gossip.loopback import LoopbackGossip
from ftis_node.node.daemon import serve_last_groups
from ftis_node.node.loops import confirmations
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.wiring import Wiring
from ftis_node.records.envelope import open_announcement
from ftis_node.replay.lifecycle import ReleaseReason
from tests.node.light_swarm import RNG, LightSwarm, held, identity_of, manifest_of
from tests.node.nodes import ME, components, events_of
from tests.replay.test_buffer import accepted
from tests.waiting import eventually

NEW_PEER = 40
INVALID = b"\x0a\x01x"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(confirmations, "REANNOUNCE_PERIOD_S", 0.05)
    monkeypatch.setattr(confirmations, "REANNOUNCE_CHECK_S", 0.5)


@asynccontextmanager
async def confirming_peer(swarm: LightSwarm, *, gives: Any = ()) -> AsyncIterator[LoopbackGossip]:
    """Join a peer that confirms each announcement when it receives it, and replies to each request with `gives`."""
    gossip = swarm.join(NEW_PEER)

    async def lookup(ids: Any) -> Any:
        return gives

    async def confirm_all() -> None:
        async for message in gossip.announcements():
            assert await gossip.confirm(message.sender, [open_announcement(message.payload).id])

    gossip.serve(lookup)
    await gossip.start()
    confirming = asyncio.create_task(confirm_all())
    try:
        yield gossip
    finally:
        confirming.cancel()
        with suppress(asyncio.CancelledError):
            await confirming
        await gossip.close()


@pytest.mark.parametrize("gives", [(), (INVALID,)], ids=["nothing", "invalid"])
async def test_a_new_peers_confirmation_stops_no_announcement_and_frees_no_slot(tmp_path, gives):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    swarm.loses = lambda sender, receiver, kind, message: receiver == 2 and kind == "announced" and message.attempt < 2
    async with swarm.node(1) as alice, confirming_peer(swarm, gives=gives):
        counters, confirmations = alice.parts.context.counters, alice.parts.peers.confirmations
        confirmations.pending = BackoffTable[bytes](doubling(0.3))
        await swarm.publish(alice, 3)
        await eventually(lambda: counters.confirmations_unproven >= 3)
        await alice.wiring.deliver_loop._release()
        assert confirmations.num_confirmed == 0
        assert len(alice.parts.store.reader.own_ready()) == 3, "a slot is free"
        assert len(confirmations.pending) == 3, "not announced again"
        assert alice.parts.peers.registry.seen(identity_of(NEW_PEER).peer_id).confirmed == 0
        async with swarm.node(2) as bob:
            await eventually(lambda: held(bob) == 3)
            await eventually(lambda: confirmations.num_confirmed == 3)
            await alice.wiring.deliver_loop._release()
            assert alice.parts.store.reader.figures().released == {"delivered": 3}
            assert len(confirmations.pending) == 0


async def test_the_confirmation_of_a_new_peer_that_was_sent_the_group_counts(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    async with swarm.node(1) as alice:
        await swarm.publish(alice, 2)
        first, second = alice.parts.store.reader.own_ready()
        new_peer = swarm.join(NEW_PEER)
        await new_peer.start()
        fetched = await new_peer.fetch(alice.parts.context.peer_id, [bytes(32), first])
        assert len(fetched.items) == 1
        assert await new_peer.confirm(alice.parts.context.peer_id, [first, second])
        assert alice.parts.peers.confirmations.num_confirmed == 1
        await eventually(lambda: alice.parts.context.counters.confirmations_unproven == 1)
        assert list(alice.parts.peers.confirmations.confirmed_ids) == [first]
        await new_peer.close()


async def test_the_confirmation_of_a_new_peer_that_shows_the_group_counts(tmp_path):
    """The peer has the group from another peer, or from before the sender's restart."""
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    async with swarm.node(1) as alice:
        await swarm.publish(alice)
        (group_id,) = alice.parts.store.reader.own_ready()
        async with confirming_peer(swarm, gives=alice.parts.store.reader.envelopes([group_id])) as holder:
            await holder.confirm(alice.parts.context.peer_id, [group_id])
            await eventually(lambda: alice.parts.peers.confirmations.num_confirmed == 1)


async def test_groups_of_an_earlier_start_that_a_peer_asks_for_do_not_count_as_the_last_ones(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    async with swarm.node(1) as alice:
        await swarm.publish(alice, 2)
        for group_id in alice.parts.store.reader.own_ready():
            await alice.parts.store.release_ready(group_id, ReleaseReason.DISCARDED)
    swarm.loses = lambda sender, receiver, kind, message: kind == "announced" and message.attempt == 0
    async with swarm.node(2) as bob, swarm.node(1, shutdown_serve_s=60) as alice:
        ours = alice.parts.peers.confirmations
        await eventually(lambda: len(ours.confirmed_ids) == 2)
        ours.pending = BackoffTable[bytes](doubling(0.2))
        await swarm.publish(alice)
        await serve_last_groups(alice.wiring)
        assert (held(bob), ours.num_confirmed, alice.parts.context.counters.groups_sent) == (3, 1, 1)


async def test_a_group_that_a_peer_confirms_before_its_announcement_is_not_announced_again(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0), window_s=2.0)
    async with swarm.node(1) as alice, swarm.node(2) as bob:
        await swarm.publish(alice)
        await alice.publish(stub_group(alice.parts.context.identity, swarm.manifest, RNG, num_tokens=4))
        await eventually(lambda: len(alice.parts.store.reader.own_ready()) == 2)
        ours = alice.parts.peers.confirmations
        ours.confirm(bob.parts.context.peer_id, alice.parts.store.reader.own_ready()[1])
        await eventually(lambda: alice.parts.context.counters.groups_sent == ours.num_confirmed == 2)
        assert len(ours.pending) == 0


async def test_a_group_waits_for_a_confirmation_after_its_last_announcement_too(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of(foreign_groups=0))
    async with swarm.node(1) as alice:
        await swarm.publish(alice)
        ours = alice.parts.peers.confirmations
        ours.pending = BackoffTable[bytes](doubling(0.001))
        [group_id] = alice.parts.store.reader.own_ready()
        attempts = []
        ours.pending.failed(group_id, now=time.monotonic())
        while group_id in ours.pending:
            await asyncio.sleep(0.05)
            await alice.wiring.reannounce_loop._announce_again()
            attempts.append(group_id in ours.pending)
        assert attempts == [True] * confirmations.MAX_ANNOUNCED_AGAIN + [False]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["too old", "from the future"])
async def test_a_stale_group_frees_its_slot(tmp_path, is_ahead):
    """Peers refuse a group from the future, which was made before the clock was set back."""
    settings = NodeSettings(model="m", role="generator", roles={"follow": identity_of(2).peer_id})
    with components(tmp_path, settings=settings, slots=SlotPool(1, held=1)) as node:
        age_s = -7200 if is_ahead else node.context.manifest.step.max_age_s + 1
        assert node.store.buffer.admit(accepted(ME, 1, created_at=time.time() - age_s), own=True)
        await Wiring(node).deliver_loop._release()
        assert [event["reason"] for event in events_of(node, "released")] == ["stale"]
        assert node.store.reader.ready_counts() == (0, 0)
        async with asyncio.timeout(5):
            await node.slots.charge()
