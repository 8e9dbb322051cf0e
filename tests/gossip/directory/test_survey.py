"""The survey of a swarm of real p2pd nodes on loopback, by a bootstrap node and by a client."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from ftis_node.gossip.bootstrap import MAX_RUNS_SURVEYED, BootstrapNode
from ftis_node.gossip.directory import lookup as survey_module
from ftis_node.gossip.directory.dht import Directory
from ftis_node.gossip.directory.entries import pack_member
from ftis_node.gossip.directory.lookup import RunSurvey, survey_remotely
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.node.peers.swarm_status import view_of
from ftis_node.node.startup.bootstrap import BootstrapApi
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import PeerRecord, seal_peer_record
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import PeerStats
from ftis_node.swarm.overview import render_views
from tests.gossip.helpers import settings
from tests.records.wire_example import sign_peer_info
from tests.waiting import eventually

RUN = "ab" * 16
NAMES = ("ann", "bob", "\x1b[2Jeve")


def _record(identity: Identity, name: str, stats: PeerStats | None) -> PeerRecord:
    return PeerRecord(
        RUN, identity.peer_id, name, "org/tiny", 1000, "cd" * 16, "full", 3, 2, 10.0, time.time(), "1", stats=stats
    )


def _record_with_nan(identity: Identity) -> bytes:
    """Return a record with a valid signature and a rate that is not a number."""
    info = pb.PeerInfo.FromString(
        pb.PeerRecord.FromString(seal_peer_record(_record(identity, "mallory", None), identity)).body
    )
    info.stats.groups_per_minute = float("nan")
    return sign_peer_info(info.SerializeToString(), identity)


async def test_a_survey_shows_all_members_and_an_invalid_record_affects_its_row_only(tmp_path: Path) -> None:
    identities = [Identity.generate() for _ in range(4)]
    ann, bob, eve, _ = (identity.peer_id for identity in identities)
    async with AsyncExitStack() as stack:
        bootstrap = BootstrapNode(settings(tmp_path / "b"), identity=Identity.generate())
        stack.push_async_callback(bootstrap.close)
        await bootstrap.start()
        address = tuple(bootstrap.addresses)
        nodes = []
        for number, identity in enumerate(identities):
            node = Libp2pGossip(settings(tmp_path / str(number), peers=address), identity=identity, run_id=RUN)
            stack.push_async_callback(node.close)
            await node.start()
            nodes.append(node)
        stats = PeerStats(
            step=7,
            groups_per_minute=4.5,
            pass_rates=((0, 0.1), (5, 0.5)),
            sources=((ann, 6), (bob, 2)),
            trained_groups=8,
        )
        values = [
            seal_peer_record(_record(identity, name, stats), identity)
            for identity, name in zip(identities[:3], NAMES, strict=True)
        ]

        async def all_seen() -> list[RunSurvey]:
            for node, value in zip(nodes, [*values, _record_with_nan(identities[3])], strict=True):
                await node.publish_record(value, ttl_s=60)
            found = await bootstrap.survey()
            is_complete = found and len(found[0].records) == 3 and found[0].num_unreadable == 1
            return found if is_complete else []

        surveys = await eventually(all_seen, within_s=120)
        async with BootstrapApi(bootstrap).serve(port=0) as url, ClientSession(url) as client:

            async def shown() -> Any:
                document = await (await client.get("/swarm")).json()
                return document if document and len(document[0]["peers"]) == 3 else None

            document = await eventually(shown, within_s=120)
            page = await (await client.get("/")).text()
            metrics = await (await client.get("/metrics")).text()
            health = (await client.get("/healthz")).status
        remote = await survey_remotely(settings(tmp_path / "v", peers=address), run_id=RUN, timeout_s=60)
    assert [view["run"]["id"] for view in document] == [RUN] and len(document[0]["peers"]) == 3
    assert "75 %" in page and "\x1b" not in page
    assert f'ftis_bootstrap_members{{run_id="{RUN}"}} 4.0' in metrics and health == 200
    for survey in (surveys[0], remote):
        view = view_of(survey)
        assert {row.peer_id: row.name for row in view.peers} == dict(zip((ann, bob, eve), NAMES, strict=True))
        assert {row.peer_id: row.learns_from for row in view.peers} == dict.fromkeys(
            (ann, bob, eve), {ann: 0.75, bob: 0.25}
        )
        assert {row.step for row in view.peers} == {7}
        text = "\n".join(render_views([view]))
        assert "75 %" in text and "25 %" in text and "▁▅ 0.50" in text
        assert "1 without a readable record" in text and "mallory" not in text and "\x1b" not in text


async def test_a_record_that_is_not_read_in_time_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = (Identity.generate() for _ in range(2))
    get_record = Directory.get_record

    async def never_of_bob(self: Directory, run_id: str, peer_id: str) -> bytes | None:
        return await (asyncio.Future() if peer_id == bob.peer_id else get_record(self, run_id, peer_id))

    async with AsyncExitStack() as stack:
        bootstrap = BootstrapNode(settings(tmp_path / "b"), identity=Identity.generate())
        stack.push_async_callback(bootstrap.close)
        await bootstrap.start()
        for identity, name in ((ann, "ann"), (bob, "bob")):
            peers = tuple(bootstrap.addresses)
            node = Libp2pGossip(settings(tmp_path / name, peers=peers), identity=identity, run_id=RUN)
            stack.push_async_callback(node.close)
            await node.start()
            await node.publish_record(seal_peer_record(_record(identity, name, None), identity), ttl_s=600)

        async def both_seen() -> list[RunSurvey]:
            surveys = await bootstrap.survey()
            return surveys if surveys and len(surveys[0].records) == 2 else []

        await eventually(both_seen, within_s=120)
        monkeypatch.setattr(survey_module, "MAX_READING_S", 1.0)
        monkeypatch.setattr(Directory, "get_record", never_of_bob)
        (survey,) = await asyncio.wait_for(bootstrap.survey(), timeout=30)
    assert [record.name for record in survey.records] == ["ann"]
    assert survey.num_unreadable == 1


async def test_many_small_runs_with_low_ids_hide_no_larger_and_no_pinned_run(tmp_path: Path) -> None:
    larger, pinned = "ff" * 16, "fe" * 16
    low = [f"{number:032x}" for number in range(MAX_RUNS_SURVEYED + 1)]
    async with AsyncExitStack() as stack:

        async def started(**options: Any) -> BootstrapNode:
            node = BootstrapNode(identity=Identity.generate(), **options)
            stack.push_async_callback(node.close)
            await node.start()
            return node

        bootstrap = await started(settings=settings(tmp_path / "b"), pinned_runs=(pinned,))
        peers = tuple(bootstrap.addresses)
        flooder, member = [await started(settings=settings(tmp_path / name, peers=peers)) for name in "fm"]

        async def registered() -> bool:
            for node, runs in ((flooder, [*low, larger, pinned]), (member, [larger])):
                session = node._supervisor.session
                if session is None or not await session.directory.join([bootstrap.peer_id]):
                    return False
                for run in runs:
                    await session.directory.register(run, pack_member([], num_shards=1), ttl_s=600)
            session = bootstrap._supervisor.session
            return session is not None and len(session.directory.stored_runs()) == len(low) + 2

        await eventually(registered, within_s=120)
        seen = [survey.run_id for survey in await bootstrap.survey()]
    assert seen == [pinned, larger, *low[: MAX_RUNS_SURVEYED - 2]]
    assert bootstrap.num_runs_omitted == len(low) + 2 - MAX_RUNS_SURVEYED


async def test_an_unreadable_run_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any peer may register a run that the directory cannot return."""
    unreadable, get_manifest = "cd" * 16, Directory.get_manifest

    async def get_or_time_out(directory: Directory, run_id: str) -> bytes | None:
        if run_id == unreadable:
            raise TimeoutError("no answer")
        return await get_manifest(directory, run_id)

    monkeypatch.setattr(Directory, "get_manifest", get_or_time_out)
    bootstrap = BootstrapNode(settings(tmp_path), identity=Identity.generate(), pinned_runs=(unreadable, RUN))
    await bootstrap.start()
    try:
        assert [survey.run_id for survey in await bootstrap.survey()] == [RUN]
        bootstrap._pinned_runs = (unreadable,)
        with pytest.raises(TimeoutError, match="no run in the directory could be read"):
            await bootstrap.survey()
    finally:
        await bootstrap.close()
