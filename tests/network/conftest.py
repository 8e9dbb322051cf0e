"""Fixtures: simulated hosts, and nodes on them. A machine without network namespaces skips the tests."""

import asyncio
import contextvars
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bench.stubs.stub_node import StubNode
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.gossip import NetworkSettings
from ftis_node.gossip.bootstrap_node import BootstrapNode
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.p2pd.hivemind_bindings import p2pd_path
from ftis_node.records.identity import Identity
from tests.network.hosts import Internet, missing_requirement
from tests.waiting import eventually

Start = Callable[..., Awaitable[Any]]


RUN_ID = "network"


@pytest.fixture
def internet():
    """Yield a simulated internet without hosts."""
    if missing := missing_requirement():
        pytest.skip(missing)
    internet = Internet()
    try:
        yield internet
    finally:
        internet.close()


@pytest.fixture
async def start(internet, tmp_path, monkeypatch):
    """Yield a function that starts a node in this process, with its p2pd on a simulated host."""
    program: contextvars.ContextVar[Path] = contextvars.ContextVar("program")
    monkeypatch.setattr("ftis_node.gossip.p2pd.process.p2pd_path", program.get)
    monkeypatch.setattr("ftis_node.gossip.p2pd.session.check_free", lambda listen: None)  # checks ports of this host
    nodes: list[Any] = []
    numbers = itertools.count()

    async def start_one(host, *, is_bootstrap=False, light=None, **changes):
        identity, number = Identity.generate(), next(numbers)
        program.set(host.program(p2pd_path(), tmp_path / f"p2pd-{number}"))  # restarts of p2pd inherit the context
        values: dict[str, Any] = {"sockets_dir": tmp_path / f"node-{number}", "listen": (host.listen,)}
        settings = NetworkSettings(**values | changes)
        if is_bootstrap:
            node: Any = BootstrapNode(settings, identity=identity)
        elif light is not None:
            node = _light_node(tmp_path / f"home-{number}", settings, identity, light)
        else:
            node = Libp2pGossip(settings, identity=identity, run_id=RUN_ID)
        await node.start()
        nodes.append(node)
        return node

    yield start_one
    await asyncio.gather(*(node.close() for node in nodes))


def _light_node(home: Path, settings: NetworkSettings, identity: Identity, manifest: RunManifest) -> StubNode:
    Home(home).create()
    shards = manifest.wire.announcement_shards
    return StubNode(
        Home(home),
        identity,
        Libp2pGossip(settings, identity=identity, run_id=manifest.run_id, num_shards=shards),
        manifest=manifest,
        settings=NodeSettings(model="none"),
        on_event=lambda name, fields: None,
    )


async def num_members(nodes: list[Any]) -> list[int]:
    """Return to how many other members of the run each node is connected."""
    return [len(await node.members()) for node in nodes]


async def all_connected(nodes: list[Any], *, within_s: float) -> None:

    async def are_connected() -> bool:
        return await num_members(nodes) == [len(nodes) - 1] * len(nodes)

    await eventually(are_connected, within_s=within_s)
