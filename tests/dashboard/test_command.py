"""`ftis-node dashboard` without a node or a terminal, with `--once`, and with `--web`: its page and access control."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import ClientSession, CookieJar

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.dashboard.watcher import Watcher
from ftis_node.dashboard.web import refusal_of, warning_of
from ftis_node.errors import FtisError
from ftis_node.node.http_api.node_client import read_document
from tests.dashboard.sample_node import STATUS
from tests.node.support import free_port
from tests.waiting import eventually

STEP = '{{"time":{0}.0,"event":"step","step":{0},"reward_mean":0.5}}\n'
COMMAND = [sys.executable, "-m", "ftis_node", "dashboard"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a stopped node."""
    (tmp_path / "status.json").write_bytes(STATUS.to_json())
    return tmp_path


@contextmanager
def _served(home: Path, host: str = "127.0.0.1", *options: str) -> Iterator[str]:
    """Serve the dashboard; give the URL that the command prints."""
    port = free_port()
    command = [*COMMAND, "--home", str(home), "--web", "--port", str(port), "--host", host, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        printed = next(line for line in server.stderr if "the dashboard is at" in line)
        try:
            yield printed.split()[4]
        finally:
            server.terminate()


async def _page(session: ClientSession, url: str) -> str:
    """Return the page as soon as it is served: the command prints its line before the port opens."""

    async def fetch() -> str | None:
        try:
            async with session.get(url) as response:
                return await response.text()
        except OSError:
            return None

    return str(await eventually(fetch))


def test_a_home_without_a_status_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboard", "--home", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (f"ftis-node: no node has run in {tmp_path}: give its home with --home\n")


def test_the_error_without_a_terminal_names_status(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboard", "--home", str(home)]) == 2
    assert "ftis-node status" in capsys.readouterr().err


def test_a_port_in_use_is_a_one_line_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["dashboard", "--home", str(home), "--web", "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be opened" in capsys.readouterr().err


def test_once_prints_one_screen_and_loads_no_large_module(home: Path) -> None:
    code = (
        "import sys; from ftis_node.cli.app import run;"
        f"code = run(['dashboard', '--home', {str(home)!r}, '--once']);"
        "large = set(sys.modules) & {'torch', 'transformers', 'plotext', 'tokenizers', 'numpy', 'aiohttp', 'psutil'};"
        "sys.exit(f'loaded {large}' if large else code)"
    )
    leader, follower = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    output = b""
    while True:
        try:
            output += os.read(leader, 65536)
        except OSError:  # the follower is closed
            break
    os.close(leader)
    assert process.wait() == 0, output.decode()
    assert b"snapshot" in output


@pytest.mark.parametrize(
    ("host", "origin", "is_refused"),
    [
        ("127.0.0.1:8642", None, False),
        ("127.0.0.1:8642", "http://127.0.0.1:8642", False),
        ("localhost:9000", "http://localhost:9000", False),  # through an SSH tunnel
        ("[::1]:8642", None, False),
        ("127.0.0.1:8642", "http://evil.example", True),
        ("127.0.0.1:8642", "null", True),
        ("evil.example:8642", "http://evil.example:8642", True),  # DNS rebinding: a foreign name of this machine
    ],
)
def test_requests_of_other_sites_are_refused(host: str, origin: str | None, is_refused: bool) -> None:
    assert (refusal_of(bound_to="127.0.0.1", host=host, origin=origin) is not None) == is_refused


def test_a_warning_belongs_to_addresses_of_the_network() -> None:
    assert warning_of("127.0.0.1", 8642) is None
    assert "the connection is not encrypted" in (warning_of("0.0.0.0", 8642) or "")
    assert refusal_of(bound_to="0.0.0.0", host="gpu-box:8642", origin="http://gpu-box:8642") is None


async def test_the_page_loads_nothing_from_other_hosts_and_the_websocket_sends_the_screen(home: Path) -> None:
    with _served(home) as printed:
        url = printed.split("/?token=")[0]
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
            page = await _page(session, printed)
            assert "https:" not in page.replace('"https:"', "") and "textual.js" in page
            async with session.get(f"{url}/curves") as response:
                assert "The curves begin after two steps" in await response.text()
            home.joinpath("events.jsonl").write_text("".join(map(STEP.format, (1, 2))))
            async with session.get(f"{url}/curves") as response:
                assert (await response.text()).count("data:image/svg+xml") == 1
            async with session.get(f"{url}/ws", headers={"Origin": "http://evil.example"}) as response:
                assert response.status == 403
            async with session.ws_connect(f"{url}/ws?width=80&height=24", origin=url) as screen:
                shown = ""
                while "last known" not in shown and "start it again" not in shown:
                    message = await screen.receive(timeout=30)
                    assert isinstance(message.data, bytes | str), message
                    data = message.data
                    shown += data if isinstance(data, str) else data.decode(errors="replace")
                    shown = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", shown)
    assert "contributing" in shown and "reward of a step" not in shown, "the page has the curves"


async def test_the_swarm_is_a_page_and_its_errors_are_one_line(home: Path) -> None:
    with _served(home, "127.0.0.1", "--swarm") as printed:
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
            page = await _page(session, printed)
            assert "No run yet" in page and 'http-equiv="refresh"' in page and "<script" in page
            home.joinpath("status.json").write_text('{"swarm_view": [1]}')
            async with session.get(printed.split("?")[0]) as response:
                assert (response.status, "cannot be read" in await response.text()) == (503, True)


async def test_the_page_needs_the_token_of_the_printed_address(home: Path) -> None:
    """Another user of the machine can reach the port, but not read the home."""
    with _served(home, "0.0.0.0") as printed:
        address, token = printed.replace("0.0.0.0", "127.0.0.1").split("/?token=")
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:  # stores cookies of IP addresses too
            assert "open the address" in await _page(session, address)
            for path in ("/ws", "/curves", "/static/js/textual.js", f"/?token={token[:-1]}", "/ws?token="):
                async with session.get(f"{address}{path}") as response:
                    assert response.status == 401, path
            async with session.get(f"{address}/?token={token}") as response:
                assert (response.status, str(response.url)) == (200, f"{address}/")
                assert "textual.js" in await response.text()
                assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
            async with session.get(f"{address}/static/js/textual.js") as response:
                assert response.status == 200
        async with ClientSession(cookies={"ftis-dashboard-0": token}) as session, session.get(address) as response:
            assert response.status == 401


def test_a_home_whose_lock_cannot_be_opened_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in `poll` would end the dashboard."""

    def refuse(home: Home) -> bool:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "status.json").write_bytes(STATUS.to_json())
    monkeypatch.setattr(Home, "is_held", refuse)
    snapshot = Watcher(Home(tmp_path)).poll()
    assert "Permission denied" in snapshot.problem and not snapshot.is_live


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n{", b"\0\r\n\r\n"])
def test_an_answer_of_a_node_that_is_killed_in_it_is_a_problem(tmp_path: Path, answer: bytes) -> None:
    """Each answer of the port is cut, or is no HTTP."""
    home = Home(tmp_path / "home")
    with socket.create_server(("127.0.0.1", 0)) as port, home.owned():

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = port.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        home.publish_address(f"http://127.0.0.1:{port.getsockname()[1]}")
        try:
            with pytest.raises(FtisError, match="does not answer"):
                read_document(home, "/status")
            assert "does not answer" in Watcher(home).poll().problem
        finally:
            port.shutdown(socket.SHUT_RDWR)
            thread.join()
