"""The survey of a swarm of real p2pd nodes on loopback, by a bootstrap node and by a client."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession

from ftis_node.bootstrap.http_api import BootstrapApi
from ftis_node.bootstrap.survey import view_of
from ftis_node.gossip.bootstrap_node import MAX_RUNS_SURVEYED, BootstrapNode
from ftis_node.gossip.directory import lookup as survey_module
from ftis_node.gossip.directory.lookup import survey_remotely
from ftis_node.gossip.directory.storage import StoredRun
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import PeerRecord, seal_peer_record
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import PeerStats
from ftis_node.view.swarm import swarm_text
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


async def test_a_survey_shows_all_members_and_an_invalid_record_affects_its_row_only(start, tmp_path):
    identities = [Identity.generate() for _ in range(4)]
    ann, bob, eve, _ = (identity.peer_id for identity in identities)
    bootstrap = await start(run_id=None)
    address = tuple(bootstrap.addresses)
    nodes = [await start(identity=identity, run_id=RUN, peers=address) for identity in identities]
    stats = PeerStats(
        step=7, groups_per_minute=4.5, pass_rates=((0, 0.1), (5, 0.5)), sources=((ann, 6), (bob, 2)), trained_groups=8
    )
    values = [
        seal_peer_record(_record(identity, name, stats), identity)
        for identity, name in zip(identities[:3], NAMES, strict=True)
    ]

    async def all_seen():
        for node, value in zip(nodes, [*values, _record_with_nan(identities[3])], strict=True):
            await node.publish_record(value, ttl_s=60)
        found = await bootstrap.survey()
        is_complete = found and len(found[0].records) == 3 and found[0].num_unreadable == 1
        return found if is_complete else []

    surveys = await eventually(all_seen, within_s=120)
    async with BootstrapApi(bootstrap).serve(port=0) as url, ClientSession(url) as client:

        async def shown():
            document = await (await client.get("/swarm")).json()
            return document if document and len(document[0]["peers"]) == 3 else None

        document = await eventually(shown, within_s=120)
        page = await (await client.get("/")).text()
        metrics = await (await client.get("/metrics")).text()
        health = (await client.get("/healthz")).status
    remote = await survey_remotely(settings(tmp_path / "v", peers=address), run_id=RUN, timeout_s=60)
    assert [view["run"]["id"] for view in document] == [RUN] and len(document[0]["peers"]) == 3
    assert '<td class="own" style="--share:0.75">75</td>' in page and "\x1b" not in page
    assert f"--run {RUN} --peers {address[0]}" in page
    assert f'ftis_bootstrap_members{{run_id="{RUN}"}} 4.0' in metrics and health == 200
    for survey in (surveys[0], remote):
        view = view_of(survey)
        assert {row.peer_id: row.name for row in view.peers} == dict(zip((ann, bob, eve), NAMES, strict=True))
        assert {row.peer_id: row.learns_from for row in view.peers} == dict.fromkeys(
            (ann, bob, eve), {ann: 0.75, bob: 0.25}
        )
        assert {row.step for row in view.peers} == {7}
        text = "\n".join(swarm_text([view], now=time.time()))
        assert "itself 75%" in text and "ann 75%, itself 25%" in text and "▁█ 0.50" in text
        assert "1 without a readable record" in text and "mallory" not in text and "\x1b" not in text


class FakeDirectory:
    """A directory with two members in each run; the record of `silent` and everything of `unreadable` has no answer."""

    def __init__(self, *runs: str, silent: str = "", unreadable: str = "") -> None:
        self.runs, self.silent, self.unreadable = runs, silent, unreadable
        self.people = [Identity.from_seed(bytes([number]) * 32) for number in (1, 2)]

    def stored_runs(self) -> dict[str, StoredRun]:
        return {run: StoredRun(num_shards=1, num_members=2) for run in self.runs}

    async def get_manifest(self, run_id: str) -> bytes | None:
        if run_id == self.unreadable:
            raise TimeoutError("no answer")
        return None

    async def members(self, run_id: str, buckets: Iterable[int]) -> dict[str, list[str]]:
        return {identity.peer_id: [] for identity in self.people}

    async def get_record(self, run_id: str, peer_id: str) -> bytes | None:
        if peer_id == self.silent:
            await asyncio.Future()
        (owner,) = (identity for identity in self.people if identity.peer_id == peer_id)
        return seal_peer_record(_record(owner, peer_id[-4:], None), owner)


def _bootstrap(folder: Path, directory: FakeDirectory, *pinned: str) -> BootstrapNode:
    """Return a bootstrap node that is not started, with this directory."""
    node = BootstrapNode(settings(folder), identity=Identity.generate(), pinned_runs=pinned)
    session: Any = SimpleNamespace(directory=directory)
    node._supervisor.session = session
    return node


async def test_a_record_that_is_not_read_in_time_delays_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(survey_module, "MAX_READING_S", 0.1)
    directory = FakeDirectory(RUN)
    directory.silent = directory.people[1].peer_id
    (survey,) = await asyncio.wait_for(_bootstrap(tmp_path, directory).survey(), timeout=30)
    assert [record.peer_id for record in survey.records] == [directory.people[0].peer_id]
    assert survey.num_unreadable == 1


async def test_many_small_runs_hide_no_pinned_run(tmp_path):
    """The runs come in the order of their sizes (`test_directory.py`)."""
    runs = [f"{number:032x}" for number in range(MAX_RUNS_SURVEYED + 1)]
    bootstrap = _bootstrap(tmp_path, FakeDirectory(*runs), "fe" * 16)
    assert [survey.run_id for survey in await bootstrap.survey()] == ["fe" * 16, *runs[: MAX_RUNS_SURVEYED - 1]]
    assert bootstrap.num_runs_omitted == len(runs) + 1 - MAX_RUNS_SURVEYED


async def test_an_unreadable_run_hides_no_other(tmp_path):
    """Any peer may register a run that the directory cannot return."""
    unreadable = "cd" * 16
    bootstrap = _bootstrap(tmp_path, FakeDirectory(unreadable, RUN, unreadable=unreadable))
    assert [survey.run_id for survey in await bootstrap.survey()] == [RUN]
    with pytest.raises(TimeoutError, match="no run in the directory could be read"):
        await _bootstrap(tmp_path, FakeDirectory(unreadable, unreadable=unreadable)).survey()
