"""Fixtures: one victim, one honest peer, and a separate attacker for each test."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from tests.attacks.member import Member, joined, sending
from tests.attacks.victim import MANIFEST, SETTINGS, Victim
from tests.node.support import ANY_PORT, started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

NUMBERS = itertools.count()


@pytest.fixture(scope="package")
def sockets() -> Iterator[Path]:
    """Yield a folder whose path is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="ftis") as folder:
        yield Path(folder)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def victim(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> AsyncIterator[Victim]:
    """Yield a running node without peers."""
    folder = tmp_path_factory.mktemp("attacks")
    run, home = folder / "run.toml", folder / "home"
    run.write_text(MANIFEST.to_toml())
    home.mkdir()
    (home / "node.toml").write_text(SETTINGS)
    arguments = ("--model", str(tiny_models["s"]), "--run", str(run), "--listen", ANY_PORT, "--name", "victim")
    with started(home, "join", *arguments) as node:
        victim = Victim(node)
        node.wait_for(Home(home).running_url, timeout_s=120)

        async def listens() -> bool:
            return bool(await victim.addresses())

        await victim.until(listens, within_s=60)
        yield victim


@pytest.fixture(scope="package")
def maker(victim: Victim, tiny_models: Mapping[str, Path]) -> GroupMaker:
    """Return a maker of valid groups for the victim's run."""
    return GroupMaker(tiny_models["s"], load_manifest(str(victim.node.home / "run.toml")))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def honest(victim: Victim, maker: GroupMaker, sockets: Path) -> AsyncIterator[Member]:
    """Yield a peer that keeps sending valid groups; the victim trains on them before the first attack."""
    async with joined(sockets / "honest", maker, victim) as member, sending(member):

        async def trains() -> bool:
            status = await victim.status()
            return bool(status["swarm"]["groups_received"] and status["learner"]["step"] >= 2)

        await victim.until(trains, within_s=90)
        victim.resident_bytes_before = victim.resident_bytes()
        yield member


@pytest_asyncio.fixture(loop_scope="package")
async def attacker(honest: Member, victim: Victim, maker: GroupMaker, sockets: Path) -> AsyncIterator[Member]:
    """Yield a peer that is new to the victim."""
    async with joined(sockets / str(next(NUMBERS)), maker, victim) as member:
        yield member
