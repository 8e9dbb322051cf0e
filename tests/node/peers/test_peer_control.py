"""The operator's actions on peers, and a node's view of the swarm: over HTTP and by the commands."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from ftis_node.cli.app import run
from ftis_node.config.home import TOKEN_HEADER, Home
from ftis_node.config.limits import AccessSection
from ftis_node.config.node import NodeSettings, SwarmSection
from ftis_node.node.http_api.access import token_for_changes, write_token
from ftis_node.node.http_api.routes import LocalApi, add_control, change_peer
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.wiring import Wiring
from ftis_node.records.envelope import PeerRecord
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import PeerStats
from ftis_node.swarm.overview import MAX_ROWS, RunSummary, SwarmView, make_view, swarm_row
from ftis_node.swarm.receipts import StepLimits
from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.status import EvalStatus
from ftis_node.view.swarm import swarm_text
from tests.node.nodes import components

ME, ANN, BOB = (Identity.from_seed(bytes([seed]) * 32).peer_id for seed in (1, 2, 3))
ROWS = [{"peer_id": ANN, "name": "ann"}, {"peer_id": BOB, "name": "twin"}, {"peer_id": ME, "name": "twin"}]


@pytest.fixture
def manager(tmp_path):
    events = EventLog(tmp_path / "events.jsonl")
    manager = PeerManager(tmp_path / "peers.sqlite", own_id=ME, settings=AccessSection(), events=events)
    yield manager
    manager.close()
    events.close()


@asynccontextmanager
async def serving(manager: PeerManager, token_file: Path) -> AsyncIterator[str]:
    """Serve the operator's actions; yield the URL."""
    app = web.Application(middlewares=[token_for_changes(write_token(token_file))])
    add_control(app, partial(change_peer, manager, lambda: ROWS))
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@pytest.fixture
async def url(tmp_path, manager):
    async with serving(manager, tmp_path / "token") as url:
        yield url


async def post(url: str, path: str, arguments: Any, token: str | None) -> tuple[int, Any]:
    headers = {} if token is None else {TOKEN_HEADER: token}
    async with (
        ClientSession() as session,
        session.post(url + path, data=json.dumps(arguments), headers=headers) as response,
    ):
        return response.status, await response.json()


