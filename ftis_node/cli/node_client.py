"""Client of a node: the local port of a running node, or the files of a stopped one."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from ftis_node.config.home import TOKEN_HEADER
from ftis_node.errors import ConfigError, FileError, FtisError, UsageError
from ftis_node.files import read_object, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftis_node.config.home import Home

TIMEOUT_S = 5.0
OK = 200


def read_document(home: Home, path: str, *, timeout_s: float = TIMEOUT_S) -> Any:
    """Return `/status`, `/peers` or `/swarm` of the node on this home. Raises ConfigError if no node has run there.

    For a node that is stopped or still starting, it returns the last documents in the home.
    """
    url = home.running_url()
    if url is not None:
        try:
            status, document = _call(url, "GET", path, timeout_s)
        except FtisError:
            if not _has_ended(home):
                raise
        else:
            if status != OK:
                raise ConfigError(f"the node at {url} has no {path}: a bootstrap node serves only `ftis-node swarm`")
            return document
    is_held = home.is_held()
    if is_held and not home.status.exists():
        return _as_starting({}) if path == "/status" else []
    if not home.status.exists():
        raise ConfigError(f"no node has run in {home.root}: give its home with --home")
    saved = _last_words(home)
    peers, swarm = saved.pop("peers", []), saved.pop("swarm_view", [])
    if path != "/status":
        return swarm if path == "/swarm" else peers
    if is_held:
        return _as_starting(saved) if url is None else _as_stopping(saved)
    return _as_stopped(saved, home)


def _has_ended(home: Home) -> bool:
    """Return whether the node that closed its port has ended, or has saved its last status and is about to end."""
    if not home.is_held():
        return True
    try:
        node = read_object(home.status).get("node")
    except (OSError, FileError):
        return False
    return isinstance(node, dict) and bool(node.get("end"))


def repeated(read: Callable[[], Any], interval_s: float) -> Iterator[Any]:
    """Yield what `read` returns, or its FtisError, every `interval_s`. Raises the ConfigError of the first read."""
    seen_before = False
    while True:
        try:
            yield read()
        except FtisError as error:
            if isinstance(error, ConfigError) and not seen_before:
                raise
            yield error
        seen_before = True
        time.sleep(interval_s)


def _last_words(home: Home) -> dict[str, Any]:
    """Return the last `status.json` of a stopped node. Raises ConfigError if it cannot be read."""
    try:
        return read_object(home.status)
    except FileNotFoundError as error:
        raise ConfigError(f"{home.status} cannot be read: {error.strerror}") from None
    except FileError as error:
        raise ConfigError(
            f"{home.status} is damaged: remove it; the next start of the node writes a new one ({error})"
        ) from None


def post_document(home: Home, path: str, document: dict[str, Any]) -> Any:
    """Send a change to the running node and return its answer. Raises UsageError with the node's message."""
    url = home.running_url()
    if url is None or not home.control_token.exists():
        raise ConfigError(f"no running node in {home.root} accepts changes")
    headers = {TOKEN_HEADER: read_text(home.control_token)}
    status, answer = _call(url, "POST", path, TIMEOUT_S, body=json.dumps(document), headers=headers)
    if status != OK:
        raise UsageError(str(answer.get("error", answer)))
    return answer


def _call(url: str, method: str, path: str, timeout_s: float, **content: Any) -> tuple[int, Any]:
    import http.client  # imports a mail parser, so load it only for a change
    from urllib.parse import urlsplit

    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=timeout_s)
    try:
        connection.request(method, path, **content)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, ValueError) as error:
        raise FtisError(f"the node at {url} does not answer ({error}): see its logs/") from None
    finally:
        connection.close()


def _as_starting(saved: dict[str, Any]) -> Any:
    from ftis_node.telemetry.status import Status, starting

    return json.loads(starting(Status.from_json(json.dumps(saved).encode())).to_json())


def _as_stopping(saved: dict[str, Any]) -> Any:
    from ftis_node.telemetry.status import Status, stopping

    return json.loads(stopping(Status.from_json(json.dumps(saved).encode())).to_json())


def _as_stopped(saved: dict[str, Any], home: Home) -> Any:
    from ftis_node.config.home_files import raised_budgets, start_command
    from ftis_node.telemetry.status import EndWord, Status, stopped

    status = stopped(Status.from_json(json.dumps(saved).encode()))
    is_finished = status.node.end == EndWord.FINISHED  # if the node did not finish, it did not use up its budget
    command = start_command(home, raised=raised_budgets(saved.get("budget", {})) if is_finished else None)
    return json.loads(stopped(status, resume=command).to_json())
