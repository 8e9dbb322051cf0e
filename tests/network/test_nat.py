"""Nodes behind NATs connect through a bootstrap node that relays their traffic."""

import itertools
import json
import os
from contextlib import ExitStack
from typing import Any

import pytest

from ftis_node.gossip import FetchOutcome
from ftis_node.gossip.p2pd.relay_limit import fetch_limit
from tests.gossip.helpers import BodyStore, announce_until_received
from tests.network.conftest import all_connected
from tests.node.support import started, write_manifest


async def _is_relayed(node: Any, to: Any) -> bool:
    """Return whether a node is connected to another one, and only through a relay."""
    peers = [peer for peer in await node.connected_peers() if peer.peer_id == to.peer_id]
    addresses = [address for peer in peers for address in peer.addresses]
    return bool(addresses) and all("/p2p-circuit" in address for address in addresses)


@pytest.mark.timeout(120)  # libp2p looks for a relay about 20 s after failed dials
async def test_nodes_behind_two_nats_connect_through_a_relay(start, internet):
    bootstrap = await start(internet.host("bootstrap"), is_bootstrap=True, forward_s=1)
    given = {"peers": tuple(bootstrap.addresses)}
    outside = await start(internet.host("outside"), **given)
    nats = [internet.nat(name, keeps_ports=False) for name in ("nat-1", "nat-2")]  # prevents hole punching
    hidden = [await start(internet.behind(nat, f"behind-{nat.address}"), **given) for nat in nats]
    nodes = [outside, *hidden]
    await all_connected(nodes, within_s=80)
    for node, other in (hidden, hidden[::-1]):
        assert await _is_relayed(node, other)
    for number, (node, other) in enumerate(itertools.permutations(nodes, 2)):
        shelf = BodyStore(*(os.urandom(size) for size in (64 << 10, 1 << 20)))
        node.serve(shelf.lookup)
        await announce_until_received(node, [other], f"from {number}".encode())
        fetched = await other.fetch(node.peer_id, shelf.ids)
        assert (fetched.outcome, set(fetched.items)) == (FetchOutcome.COMPLETE, set(shelf.bodies.values()))
    for node, other in (hidden, hidden[::-1]):
        assert await _is_relayed(node, other), "the connection is not relayed any more"


async def test_a_bootstrap_node_raises_the_relay_limits_of_libp2p(start, internet):
    """p2pd has two relay services, and either may serve. So the test starts it several times."""
    host = internet.host("bootstrap")
    node = await start(internet.host("outside"), use_nat_helpers=False)
    for _ in range(3):
        bootstrap = await start(host, is_bootstrap=True)
        control = node._supervisor.session.client
        (address,) = bootstrap.addresses
        await control.connect(bootstrap.peer_id, [address.rsplit("/p2p/", 1)[0]], timeout_s=5)
        limit = await fetch_limit(control, bootstrap.peer_id, timeout_s=5)
        assert (limit.num_bytes, limit.duration_s) == (1 << 32, 1800)
        await bootstrap.close()
    assert await fetch_limit(control, bootstrap.peer_id, timeout_s=2) is None, "the bootstrap node has ended"


@pytest.mark.timeout(300)
def test_a_real_node_behind_a_nat_exchanges_groups_and_trains(internet, tmp_path, tiny_models):
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=60.0)
    bootstrap_host, nat = internet.host("bootstrap"), internet.nat("nat", keeps_ports=False)
    hosts = {"s": internet.host("outside"), "m": internet.behind(nat, "behind")}
    with ExitStack() as stack:
        bootstrap = started(tmp_path / "b", "bootstrap", "--listen", bootstrap_host.listen, on=bootstrap_host.inside())
        address = stack.enter_context(bootstrap).first_line()
        common = ("--run", str(run), "--peers", address, "--engine", "torch", "--steps", "2")
        nodes = {
            size: stack.enter_context(
                started(tmp_path / size, "join", "--model", str(tiny_models[size]), *common,
                        "--listen", host.listen, on=host.inside())
            )
            for size, host in hosts.items()
        }  # fmt: skip
        for node in nodes.values():
            assert node.wait(timeout_s=200) == 0, node.log.read_text()[-3000:]
    for node in nodes.values():
        swarm = json.loads((node.home / "status.json").read_text())["swarm"]
        assert swarm["groups_received"] >= 4
        assert swarm["groups_confirmed"] >= 4
        assert swarm["groups_refused"] == {}
