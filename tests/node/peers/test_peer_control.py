"""Bans and trust by the operator: access, and errors in one line."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from ftis_node.cli.app import run
from ftis_node.config.home import TOKEN_HEADER, Home
from ftis_node.config.limits import AccessSection
from ftis_node.node.http_api.local_api import add_control, write_token
from ftis_node.node.peers.manager import PeerManager
from ftis_node.node.peers.peer_control import PeerControl
from ftis_node.records.identity import Identity
from ftis_node.telemetry.events import EventLog

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
    app = web.Application()
    add_control(app, PeerControl(manager, lambda: ROWS), write_token(token_file))
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
