"""Fixtures: one victim, one honest peer, and new attackers for each test."""

import tempfile
from pathlib import Path

import pytest
import pytest_asyncio

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.manifest import load_manifest
from tests.attacks.directory_dials import counting_port
from tests.attacks.member import Scene, sending
from tests.attacks.victim import running_victim


@pytest.fixture(scope="package")
def sockets():
    """Yield a folder whose path is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="ftis") as folder:
        yield Path(folder)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def victim(tmp_path_factory, tiny_models):
    async with running_victim(tmp_path_factory.mktemp("attacks"), tiny_models["s"]) as victim:
        yield victim


@pytest.fixture(scope="package")
def maker(victim, tiny_models):
    return GroupMaker(tiny_models["s"], load_manifest(str(victim.node.home / "run.toml")))


@pytest.fixture(scope="package")
def scene(victim, maker, sockets):
    return Scene(victim, maker, sockets)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def dialed(victim):
    """Yield a port that `honest` lists in the directory beside invalid addresses."""
    async with counting_port(victim) as port:
        yield port


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def honest(victim, scene, dialed):
    """Yield a peer that keeps sending valid groups; the victim trains on them before the first attack."""
    async with scene.member() as member, sending(member):
        scene.honest = member
        assert await dialed.register(member) > 0  # early, because a node dials new members once a minute

        async def trains():
            status = await victim.status()
            return bool(status["swarm"]["groups_received"] and status["learner"]["step"] >= 2)

        await victim.until(trains, within_s=120)
        victim.resident_bytes_before = victim.resident_bytes()
        yield member


@pytest_asyncio.fixture(loop_scope="package")
async def attacker(honest, scene):
    async with scene.member() as member:
        yield member
