"""A real node keeps its limits: a full home pauses it, free space resumes it, and it keeps the download rate."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.stubs.stub_node import StubNode
from ftis_node.config.home import Home
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.node.loops import pull
from ftis_node.node.storage.disk_space import HomeLimit, HomeUse, measure_usage
from tests.gossip.helpers import settings as network
from tests.models.tiny_models import save_tiny
from tests.node.light_swarm import LightSwarm, held, identity_of, manifest_of
from tests.node.support import ANY_PORT, RunningNode, started, write_manifest
from tests.waiting import eventually

LIMIT_BYTES = 64_000_000
START_S = 240.0
SOON_S = 120.0
RATE = 40_000
BURST_S = 2.0


def _used_bytes(node: RunningNode) -> int:
    return measure_usage(Home(node.home), keep_checkpoints=99).used_bytes


def _paused(status: Any) -> Any:
    """Return the status if it reports the full home and the started groups are done; it lags behind the events."""
    is_paused = "the home is full" in status["limits"]["paused"] and status["replay"]["waiting"] <= 1
    return status if is_paused else None


@pytest.mark.timeout(600)
def test_a_full_home_pauses_the_node_until_there_is_space(tmp_path: Path) -> None:
    home = tmp_path / "node"
    (home / "backups").mkdir(parents=True)
    (home / "node.toml").write_text(f"[limits]\nhome_bytes = {LIMIT_BYTES}\nnice = 1\n")
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=0)
    join = ("join", "--model", str(save_tiny(tmp_path / "tiny")), "--run", str(run), "--listen", ANY_PORT)
    with started(home, *join) as node:
        node.wait_for(lambda: len(node.events("step")) >= 3, timeout_s=START_S)
        assert {process.nice() for process in node.processes()} == {max(1, psutil.Process().nice())}
        assert _used_bytes(node) < LIMIT_BYTES
        with (home / "backups" / "not-ours.bin").open("wb") as ballast:
            ballast.truncate(LIMIT_BYTES - 10_000_000)
        paused, *_ = node.wait_for(lambda: node.events("paused"), timeout_s=SOON_S)
        assert "the home is full" in paused["reason"]
        assert node.events("disk_reclaimed"), "paused without an attempt to reclaim space"
        status = node.wait_for(lambda: _paused(node.status()), timeout_s=SOON_S)
        num_admitted = len(node.events("admitted"))
        assert status["limits"]["home_bytes"] < status["limits"]["home_limit_bytes"] == LIMIT_BYTES
        assert status["health"]["healthy"], "a probe would restart it"
        time.sleep(2)
        assert len(node.events("admitted")) == num_admitted, "a paused node generates"
        assert _used_bytes(node) < LIMIT_BYTES
        (home / "backups" / "not-ours.bin").unlink()
        node.wait_for(lambda: len(node.events("admitted")) > num_admitted, timeout_s=SOON_S)
        assert node.events("resumed")
        node.wait_for(lambda: node.status()["limits"]["paused"] == "", timeout_s=SOON_S)
        assert psutil.Process(node.process.pid).rlimit(psutil.RLIMIT_NOFILE)[0] >= 512
        node.stop()


@pytest.mark.parametrize("understates", [False, True], ids=["honest", "announces one byte"])
async def test_pulls_keep_the_download_rate(tmp_path: Path, understates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes over p2pd. At any time, the received bytes are at most burst, rate times time, and one pull."""
    swarm = LightSwarm(tmp_path, manifest_of())
    limits = {"max_download_bytes_per_s": RATE, "pulls_in_flight": 1}
    monkeypatch.setattr(pull, "PULL_BATCH", 1)
    async with AsyncExitStack() as stack:

        async def start(number: int, peers: tuple[str, ...] = (), **limits: float) -> tuple[StubNode, Libp2pGossip]:
            gossip = Libp2pGossip(
                network(tmp_path / f"p2pd-{number}", peers=peers),
                identity=identity_of(number),
                run_id=swarm.manifest.run_id,
            )
            node = swarm.node(number, gossip=gossip, directory_period_s=1, **limits)
            return await stack.enter_async_context(node), gossip

        sender_node, sender = await start(1)
        receiver_node, receiver = await start(2, tuple(sender.addresses), **limits)
        await eventually(receiver.members)
        if understates:
            _announce_one_byte(monkeypatch)
        space = receiver_node.parts.store.space
        space.limit = HomeLimit(1000, reserve_bytes=100)
        space.note(HomeUse(1000, free_bytes=10_000))  # full, so that all groups wait to be pulled
        await swarm.publish(sender_node, 9, num_tokens=300)
        max_group_bytes, num_received, began = 30_000, 0, time.monotonic()
        space.note(HomeUse(0, free_bytes=10_000))
        while num_received < 8 * 28_800:
            num_received = receiver.counters.body_bytes_in
            assert num_received <= RATE * (BURST_S + time.monotonic() - began) + max_group_bytes
            assert time.monotonic() - began < 60, "the groups did not arrive"
            await asyncio.sleep(0.02)
        await eventually(lambda: receiver_node.parts.peers.counters.groups_received >= 7)


def _announce_one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftis_node.node.loops import publish
    from ftis_node.node.peers import serve

    announce, honest = publish.announce_group, serve.Announcement
    monkeypatch.setattr(publish, "announce_group", lambda *given, envelope_bytes: announce(*given, envelope_bytes=1))
    monkeypatch.setattr(serve, "Announcement", lambda **fields: honest(**fields | {"envelope_bytes": 1}))


async def test_a_full_home_pulls_nothing_until_there_is_space(tmp_path: Path) -> None:
    swarm = LightSwarm(tmp_path, manifest_of())
    async with swarm.node(1) as sender_node, swarm.node(2) as receiver_node:
        space = receiver_node.parts.store.space
        space.limit = HomeLimit(1000, reserve_bytes=100)
        space.note(HomeUse(950, free_bytes=10_000))
        assert space.why_full
        await swarm.publish(sender_node, 3)
        await asyncio.sleep(1)
        assert receiver_node.gossip.counters.bodies_in == 0
        space.note(HomeUse(100, free_bytes=10_000))
        await eventually(lambda: held(receiver_node) == 3)
