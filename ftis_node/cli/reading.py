"""Reading a home from outside: the running node's local port, or what a stopped one left behind."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ftis_node.errors import ConfigError, FtisError

if TYPE_CHECKING:
    from ftis_node.config.home import Home

TIMEOUT_S = 5.0


def read_document(home: Home, path: str) -> Any:
    """`/status` or `/peers` of the node on this home. Raises ConfigError where no node ever ran there."""
    if url := home.running_url():
        return _get(url, path)
    if not home.status.exists():
        raise ConfigError(f"no node has run with the home {home.root}: give the right one with --home")
    saved = json.loads(home.status.read_text())
    peers = saved.pop("peers", [])
    return peers if path == "/peers" else _as_stopped(saved)


def _get(url: str, path: str) -> Any:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    except (OSError, ValueError) as error:
        raise FtisError(f"the node at {url} does not answer ({error}); look into its logs/") from None
    finally:
        connection.close()


def _as_stopped(saved: dict[str, Any]) -> dict[str, Any]:
    from ftis_node.telemetry.status import Status, stopped

    document: dict[str, Any] = json.loads(stopped(Status.from_json(json.dumps(saved).encode())).to_json())
    return document