async def test_only_a_request_with_the_token_of_the_home_changes_peers(tmp_path, url, manager):
    for token in (None, "", "0" * 32):
        status, _ = await post(url, "/peers/ban", {"peer": ANN}, token)
        assert status == 403
    assert not manager.is_banned(ANN)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    token = (tmp_path / "token").read_text()
    status, row = await post(url, "/peers/ban", {"peer": "ann", "for_s": 60}, token)
    assert (status, row["peer_id"], row["trust_level"]) == (200, ANN, "banned")
    assert manager.is_banned(ANN)
    await post(url, "/peers/unban", {"peer": ANN[-8:]}, token)
    assert not manager.is_banned(ANN)
    _, row = await post(url, "/peers/trust", {"peer": ANN}, token)
    assert (row["trust_level"], manager.is_trusted(ANN)) == ("trusted", True)
    await post(url, "/peers/trust", {"peer": ANN, "trusted": False}, token)
    assert not manager.is_trusted(ANN)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["ban", "ann", "--for", "2 weeks"], "90s, 30m, 2h or 7d"), (["ban", "ann"], "no running node")],
)
def test_invalid_input_and_a_stopped_node_are_a_one_line_error_with_exit_code_2(tmp_path, capsys, arguments, message):
    assert run(["peers", *arguments, "--home", str(tmp_path / "home")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("arguments", [["show", "ann"], ["ban", "ann"], ["unban", "ann"], ["trust", "ann"]])
def test_the_home_of_the_group_replaces_that_of_the_environment(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.setenv("FTIS_HOME", str(tmp_path / "other"))
    assert run(["peers", "--home", str(tmp_path / "given"), *arguments]) == 2
    assert str(tmp_path / "given") in capsys.readouterr().err


async def test_the_commands_reach_a_running_node_over_its_port(tmp_path, manager, capsys):
    home = Home(tmp_path / "home")
    home.create()
    with home.owned():
        async with serving(manager, home.control_token) as url:
            home.publish_address(url)

            async def peers(*arguments: str) -> int:
                return await asyncio.to_thread(run, ["peers", *arguments, "--home", str(home.root)])

            assert await peers("ban", "ann", "--for", "2h", "--json") == 0
            row = json.loads(capsys.readouterr().out)
            assert (row["peer_id"], row["trust_level"], row["ban_reason"]) == (ANN, "banned", "by the operator")
            assert row["banned_until"] == pytest.approx(time.time() + 7200, abs=30)
            assert await peers("unban", ANN[:8]) == 2, "all peer ids begin like this"
            assert await peers("ban", "twin") == 2
            assert await peers("ban", ME) == 2, "the node itself"


PEER = Identity.generate().peer_id


def _record(name: str = "bob", stats: PeerStats | None = None) -> PeerRecord:
    return PeerRecord("ab" * 16, PEER, name, "m", 1, "cd" * 16, "full", 1, 1, 2.0, 0.0, "1", stats=stats)


@contextmanager
def _trained_node(folder: Path, settings: NodeSettings | None = None) -> Iterator[Wiring]:
    """Yield a node that trained on 3 own groups and 1 foreign group, and evaluated twice."""
    with components(folder, settings=settings) as node:
        node.context.state.step = 4
        node.context.counters.recent_sources.append({node.context.peer_id: 3, PEER: 1, "": 0})
        node.context.counters.refused["reward"] = 2
        for step, rate in ((0, 0.25), (4, 0.5)):
            node.context.evaluations.add(EvalStatus(step=step, task="arithmetic", pass_at_1=rate, n=8))
        yield Wiring(node)


async def test_a_node_shows_itself_and_its_peers_over_http(tmp_path):
    with _trained_node(tmp_path) as wiring:
        node = wiring.node
        node.peers.registry.own_record = wiring.directory_loop.own_record.make()
        node.peers.registry.seen(PEER).record = _record()
        node.peers.registry.seen(Identity.generate().peer_id)  # a peer without a record
        api = LocalApi(wiring.status_loop(), wiring.swarm, token_file=node.home.control_token)
        async with api.serve(port=0) as url, ClientSession() as client, client.get(f"{url}/swarm") as response:
            [document] = await response.json()
        view, own_id = SwarmView.from_dict(document), node.context.peer_id
    own, peer = view.peers
    assert (own.peer_id, own.step, own.refused_groups) == (own_id, 4, 2)
    assert own.pass_rates == ((0, 0.25), (4, 0.5)) and own.learns_from == {own_id: 0.75, PEER: 0.25}
    assert (peer.name, peer.step, peer.tokens_per_minute, peer.learns_from) == ("bob", None, 120.0, {})
    assert (view.num_unreadable, view.run.method) == (1, node.context.manifest.method.name)


def test_the_record_needs_no_connection_that_writes(tmp_path):
    with _trained_node(tmp_path) as wiring:
        wiring.node.store.buffer.raise_last_number(7)
        wiring.node.store.buffer.close()
        wiring.directory_loop.own_record.sample()
        assert wiring.directory_loop.own_record.make().last_number == 7


def test_a_node_may_publish_no_measurements(tmp_path):
    private = SwarmSection(publish_stats=False)
    with _trained_node(tmp_path, NodeSettings(model="m", dtype="float32", swarm=private)) as wiring:
        assert wiring.directory_loop.own_record.make().stats is None


def test_rows_are_bounded_and_control_characters_escaped():
    stats = PeerStats(step=2**63 - 1, sources=((PEER, 2**63 - 1), (PEER, 1)), trained_groups=1)
    row = swarm_row(_record("\x1b[31m\n\u202ename" * 5, stats), seen_at=time.time() + 10**9)
    assert all(0.0 <= share <= 1.0 for share in row.learns_from.values())
    view = make_view([row] * 10_000, run=RunSummary("ab" * 16, name="\x1b]0;x\x07"), now=time.time())
    assert (len(view.peers), view.num_omitted) == (MAX_ROWS, 10_000 - MAX_ROWS)
    lines = swarm_text([view], now=time.time())
    assert len(lines) < MAX_ROWS + 80 and all(line.isprintable() for line in lines)


def test_a_record_claims_at_least_the_steps_of_its_receipts(tmp_path):
    with _trained_node(tmp_path) as wiring:
        receipts = wiring.node.peers.receipts
        receipts.limits = StepLimits(groups=8)
        for _ in range(800):
            receipts.note_used(PEER, 1)
        assert wiring.directory_loop.own_record.make().stats.step == 100, "the learner is at step 4"
