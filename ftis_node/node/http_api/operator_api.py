"""Routes of the local HTTP port that change a running node: `POST /peers/ban`, `/peers/unban`, `/peers/trust`.

    {"peer": "12D3Koo...", "for_s": 7200}  ->  200 {"peer_id": ..., "standing": ..., ...} | 4xx {"error": "one line"}

A web page that the operator visits can reach this port too. So each request must carry the token of the home (0600,
new at every start) in a custom header. A page cannot read the token, and the browser sends no custom header to a
server that did not allow it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from ftis_node.errors import UsageError
from ftis_node.files import check_no_folder, parse_json
from ftis_node.node.http_api.auth import is_same_secret
from ftis_node.node.peers.operator_actions import ACTIONS
from ftis_node.telemetry.secrets import keep_secret
from ftis_node.telemetry.terminal_text import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.node.peers.operator_actions import PeerControl

TOKEN_HEADER = "X-Ftis-Token"
TOKEN_BYTES = 16
MAX_REQUEST_BYTES = 4096
BODY_S = 10.0


def add_control(app: web.Application, control: PeerControl, token_file: Path) -> None:
    """Add the routes, and write a new token to `token_file`."""
    token = secrets.token_hex(TOKEN_BYTES)
    keep_secret(token)
    check_no_folder(token_file)
    token_file.unlink(missing_ok=True)
    descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    for action in ACTIONS:
        app.router.add_post(f"/peers/{action}", partial(_handle, control, action, token))


async def _handle(control: PeerControl, action: str, token: str, request: web.Request) -> web.Response:
    if not is_same_secret(request.headers.get(TOKEN_HEADER, ""), token):
        return _refused(f"this request needs the header {TOKEN_HEADER} with the token in the node's home", 403)
    if request.content_length is None or request.content_length > MAX_REQUEST_BYTES:
        return _refused(f"a request has at most {MAX_REQUEST_BYTES} bytes", 413)
    try:
        async with asyncio.timeout(BODY_S):
            asked = parse_json(await request.read(), source="the request")
        if not isinstance(asked, dict):
            raise UsageError("a request is a JSON object with the key `peer`")
        return web.json_response(control.change(action, asked))
    except TimeoutError:
        return _refused(f"a request is complete within {BODY_S:.0f} s", 408)
    except (UsageError, ValueError) as error:
        return _refused(one_line(str(error)), 400)


def _refused(line: str, status: int) -> web.Response:
    return web.json_response({"error": line}, status=status)
