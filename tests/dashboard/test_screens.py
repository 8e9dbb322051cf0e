"""The screens under frequent snapshots of the node: an early or late snapshot does not end the dashboard."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from ftis_node.config.home import Home
from ftis_node.dashboard.app import DashboardApp
from ftis_node.dashboard.context import NodeSeen
from ftis_node.dashboard.screens.groups import GroupsScreen, PeerScreen
from ftis_node.dashboard.screens.help import help_lines
from ftis_node.dashboard.widgets import RowsTable
from ftis_node.errors import ConfigError
from ftis_node.replay.reader import GroupSummary
from ftis_node.view.snapshot import NodeSnapshot
from ftis_node.view.spans import Span, text_of
from tests.dashboard.sample_node import ANN, BOB, RUNNING, SUMMARY, use_snapshots
from tests.dashboard.svg_text import text_of_rows

FIRST_PEER = RUNNING.peers[0]["model"].split("/")[1]  # as in its row
KEYS = ("enter", "escape", "g", "e", "a", "question_mark", "r", "l", "down", "w", "s", "slash", "j", "k")


class ChangingNode:
    """A node whose peers differ in each snapshot."""

    def __init__(self) -> None:
        self._num_snapshots = 0

    def poll(self) -> NodeSnapshot:
        """Return the next snapshot, with 0, 1 or 2 peers."""
        self._num_snapshots += 1
        return replace(
            RUNNING, peers=RUNNING.peers[: self._num_snapshots % 3], taken_at=RUNNING.taken_at + self._num_snapshots
        )


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open the dashboard on snapshots of a node, by default of the sample node."""

    @asynccontextmanager
    async def open_app(
        poll: Callable[[], NodeSnapshot] = lambda: RUNNING, *, period_s: float = 600.0, size: tuple[int, int] = (80, 24)
    ) -> AsyncIterator[tuple[DashboardApp, Pilot[None]]]:
        use_snapshots(monkeypatch, poll)
        app = DashboardApp(Home(tmp_path), period_s=period_s)
        async with app.run_test(size=size) as pilot:
            yield app, pilot

    return open_app


async def _shown(app: DashboardApp, pilot: Pilot[None], text: str) -> str:
    """Wait until the rows of the screen contain this text, and return them."""
    async with asyncio.timeout(60):
        while text not in (rows := text_of_rows(app.export_screenshot())):
            await pilot.pause(0.05)
    return rows


async def test_snapshots_while_screens_open_and_close_do_not_end_the_dashboard(opened: Any) -> None:
    keys = random.Random(1)
    async with opened(ChangingNode().poll, period_s=0.001) as (app, pilot):
        for _ in range(25):
            for _ in range(keys.randint(1, 3)):
                app.simulate_key(keys.choice(KEYS))
            await pilot.pause(keys.random() * 0.02)
        await pilot.pause(0.1)
        assert app.is_running and app.snapshot is not None


async def test_snapshots_while_the_dashboard_ends_are_ignored(opened: Any) -> None:
    waits = random.Random(1)
    for _ in range(4):
        async with opened(ChangingNode().poll, period_s=0.0005) as (app, pilot):
            await pilot.pause(waits.random() * 0.1)
        assert (app.is_running, app.return_code) == (False, None)


@pytest.mark.parametrize("keys", [("enter", "q", "escape"), ("g", "e", "q", "down", "q")])
async def test_keys_after_quit_are_ignored(keys: tuple[str, ...], opened: Any) -> None:
    async with opened(ChangingNode().poll, period_s=0.05) as (app, pilot):
        await pilot.pause(0.02)
        for key in keys:
            app.simulate_key(key)
        async with asyncio.timeout(30):
            while app.is_running:  # noqa: ASYNC110 - the app sets no event
                await asyncio.sleep(0.01)
    assert app.return_code == 0


async def test_a_snapshot_before_a_screen_is_mounted_is_shown_after(opened: Any) -> None:
    async with opened(ChangingNode().poll) as (app, pilot):
        page = PeerScreen(RUNNING.peers[0]["peer_id"])
        app.push_screen(page)
        assert not page.is_mounted
        app.on_node_seen(NodeSeen(RUNNING))
        await _shown(app, pilot, RUNNING.peers[0]["peer_id"])
        page.action_back()
        page.action_back()
        assert len(app.screen_stack) == 1


