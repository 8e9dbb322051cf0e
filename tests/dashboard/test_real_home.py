"""The dashboard on the home of a real node, and with a status port that opens and closes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from textual.pilot import Pilot

from ftis_node.config.home import Home
from ftis_node.dashboard.app import DashboardApp
from ftis_node.replay.group_history import read_group_history
from ftis_node.replay.reader import ReplayReader
from tests.dashboard.sample_node import STATUS
from tests.dashboard.svg_text import text_of_rows
from tests.http_server import serving
from tests.small_swarm import SmallSwarm, copied_home

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, small_swarm: SmallSwarm) -> Home:
    """The home of a node that trained with a peer and was killed."""
    return copied_home(small_swarm.ann, tmp_path_factory.mktemp("real") / "ann")


@asynccontextmanager
async def _opened(home: Home) -> AsyncIterator[tuple[DashboardApp, Pilot[None]]]:
    app = DashboardApp(home, period_s=0.2)
    async with app.run_test(size=(80, 24)) as pilot:
        await _until(pilot, lambda: app.snapshot is not None and bool(app.snapshot.history.events))
        yield app, pilot


async def _until(pilot: Pilot[None], condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await pilot.pause(0.05)


def _shown(app: DashboardApp) -> str:
    return text_of_rows(app.export_screenshot())


async def test_keys_open_a_peer_and_a_group_of_a_stopped_node(home: Home) -> None:
    async with _opened(home) as (app, pilot):
        await _until(pilot, lambda: "start it again" in _shown(app) and " 1 known" in _shown(app))
        assert "ftis-node join --home" in _shown(app)
        await pilot.press("enter")
        await _until(pilot, lambda: "trust" in _shown(app) and "arithmetic/" in _shown(app))
        await pilot.press("enter")
        await _until(pilot, lambda: "log-prob mean" in _shown(app))
        assert "completion" in _shown(app) and "ids" not in _shown(app)
        await pilot.press("escape", "escape", "e")
        await _until(pilot, lambda: "pass@1" in _shown(app))
        await pilot.press("escape", "g")
        await _until(pilot, lambda: "groups of the buffer" in _shown(app))


def test_the_history_of_a_group_has_texts_and_events(home: Home) -> None:
    with closing(ReplayReader(home.replay)) as reader:
        own = next(group for group in reader.list_groups(limit=200) if group.own and group.reason == "trained")
    history = read_group_history(home, own.id)
    assert history is not None and history.prompt is not None
    assert "=" in (history.prompt.text or "") and len(history.completions) == 4
    assert any(each.text for each in history.completions)
    for each in history.completions:  # a model may end its answer at once
        assert "".join(each.pieces).startswith(each.text or "") and len(each.logprobs) == len(each.token_ids) > 0
    names = [event["event"] for event in history.events]
    assert names[0] == "admitted" and "taken" in names
    assert read_group_history(home, "00" * 32) is None
    moved = home.run_toml.rename(home.root / "moved.toml")
    again = read_group_history(home, own.id)
    moved.rename(home.run_toml)
    assert again is not None and again.prompt is not None
    assert "=" in (again.prompt.text or "") and again.prompt.missing, "the stored ids of the prompt are decoded"


def _answer(path: str) -> tuple[int, dict[str, str], bytes]:
    """Return what the status port of a running node returns."""
    return 200, {}, b"[]" if path == "/peers" else STATUS.to_json()


async def test_it_reconnects_when_the_node_is_started_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.status.write_bytes(STATUS.to_json())
    home.settings.write_text('{"model": "m"}')
    home.events.write_text('{"time": 1.0, "event": "start"}\n')
    async with _opened(home) as (app, pilot):
        assert app.snapshot is not None and app.snapshot.state == "stopped"
        assert app.snapshot.start_command == f"ftis-node join --home {home.root}", "the home has the model's name"
        with home.owned(), serving(_answer) as url:
            await _until(pilot, lambda: app.snapshot is not None and app.snapshot.state == "starting")
            home.publish_address(url)
            await _until(pilot, lambda: app.snapshot is not None and app.snapshot.state == "running")
            await _until(pilot, lambda: "running" in _shown(app))
            machine = app.snapshot.machine
            assert machine.num_processes >= 1 and machine.resident_bytes > 50_000_000
        await _until(pilot, lambda: "start it again" in _shown(app))
