"""The snapshot of a node that cannot be read contains the reason."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.dashboard.watcher import Watcher
from ftis_node.errors import FtisError
from ftis_node.node.http_api.node_client import read_document
from tests.dashboard.sample_node import STATUS


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
