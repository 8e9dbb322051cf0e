"""`ftis-node dashboard` where it cannot show anything, its first paint, and `--web`: the page, and who is refused."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import ClientSession, CookieJar

from ftis_node.cli.app import run
from ftis_node.dashboard.web import new_token, refusal_of, warning_of
from tests.dashboard.browser import CHROMIUM, browse
from tests.dashboard.made_up import STATUS
from tests.node.support import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = [sys.executable, "-m", "ftis_node", "dashboard"]
LEAST_PICTURE_BYTES = 12_000  # an empty page has 4 kB


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What a node left behind that was stopped."""
    (tmp_path / "status.json").write_bytes(STATUS.to_json())
    return tmp_path


@contextmanager
def _served(home: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """The URL of a dashboard that is being served, as the command says it."""
    port = free_port()
    command = [*COMMAND, "--home", str(home), "--web", "--port", str(port), "--host", host]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = next(line for line in server.stderr if "the dashboard is at" in line)
        try:
            yield said.split()[4]
        finally:
            server.terminate()


async def _page(session: ClientSession, url: str) -> str:
    for _ in range(200):  # the line is printed just before the port opens
        try:
            async with session.get(url) as answer:
                return await answer.text()
        except OSError:
            await asyncio.sleep(0.05)
    raise AssertionError("the page is not served")


def test_before_any_node_ran_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboard", "--home", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (f"ftis-node: no node has run in {tmp_path}: give its home with --home\n")


def test_without_a_terminal_it_says_what_to_use(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboard", "--home", str(home)]) == 2
    assert "ftis-node status" in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["dashboard", "--home", str(home), "--web", "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be opened" in capsys.readouterr().err


def test_once_paints_and_ends_and_loads_nothing_heavy(home: Path) -> None:
    code = (
        "import sys; from ftis_node.cli.app import run;"
        f"code = run(['dashboard', '--home', {str(home)!r}, '--once']);"
        "heavy = set(sys.modules) & {'torch', 'transformers', 'plotext', 'tokenizers', 'numpy', 'aiohttp', 'psutil'};"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    outer, inner = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    painted = b""
    while True:
        try:
            painted += os.read(outer, 65536)
        except OSError:  # the other side was closed
            break
    os.close(outer)
    assert process.wait() == 0, painted.decode()
    assert b"snapshot" in painted


@pytest.mark.parametrize(
    ("host", "origin", "is_refused"),
    [
        ("127.0.0.1:8642", None, False),
        ("127.0.0.1:8642", "http://127.0.0.1:8642", False),
        ("localhost:9000", "http://localhost:9000", False),  # through a tunnel
        ("[::1]:8642", None, False),
        ("127.0.0.1:8642", "http://evil.example", True),
        ("127.0.0.1:8642", "null", True),
        ("evil.example:8642", "http://evil.example:8642", True),  # a name that was pointed at this machine
    ],
)
def test_other_sites_are_refused(host: str, origin: str | None, is_refused: bool) -> None:
    assert (refusal_of(bound_to="127.0.0.1", host=host, origin=origin) is not None) == is_refused


def test_opening_it_to_the_network_is_said_plainly() -> None:
    assert warning_of("127.0.0.1", 8642) is None
    assert "the connection is not encrypted" in (warning_of("0.0.0.0", 8642) or "")
    assert (new_token("127.0.0.1"), new_token("localhost")) == (None, None)
    assert refusal_of(bound_to="0.0.0.0", host="gpu-box:8642", origin="http://gpu-box:8642") is None


async def test_the_page_asks_nobody_else_and_the_websocket_shows_the_screen(home: Path) -> None:
    with _served(home) as url:
        async with ClientSession() as session:
            page = await _page(session, url)
            assert "https:" not in page.replace('"https:"', "") and "textual.js" in page
            async with session.get(f"{url}/ws", headers={"Origin": "http://evil.example"}) as answer:
                assert answer.status == 403
            async with session.ws_connect(f"{url}/ws?width=80&height=24", origin=url) as screen:
                shown = ""
                while "last known" not in shown and "start it again" not in shown:
                    message = await screen.receive(timeout=30)
                    assert isinstance(message.data, bytes | str), message
                    data = message.data
                    shown += data if isinstance(data, str) else data.decode(errors="replace")
                    shown = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", shown)
    assert "contributing" in shown


async def test_beyond_this_machine_it_asks_for_the_token_of_the_address_that_was_printed(home: Path) -> None:
    with _served(home, "0.0.0.0") as said:
        address, token = said.replace("0.0.0.0", "127.0.0.1").split("/?token=")
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:  # also for an address without a name
            assert "open the address" in await _page(session, address)
            for path in ("/ws", "/static/js/textual.js", f"/?token={token[:-1]}", "/ws?token="):
                async with session.get(f"{address}{path}") as answer:
                    assert answer.status == 401, path
            async with session.get(f"{address}/?token={token}") as answer:
                assert (answer.status, str(answer.url)) == (200, f"{address}/")
                assert "textual.js" in await answer.text()
            async with session.get(f"{address}/static/js/textual.js") as answer:
                assert answer.status == 200
        async with ClientSession(cookies={"ftis-dashboard-0": token}) as session, session.get(address) as answer:
            assert answer.status == 401


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: `apt-get install chromium`")
@pytest.mark.parametrize("width", [500, 1400])  # a headless browser has no narrower window
async def test_a_browser_shows_it(home: Path, width: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    with _served(home) as url:
        async with ClientSession() as session:
            await _page(session, url)
        async with browse(url, tmp_path_factory.mktemp("browser"), width=width, height=900) as page:
            async with asyncio.timeout(40):
                while len(picture := await page.picture()) < LEAST_PICTURE_BYTES:
                    await page.value("0")  # the picture itself takes its time
            loaded = await page.value("performance.getEntriesByType('resource').map(entry => entry.name).join(' ')")
            assert all(name.startswith(url) for name in loaded.split())
            assert await page.value("document.activeElement.className") == "xterm-helper-textarea"
            assert await page.value("getComputedStyle(document.querySelector('.starting')).display") == "none"
            screen = "document.querySelector('.xterm-screen').getBoundingClientRect()"
            assert 0 <= await page.value(f"innerWidth - {screen}.right") < 80
            assert 0 <= await page.value(f"innerHeight - {screen}.bottom") < 40
            assert await page.value("document.documentElement.scrollWidth <= innerWidth")
    assert picture.startswith(b"\x89PNG")
