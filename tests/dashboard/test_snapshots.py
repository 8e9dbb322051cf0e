"""The screens of a made-up node are those that were looked at and kept in `snapshots/`.

After a wanted change: `FTIS_KEEP_SNAPSHOTS=1 pytest tests/dashboard/test_snapshots.py`, and look at the pictures.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.home import Home
from ftis_node.dashboard.app import DashboardApp
from tests.dashboard.made_up import RUNNING, STOPPED, watch
from tests.dashboard.svg_text import rows_of, text_of_rows

if TYPE_CHECKING:
    from ftis_node.dashboard.watcher import NodeSnapshot

SNAPSHOTS = Path(__file__).parent / "snapshots"
LOW, TALL = (80, 24), (160, 50)


@pytest.mark.parametrize(
    ("name", "snapshot", "size", "keys"),
    [
        ("running_80x24", RUNNING, LOW, []),
        ("running_120x40", RUNNING, (120, 40), []),
        ("running_160x50", RUNNING, TALL, []),
        ("stopped_80x24", STOPPED, LOW, []),
        ("peer_80x24", RUNNING, LOW, ["down", "enter"]),
        ("groups_80x24", RUNNING, LOW, ["g"]),
        ("group_80x24", RUNNING, LOW, ["g", "enter", "l"]),
        ("events_80x24", RUNNING, LOW, ["e", "a"]),
        ("help_80x24", STOPPED, LOW, ["question_mark"]),
    ],
)
async def test_screens_look_as_they_were_looked_at(
    name: str,
    snapshot: NodeSnapshot,
    size: tuple[int, int],
    keys: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch(monkeypatch, lambda: snapshot)
    app = DashboardApp(Home(tmp_path), period_s=600.0)
    async with app.run_test(size=size) as pilot:
        for key in ["", *keys]:
            if key:
                await pilot.press(key)
            await pilot.pause(0.05)
            while app.snapshot is None or any(
                worker.group == "load" and not worker.is_finished for worker in app.workers
            ):
                await pilot.pause(0.01)
            await pilot.pause(0.05)
        picture = app.export_screenshot()
    kept = SNAPSHOTS / f"{name}.svg"
    if os.environ.get("FTIS_KEEP_SNAPSHOTS"):
        kept.write_text(picture, encoding="utf-8")
    (tmp_path / kept.name).write_text(picture, encoding="utf-8")
    expected = kept.read_text(encoding="utf-8")
    assert text_of_rows(picture) == text_of_rows(expected)
    assert rows_of(picture) == rows_of(expected), f"the looks differ: compare {tmp_path / kept.name} with {kept}"
