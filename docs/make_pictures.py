"""`make pictures`: the pictures of screens in docs/assets, from a run of `ftis-node demo --llm`.

    python docs/make_pictures.py DEMO_OUT [--out docs/assets]

| file | shows |
|---|---|
| dashboard.svg | the first screen of the demo's node `full`, while it trains |
| swarm.svg | the view of the whole swarm, at the same time |
| status.svg | `ftis-node status`, at the same time |
| group.svg | one group, with its completions |
| report.png | the head of `ftis-node report`, by headless Chromium; left as it is without it |
| demo-curves.png | the demo's accuracy and rewards |

The SVG files load nothing from a network, because the links to fonts are removed.

A picture is stale if it has a word that no screen has today: tests/documented/test_pictures.py.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ftis_node.config.home import Home
from ftis_node.dashboard.app import DashboardApp
from ftis_node.dashboard.widgets import TextLines
from ftis_node.telemetry.events import read_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from textual.pilot import Pilot

ASSETS = Path(__file__).parent / "assets"
NODE = "home-full"
STEP = 25  # of the demo; pictured late, because directory records are renewed every 30 s only
SIZE = (120, 38)  # columns and rows of the terminal
SWARM_SIZE = (120, 14)
REPORT_SIZE = (1000, 900)  # pixels
READ_LIMIT_S = 60.0
FONT_FACES = re.compile(r"@font-face \{[^}]*\}\s*")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# For a picture of a local file: it works as root, and the browser makes no requests.
CHROMIUM_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a demo, and make the pictures of docs/assets from it.")
    parser.add_argument("demo", type=Path, help="folder for the demo: new, or of a demo that can be replaced")
    parser.add_argument("--out", type=Path, default=ASSETS)
    options = parser.parse_args()
    out = options.out.resolve()
    options.demo.mkdir(parents=True, exist_ok=True)
    os.chdir(options.demo)  # so that no picture shows the path of this machine
    home = Home(Path(NODE))
    shutil.rmtree(home.root, ignore_errors=True)
    with subprocess.Popen([sys.executable, "-m", "ftis_node", "demo", "--llm", "--out", "."]) as demo:
        try:
            wait_for_step(home, demo)
            asyncio.run(picture_dashboard(home, out))
            asyncio.run(picture_swarm(home, out))
            picture_status(out)
            if demo.wait() != 0:
                sys.exit("the demo failed: no more pictures")
        finally:
            demo.terminate()
    asyncio.run(picture_group(home, out))
    picture_report(out)
    shutil.copy("curves.png", out / "demo-curves.png")


def wait_for_step(home: Home, demo: subprocess.Popen[bytes]) -> None:
    """Wait until the node has done `STEP` steps. Exits if the demo ends before."""
    while not (home.events.exists() and any(event["step"] >= STEP for event in read_events(home.events, name="step"))):
        if demo.poll() is not None:
            sys.exit(f"the demo ended before step {STEP}")
        time.sleep(0.5)


@asynccontextmanager
async def dashboard_of(home: Home) -> AsyncIterator[tuple[DashboardApp, Pilot[None]]]:
    """A dashboard that has read the node and its events."""
    app = DashboardApp(home)
    async with app.run_test(size=SIZE) as pilot, asyncio.timeout(READ_LIMIT_S):
        while app.snapshot is None or not app.snapshot.history.events:
            await pilot.pause(0.1)
        await pilot.pause(1.0)
        yield app, pilot


async def picture_dashboard(home: Home, out: Path) -> None:
    """Write the first screen."""
    async with dashboard_of(home) as (app, _):
        write(out / "dashboard.svg", app.export_screenshot(title="ftis-node dashboard"))


async def picture_swarm(home: Home, out: Path) -> None:
    """Write the view of the swarm as this node sees it."""
    app = DashboardApp(home, is_swarm=True)
    async with app.run_test(size=SWARM_SIZE) as pilot, asyncio.timeout(READ_LIMIT_S):
        while not app.query_one("#learning", TextLines).lines:
            await pilot.pause(0.1)
        await pilot.pause(0.5)
        write(out / "swarm.svg", app.export_screenshot(title="ftis-node dashboard --swarm"))


async def picture_group(home: Home, out: Path) -> None:
    """Write the newest group."""
    async with dashboard_of(home) as (app, pilot):
        for key in ("g", "enter"):
            await pilot.press(key)
            await pilot.pause(0.5)
            while any(worker.group == "buffer" and not worker.is_finished for worker in app.workers):
                await pilot.pause(0.1)
            await pilot.pause(0.5)
        write(out / "group.svg", app.export_screenshot(title="ftis-node dashboard: a group"))


def picture_status(out: Path) -> None:
    """Write what `ftis-node status` prints."""
    printed = ftis_node("status", "--home", NODE)
    console = Console(record=True, width=SIZE[0], file=io.StringIO())
    console.print(Text("$ ftis-node status\n") + Text.from_ansi(printed))
    write(out / "status.svg", console.export_svg(title="ftis-node status"))


def picture_report(out: Path) -> None:
    """Write the head of the report, if there is a Chromium."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        sys.stderr.write("no Chromium here: report.png is left as it is\n")
        return
    page = Path("report.html").resolve()
    ftis_node("report", "--home", NODE, "--out", str(page))
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                *CHROMIUM_OPTIONS,
                f"--user-data-dir={profile}",
                f"--window-size={REPORT_SIZE[0]},{REPORT_SIZE[1]}",
                f"--screenshot={out / 'report.png'}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


def ftis_node(*words: str) -> str:
    """Run a command, and return what it prints."""
    command = [sys.executable, "-m", "ftis_node", *words]
    wide = os.environ | {"COLUMNS": str(SIZE[0])}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=wide).stdout


def write(picture: Path, svg: str) -> None:
    picture.write_text(FONT_FACES.sub("", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
