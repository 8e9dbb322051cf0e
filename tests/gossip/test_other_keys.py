"""Peers with RSA, secp256k1 or ECDSA keys over real p2pd: counted and otherwise ignored."""

import asyncio
import os

import base58
import pytest

from ftis_node.gossip import FetchOutcome, Gossip
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.names import RpcService, protocol, topic
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.records.identity import is_peer_id
from tests.attacks.visitors.host import Host, KeyKind, Target, host
from tests.gossip.conftest import Start
from tests.gossip.helpers import BodyStore, announce_until_received
from tests.waiting import eventually

RUN = "r"
SECRET = bytes(range(32))


async def two_members(start: Start, *, secret: bytes | None = None, peers: tuple[str, ...] = ()) -> list[Libp2pGossip]:
    """Start two members of a run that receive each other's announcements."""
    first = await start(secret=secret, peers=peers)
    nodes = [first, await start(secret=secret, peers=peers or tuple(first.addresses))]
    await check_exchange(nodes)
    return nodes


async def check_exchange(nodes: list[Libp2pGossip]) -> None:
    """Check that each node lists the other as a member, receives its announcements, and is served by it."""
    for node, other in (nodes, nodes[::-1]):
        await eventually(lambda node=node, other=other: _has(node, other.peer_id))
        await announce_until_received(other, [node], os.urandom(8))
        store = BodyStore(os.urandom(64))
        other.serve(store.lookup)
        assert (await node.fetch(other.peer_id, store.ids)).outcome is FetchOutcome.COMPLETE
        assert node.process_id is not None
        assert node.counters.restarts == 0


async def _has(node: Gossip, peer_id: str) -> bool:
    return peer_id in await node.members()


@pytest.mark.parametrize(
    ("kind", "secret"), [(KeyKind.ECDSA, None), (KeyKind.RSA, SECRET)], ids=["ecdsa", "rsa-secret"]
)
async def test_a_host_with_another_key_is_counted_and_ignored(start, tmp_path, kind, secret):
    nodes = await two_members(start, secret=secret)
    async with host(tmp_path / "v", kind) as foreign:
        victim = nodes[0]
        assert not is_peer_id(base58.b58decode(foreign.peer_id))
        await foreign.connect(Target(victim.addresses[0], RUN))
        await eventually(lambda: victim.counters.non_ed25519.get("connection") == 1)
        await _ask(foreign, victim, service=RpcService.HELLO)
        await eventually(lambda: victim.counters.non_ed25519.get("stream") == 1)
        await asyncio.sleep(5 * 0.1)  # several polls of the connections
        assert foreign.peer_id not in {peer.peer_id for peer in await victim.connected_peers()}
        assert victim.counters.non_ed25519["connection"] == 1, "counted once per connection, not at each poll"
        await check_exchange(nodes)


async def _ask(foreign: Host, victim: Libp2pGossip, *, service: RpcService) -> None:
    """Open a stream to a node, and read until the node closes it."""
    name = protocol(victim._run_name, service)
    async with foreign.control.stream(victim.peer_id, name, timeout_s=10) as (reader, _):
        assert await reader.read() == b"", "the node sends no answer"


async def test_announcements_with_another_key_do_not_pass_a_bootstrap_node(start, tmp_path):
    bootstrap = await start(run_id=None, forward_s=0.1, check_s=0.2)
    addresses = tuple(bootstrap.addresses)
    nodes = await two_members(start, peers=addresses)
    async with host(tmp_path / "v", KeyKind.RSA) as foreign:
        await foreign.connect(Target(addresses[0], RUN))
        await eventually(lambda: bootstrap.counters.non_ed25519.get("connection") == 1)
        num_received = [node.counters.announcements_received for node in nodes]
        async with foreign.control.subscribe(topic(RUN, 0)):  # joins the mesh
            while not all(node.counters.non_ed25519.get("message") for node in nodes):
                await foreign.control.publish(topic(RUN, 0), os.urandom(80))
                await asyncio.sleep(0.1)
        assert not any(node.counters.non_ed25519.get("connection") for node in nodes), (
            "the host is connected to no member"
        )
        assert [node.counters.announcements_received for node in nodes] == num_received
        await check_exchange(nodes)
        assert bootstrap._error is None
        assert await bootstrap.connected_peers()


async def test_an_invalid_peer_id_is_unreachable(start):
    node = await start()
    session = node._supervisor.session
    for peer_id in ("", "unknown", "Qm" + "x" * 44, "0" * 52, "12D3KooW" + "1" * 44, "é" * 52, "1" * 99_999):
        assert (await node.fetch(peer_id, [bytes(32)])).outcome is FetchOutcome.UNREACHABLE
        assert await session.is_member(peer_id, RUN, timeout_s=5) is False
        assert await session.directory.join([peer_id]) == 0
        with pytest.raises(P2pdError):
            await session.client.connect(peer_id, [], timeout_s=1)
