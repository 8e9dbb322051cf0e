"""`dashboard --swarm` is one screen with the rows of all peers, or with the reason why they are missing."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from ftis_node.config.home import Home
from ftis_node.dashboard.app import DashboardApp
from ftis_node.dashboard.widgets import RowsTable, TextLines
from ftis_node.swarm.overview import RunSummary, SwarmRow, SwarmView
from ftis_node.view.spans import text_of
from tests.dashboard.svg_text import text_of_rows

ROW = SwarmRow(
    "12D3KooWpeer0001", "an\x1bn", "full", "org/tiny", 1, "1", 0.0, 60.0, step=3, learns_from={"12D3KooWpeer0001": 0.4}
)


async def _shown(home: Path) -> str:
    app = DashboardApp(Home(home), is_swarm=True)
    async with app.run_test() as pilot:
        for _ in range(200):
            await pilot.pause(0.05)
            lines = [one for widget in app.query(TextLines) for one in widget.lines]
            text = "\n".join(map(text_of, lines))
            if "reading" not in text:
                await pilot.pause(0.3)  # the table paints its rows
                return text + text_of_rows(app.export_screenshot())
    raise AssertionError("the screen has read nothing")


async def test_the_screen_shows_rows_and_the_matrix(tmp_path: Path) -> None:
    view = SwarmView(RunSummary("ab" * 16, task="arithmetic"), 1.0, (ROW,))
    Home(tmp_path).status.write_text(json.dumps({"swarm_view": [view.as_dict()]}))
    text = await _shown(tmp_path)
    assert "task arithmetic" in text and "1 node, 0 active" in text and "tiny" in text
    assert "an\\x1bn       itself 40%, others 60%" in text


async def test_nodes_are_sorted_and_opened_and_runs_changed(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(ROW, peer_id="12D3KooWpeer0002", name="bob", tokens_per_minute=1.0, seen_at=5.0)
    views = [SwarmView(RunSummary(run * 16), 1.0, (slow, ROW), own_id=ROW.peer_id) for run in ("ab", "cd")]
    Home(tmp_path).status.write_text(json.dumps({"swarm_view": [view.as_dict() for view in views]}))
    app = DashboardApp(Home(tmp_path), is_swarm=True)
    async with app.run_test(size=(120, 30)) as pilot:
        table = app.query_one(RowsTable)
        await eventually_rows(pilot, table, [slow.peer_id, ROW.peer_id])
        await pilot.press("s", "s")
        await eventually_rows(pilot, table, [ROW.peer_id, slow.peer_id])
        assert "nodes, by tokens/min" in str(table.border_title)
        await pilot.press("n")
        assert "run cdcd" in text_of(app.query_one("#text", TextLines).lines[0])
        await pilot.press("up", "enter")
        await pilot.pause(0.2)
        lines = [text_of(one) for one in app.screen.query_one("#text", TextLines).lines]
        assert f"peer id     {ROW.peer_id}" in lines and "learners    bob" in lines


async def eventually_rows(pilot, table, keys) -> None:
    for _ in range(100):
        await pilot.pause(0.05)
        if [key.value for key in table.rows] == keys:
            return
    raise AssertionError([key.value for key in table.rows])


async def test_the_screen_shows_why_there_is_no_view(tmp_path: Path) -> None:
    assert f"no node has run in {tmp_path}: give its home with --home" in await _shown(tmp_path)
    Home(tmp_path).status.write_text(json.dumps({"swarm_view": [1]}))
    assert "Expected" in await _shown(tmp_path)
