"""Fixtures: one victim, one honest peer, and new attackers for each test."""

import asyncio
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.manifest import load_manifest
from tests.attacks.member import Scene
from tests.attacks.victim import running_victim


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def victim(tmp_path_factory, tiny_models):
    async with running_victim(tmp_path_factory.mktemp("attacks"), tiny_models["s"]) as victim:
        yield victim


@pytest.fixture(scope="package")
def scene(victim, tiny_models):
    maker = GroupMaker(tiny_models["s"], load_manifest(str(victim.node.home / "run.toml")))
    with tempfile.TemporaryDirectory(prefix="ftis") as sockets:  # a path that is short enough for unix sockets
        yield Scene(victim, maker, Path(sockets))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def honest(victim, scene):
    """Yield a peer that keeps sending valid groups; the victim trains on them before the first attack."""
    async with scene.member() as member:
        victim.honest, sending = member, asyncio.create_task(member.keep_sending())

        async def trains():
            status = await victim.status()
            return bool(status["swarm"]["groups_received"] and status["learner"]["step"] >= 2)

        try:
            await victim.until(trains, within_s=120)
            victim.resident_bytes_before = victim.resident_bytes()
            yield member
        finally:
            sending.cancel()
            await asyncio.wait({sending})


@pytest_asyncio.fixture(loop_scope="package")
async def attacker(honest, scene):
    async with scene.member() as member:
        yield member
