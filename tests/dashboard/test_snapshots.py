"""The screens of a fixed node equal the reviewed ones in `snapshots/`.

After a deliberate change, run `FTIS_KEEP_SNAPSHOTS=1 pytest tests/dashboard/test_snapshots.py` and review the pictures.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.dashboard.app import DashboardApp
from ftis_node.view.snapshot import NodeSnapshot
from tests.dashboard.sample_node import RUNNING, STOPPED, use_snapshots
from tests.dashboard.svg_text import rows_of, text_of_rows

SNAPSHOTS = Path(__file__).parent / "snapshots"
LOW, TALL = (80, 24), (160, 50)
NUM_LOOKS = 100


@pytest.mark.parametrize(
    ("name", "snapshot", "size", "keys"),
    [
        ("running_80x24", RUNNING, LOW, []), ("running_160x50", RUNNING, TALL, []), ("stopped_80x24", STOPPED, LOW, []),
        ("peer_80x24", RUNNING, LOW, ["down", "enter"]), ("groups_80x24", RUNNING, LOW, ["g"]),
        ("group_80x24", RUNNING, LOW, ["g", "enter", "l"]), ("events_80x24", RUNNING, LOW, ["e", "a"]),
        ("help_80x24", STOPPED, LOW, ["question_mark"]),
    ],
)  # fmt: skip
async def test_screens_equal_their_snapshots(
    name: str,
    snapshot: NodeSnapshot,
    size: tuple[int, int],
    keys: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reviewed, keeps = SNAPSHOTS / f"{name}.svg", "FTIS_KEEP_SNAPSHOTS" in os.environ
    use_snapshots(monkeypatch, lambda: snapshot)
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
        for _ in range(NUM_LOOKS):  # on a busy machine the footer is drawn later
            screenshot = app.export_screenshot()
            if keeps or rows_of(screenshot) == rows_of(reviewed.read_text(encoding="utf-8")):
                break
            await pilot.pause(0.05)
    if keeps:
        reviewed.write_text(screenshot, encoding="utf-8")
    (tmp_path / reviewed.name).write_text(screenshot, encoding="utf-8")
    expected = reviewed.read_text(encoding="utf-8")
    assert text_of_rows(screenshot) == text_of_rows(expected)
    assert rows_of(screenshot) == rows_of(expected), (
        f"the styles differ: compare {tmp_path / reviewed.name} with {reviewed}"
    )
