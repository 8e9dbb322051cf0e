"""`dashboard --swarm` is one screen with the rows of all peers, or with the reason why they are missing."""

from __future__ import annotations

import json
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.dashboard.app import DashboardApp
from ftis_node.dashboard.widgets import TextLines
from ftis_node.swarm.overview import RunSummary, SwarmRow, SwarmView
from ftis_node.view.spans import text_of

ROW = SwarmRow(
    "12D3KooWpeer0001", "an\x1bn", "full", "org/tiny", 1, "1", 0.0, 60.0, step=3, learns_from={"12D3KooWpeer0001": 0.4}
)


async def _shown(home: Path) -> str:
    app = DashboardApp(Home(home), is_swarm=True)
    async with app.run_test() as pilot:
        for _ in range(200):
            await pilot.pause(0.05)
            text = "\n".join(map(text_of, app.query_one("#text", TextLines).lines))
            if "reading" not in text:
                return text
    raise AssertionError("the screen has read nothing")


async def test_the_screen_shows_rows_and_the_matrix(tmp_path: Path) -> None:
    view = SwarmView(RunSummary("ab" * 16, task="arithmetic"), 1.0, (ROW,))
    Home(tmp_path).status.write_text(json.dumps({"swarm_view": [view.as_dict()]}))
    text = await _shown(tmp_path)
    assert "task arithmetic" in text and "an\\x1bn" in text and "tiny" in text and "40 %  " in text and "60 %" in text


async def test_the_screen_shows_why_there_is_no_view(tmp_path: Path) -> None:
    assert await _shown(tmp_path) == f"no node has run in {tmp_path}: give its home with --home"
    Home(tmp_path).status.write_text(json.dumps({"swarm_view": [1]}))
    assert "Expected" in await _shown(tmp_path)