async def test_many_reasons_do_not_hide_a_peers_groups(opened: Any) -> None:
    many = {f"reason_{number}": number + 1 for number in range(30)}
    snapshot = replace(RUNNING, peers=({**RUNNING.peers[0], "groups_refused": many},))
    async with opened(lambda: snapshot) as (app, pilot):
        await _shown(app, pilot, FIRST_PEER)
        await pilot.press("enter")
        shown = await _shown(app, pilot, SUMMARY.id[:8])
        assert "peer id" in shown and "trust" in shown and "reason_29" in shown


async def test_the_reason_for_unreadable_groups_is_shown(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(screen: GroupsScreen) -> list[GroupSummary]:
        raise ConfigError("the buffer is missing")

    async with opened() as (app, pilot):
        monkeypatch.setattr(GroupsScreen, "read", fail)
        await _shown(app, pilot, FIRST_PEER)
        await pilot.press("enter")
        await _shown(app, pilot, "the buffer is missing")


async def test_peers_are_searched_sorted_and_selected_by_keys_and_mouse(opened: Any) -> None:
    async with opened(size=(120, 40)) as (app, pilot):
        await _shown(app, pilot, FIRST_PEER)
        table = app.query_one("#peers", RowsTable)
        assert table.selected_key() == ANN
        await pilot.press("j")
        assert table.selected_key() == BOB
        await pilot.press("k", "slash", *"ban")
        shown = await _shown(app, pilot, "1 with 'ban'")
        assert FIRST_PEER not in shown and table.selected_key() == BOB
        await pilot.press("enter")
        assert app.focused is table
        await pilot.press("slash", "escape")
        assert FIRST_PEER in await _shown(app, pilot, "2 known ")
        for order in ("effective", "refused", "trust"):
            await pilot.press("s")
            await _shown(app, pilot, f"2 known, by {order} ")
        assert [key.value for key in table.rows] == [BOB, ANN]
        await pilot.click("#peers", offset=(40, 1))  # the label of a column
        await _shown(app, pilot, "2 known ")
        assert [key.value for key in table.rows] == [ANN, BOB]
        await pilot.click("#keys", offset=(22, 0))  # the key of the events
        await _shown(app, pilot, "newest first or last")


async def test_events_are_searched_and_reversed(opened: Any) -> None:
    async with opened() as (app, pilot):
        await _shown(app, pilot, FIRST_PEER)
        await pilot.press("e")
        shown = await _shown(app, pilot, "newest first or last")
        assert shown.index("eval") < shown.index("0.61")
        await pilot.press("s")
        shown = await _shown(app, pilot, "07:59:58")
        assert shown.index("eval") > shown.index("0.61")
        await pilot.press("slash", *"pass")
        async with asyncio.timeout(30):
            while "0.61" in text_of_rows(app.export_screenshot()):
                await pilot.pause(0.05)
        assert "eval" in text_of_rows(app.export_screenshot())


async def test_help_opens_on_every_screen_and_closes_by_the_same_key(opened: Any) -> None:
    async with opened() as (app, pilot):
        await _shown(app, pilot, FIRST_PEER)
        for key in ("e", "g", "w", "enter"):
            await pilot.press(key, "question_mark")
            await _shown(app, pilot, "select a row, or scroll")
            await pilot.press("question_mark")
            assert "select a row" not in await _shown(app, pilot, "help")
            await pilot.press("escape")


def test_help_has_the_terms_of_the_main_screen_and_of_the_swarm() -> None:
    lines = [text_of(shown) for shown in help_lines(None)]
    terms = lines[lines.index("terms") + 1 :]
    labels = {term[:16].strip() for term in terms}
    assert {"answers", "used", "rank", "share", "learners", "as of"} < labels
    assert max(map(len, terms)) < 80, "a line of the smallest terminal"


async def test_the_screen_of_the_swarm_opens_from_the_main_screen(opened: Any) -> None:
    async with opened() as (app, pilot):
        await _shown(app, pilot, FIRST_PEER)
        await pilot.press("w")
        await _shown(app, pilot, "no node has run")
        await pilot.press("escape")
        await _shown(app, pilot, FIRST_PEER)


class TableApp(App[None]):
    def compose(self) -> ComposeResult:
        """Yield an empty table."""
        yield RowsTable(("time", "problem"), id="rows")


async def test_rows_drawn_before_the_table_is_idle_are_not_cut() -> None:
    app = TableApp()
    async with app.run_test(size=(40, 8)) as pilot:
        table = app.query_one(RowsTable)
        for problem in ("arithmetic/12345678", "sums/1", "geometry/123456789"):
            table.show_rows({"one": (Span("15:52"), Span(problem))})
            table.render_lines(table.size.region)  # a frame that is drawn before the table is idle
            await pilot.pause(0.05)
            assert problem in text_of_rows(app.export_screenshot())
