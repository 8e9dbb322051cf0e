"""Client of a node: the local port of a running node, or the files of a stopped one.

Commands, dashboard and report all read a node here, so they agree on its state:

    another process holds the lock of the home --no--> stopped       values of status.json
                  | yes
    it has published its port -------------------no--> starting      values of status.json
                  | yes
    the port answers ----------------------------no--> FtisError, or stopping after its last status
                  | yes
                  `----------------------------------> running, or stopping
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ftis_node.config.home import TOKEN_HEADER
from ftis_node.errors import ConfigError, FileError, FtisError, UsageError
from ftis_node.files import read_object, read_text

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.telemetry.status import Status

TIMEOUT_S = 5.0
OK = 200
SAVED_AS = {"/peers": "peers", "/swarm": "swarm_view"}  # keys of status.json


def read_document(home: Home, path: str, *, timeout_s: float = TIMEOUT_S) -> Any:
    """Return `/status`, `/peers` or `/swarm` of the node on this home. Raises ConfigError if no node has run there.

    For a node that is stopped or still starting, it returns the last documents in the home. Raises FileError if their
    values have other types.
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
    saved = _saved(home, is_held=is_held)
    if path in SAVED_AS:
        return saved.get(SAVED_AS[path], [])
    from ftis_node.config.home_files import raised_budgets, start_command
    from ftis_node.telemetry.status import EndWord
    from ftis_node.telemetry.status_at_rest import at_rest

    last = _status_in(saved, home)
    if is_held:
        last = at_rest(last, "starting" if url is None else "stopping")
    else:
        last = at_rest(last, "stopped")
        is_finished = last.node.end == EndWord.FINISHED  # if the node did not finish, it did not use up its budget
        raised = raised_budgets(saved.get("budget", {})) if is_finished else None
        last = at_rest(last, "stopped", resume=start_command(home, raised=raised))
    return json.loads(last.to_json())


def read_status(home: Home) -> Status:
    """Return `/status` as a record. Raises as `read_document`, FileError also for that of a running node."""
    return _status_in(read_document(home, "/status"), home)


def _status_in(document: Any, home: Home) -> Status:
    import msgspec

    from ftis_node.telemetry.status import Status

    try:
        return msgspec.convert(document, Status)
    except msgspec.ValidationError as error:
        raise FileError(f"the status of the node in {home.root} cannot be read ({error}): start it again") from None


def _has_ended(home: Home) -> bool:
    """Return whether the node that closed its port has ended, or has saved its last status and is about to end."""
    if not home.is_held():
        return True
    try:
        node = read_object(home.status).get("node")
    except (OSError, FileError):
        return False
    return isinstance(node, dict) and bool(node.get("end"))


def _saved(home: Home, *, is_held: bool) -> dict[str, Any]:
    """Return `status.json`; {} if the first node of a home starts. Raises ConfigError if it cannot be read."""
    try:
        return read_object(home.status)
    except (FileNotFoundError, NotADirectoryError):
        if is_held:
            return {}
        raise ConfigError(f"no node has run in {home.root}: give its home with --home") from None
    except FileError as error:
        raise ConfigError(
            f"{home.status} is damaged: remove it; the next start of the node writes a new one ({error})"
        ) from None


def post_document(home: Home, path: str, document: dict[str, Any]) -> Any:
    """Send a change to the running node and return its answer. Raises UsageError with the node's message."""
    url = home.running_url()
    if url is None or not home.control_token.exists():
        raise ConfigError(f"no running node in {home.root} accepts changes: start it with `ftis-node join`")
    headers = {TOKEN_HEADER: read_text(home.control_token)}
    status, answer = _call(url, "POST", path, TIMEOUT_S, body=json.dumps(document), headers=headers)
    if status != OK:
        raise UsageError(str(answer.get("error", answer)))
    return answer


def _call(url: str, method: str, path: str, timeout_s: float, **content: Any) -> tuple[int, Any]:
    import http.client  # imports a mail parser, which `status` of a stopped node does not need
    from urllib.parse import urlsplit

    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=timeout_s)
    try:
        connection.request(method, path, **content)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FtisError(f"the node at {url} does not answer ({error}): see its logs/") from None
    finally:
        connection.close()
