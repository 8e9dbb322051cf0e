"""Links that are slow, lossy or interrupted."""

import asyncio
import os
import time
from typing import Any

import numpy as np
import pytest

from bench.stubs.stub_node import StubNode, stub_group
from ftis_node.config.manifest import RunManifest
from ftis_node.gossip import FetchOutcome
from tests.gossip.helpers import BodyStore, announce_until_received
from tests.network.conftest import all_connected, num_members
from tests.waiting import eventually

PARTITION_S = float(os.environ.get("FTIS_TEST_PARTITION_S", "45"))  # from about 40 s on libp2p closes connections
HEALED_WITHIN_S = 60.0
RNG = np.random.default_rng(0)


async def _are_partitioned(nodes: list[Any]) -> bool:
    return await num_members(nodes) == [2] * 6


@pytest.mark.timeout(HEALED_WITHIN_S + PARTITION_S + 80)
async def test_both_halves_have_all_recent_groups_after_a_partition(start, internet):
    manifest = RunManifest(name="network", task="gsm8k")
    hosts, bootstrap_host = [internet.host(f"host-{number}") for number in range(6)], internet.host("bootstrap")
    bootstrap = await start(bootstrap_host, is_bootstrap=True, forward_s=1)
    given = {"peers": tuple(bootstrap.addresses), "light": manifest}
    nodes = await asyncio.gather(*(start(host, **given) for host in hosts))
    gossips = [node.gossip for node in nodes]
    await all_connected(gossips, within_s=40)
    await _publish(nodes, manifest)
    await eventually(lambda: _foreign(nodes) == [5] * 6, within_s=40)
    internet.cut([*hosts[:3], bootstrap_host], hosts[3:])
    await asyncio.sleep(PARTITION_S)
    await eventually(lambda: _are_partitioned(gossips), within_s=20)
    for _ in range(3):
        await _publish(nodes, manifest)
    await eventually(lambda: _foreign(nodes) == [5 + 3 * 2] * 6, within_s=20)
    internet.heal()
    await eventually(lambda: _foreign(nodes) == [5 * 4] * 6, within_s=HEALED_WITHIN_S)
    await all_connected(gossips, within_s=HEALED_WITHIN_S)


async def _publish(nodes: list[StubNode], manifest: RunManifest) -> None:
    """Publish a group of 64 KiB from each node."""
    for node in nodes:
        await node.publish(stub_group(node.parts.context.identity, manifest, RNG, num_tokens=680))


def _foreign(nodes: list[StubNode]) -> list[int]:
    return [node.parts.store.reader.figures().groups_foreign for node in nodes]


@pytest.mark.timeout(120)
async def test_nodes_transfer_at_a_round_trip_of_300_ms_and_5_percent_loss(start, internet):
    bootstrap = await start(internet.host("bootstrap"), is_bootstrap=True, forward_s=1)
    given = {"peers": tuple(bootstrap.addresses)}
    far = await start(internet.host("far", delay_s=0.15, loss=0.05), **given)
    near = [await start(internet.host(f"near-{number}"), **given) for number in range(2)]
    nodes = [far, *near]
    await all_connected(nodes, within_s=60)
    for sender, receiver in ((far, near[0]), (near[1], far)):
        await announce_until_received(sender, [node for node in nodes if node is not sender], sender.peer_id.encode())
        for size in (64 << 10, 1 << 20):
            shelf = BodyStore(os.urandom(size))
            sender.serve(shelf.lookup)
            began_at = time.monotonic()
            fetched = await receiver.fetch(sender.peer_id, shelf.ids)
            assert (fetched.outcome, fetched.items) == (FetchOutcome.COMPLETE, tuple(shelf.bodies.values()))
            assert time.monotonic() - began_at > 0.3, "the link was not slow"
