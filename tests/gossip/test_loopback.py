"""The in-memory implementation: delay and loss from functions, repeatable with a seed."""

import asyncio

from ftis_node.gossip import FetchOutcome, GossipLimits
from ftis_node.gossip.loopback import LoopbackGossip, LoopbackSwarm
from tests.gossip.helpers import BodyStore, receive


async def _nodes(swarm: LoopbackSwarm, *names: str, limits: GossipLimits | None = None) -> list[LoopbackGossip]:
    nodes = [swarm.join(name, run_id="r", limits=limits) for name in names]
    for node in nodes:
        await node.start()
    return nodes


async def test_announcements_and_bodies_are_delayed():
    swarm = LoopbackSwarm(delay_s=lambda sender, receiver: 0.5 if receiver == "far" else 0.0)
    sender, near, far = await _nodes(swarm, "sender", "near", "far")
    store = BodyStore(b"body")
    sender.serve(store.lookup)
    began = asyncio.get_running_loop().time()
    await sender.announce(b"news")
    await receive(near, b"news")
    assert far.counters.announcements_received == 0, "the announcement is still on its way"
    await receive(far, b"news")
    assert asyncio.get_running_loop().time() - began >= 0.49
    assert (await far.fetch("sender", store.ids, timeout_s=0.1)).outcome is FetchOutcome.TIMED_OUT
    assert (await near.fetch("sender", store.ids)).bodies == (b"body",)


async def test_a_node_that_closes_while_a_request_is_on_its_way_serves_nothing():
    swarm = LoopbackSwarm(delay_s=lambda sender, receiver: 0.1 if receiver == "closing" else 0.0)
    closing, other = await _nodes(swarm, "closing", "other")
    store = BodyStore(b"body")
    closing.serve(store.lookup)
    fetching = asyncio.create_task(other.fetch("closing", store.ids))
    await asyncio.sleep(0)
    await closing.close()
    assert (await fetching).outcome is FetchOutcome.UNREACHABLE
    assert closing.counters.bodies_out == 0


async def test_lost_announcements_and_requests_do_not_arrive():
    swarm = LoopbackSwarm(loses=lambda sender, receiver, payload: receiver == "lossy")
    sender, lossy, other = await _nodes(swarm, "sender", "lossy", "other")
    await sender.announce(b"news")
    await receive(other, b"news")
    assert lossy.counters.announcements_received == 0
    assert (await sender.fetch("lossy", [bytes(32)])).outcome is FetchOutcome.UNREACHABLE
    assert (await lossy.fetch("sender", [bytes(32)])).outcome is FetchOutcome.COMPLETE
