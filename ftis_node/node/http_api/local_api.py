"""The local HTTP port: `/status`, `/peers`, `/swarm`, `/events`, and `/` with links to them.

`monitoring_api.py` adds metrics and health, `operator_api.py` adds changes.

It listens on 127.0.0.1, and answers only requests that name this machine as their host. Any user of this machine may
read. Changes require the token in the home.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from ftis_node.node.http_api.auth import own_names_only
from ftis_node.node.http_api.connection_limits import HttpGuard
from ftis_node.node.http_api.monitoring_api import MonitoringApi, add_probes
from ftis_node.node.http_api.operator_api import MAX_REQUEST_BYTES, add_control

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ftis_node.node.loops.status import StatusLoop
    from ftis_node.node.peers.operator_actions import PeerControl
    from ftis_node.node.peers.peer_table import PeerTable

HOST = "127.0.0.1"
EVENT_PERIOD_S = 1.0
INDEX_PATHS = ("/status", "/peers", "/events", "/metrics", "/healthz", "/readyz")
MAX_STREAMS = 32  # of `/events`; a client can keep its stream open for any time
WRITE_S = 10.0  # for a client to read one event


async def show_index(request: web.Request) -> web.Response:
    """Return links to the documents of this port."""
    links = "".join(f'<li><a href="{path}">{path}</a></li>' for path in INDEX_PATHS)
    page = f"<!doctype html><title>ftis-node</title><h1>ftis-node</h1><ul>{links}</ul>"
    return web.Response(text=page, content_type="text/html")


class LocalApi:
    """Handlers over the status loop's latest snapshot, the peer table and the operator's actions."""

    def __init__(self, status: StatusLoop, peer_table: PeerTable, *, control: PeerControl, token_file: Path) -> None:
        """`token_file` gets a new token when the port opens. Requests for changes must contain it."""
        self._status = status
        self._peer_table = peer_table
        self._control = control
        self._token_file = token_file
        self._num_streams = 0

    async def show_status(self, request: web.Request) -> web.Response:
        """Return the snapshot."""
        return web.Response(body=self._status.latest.to_json(), content_type="application/json")

    async def show_peers(self, request: web.Request) -> web.Response:
        """Return the peer table."""
        return web.json_response(self._peer_table.rows())

    async def show_swarm(self, request: web.Request) -> web.Response:
        """Return the view of the swarm, in a list."""
        return web.json_response([self._peer_table.swarm().as_dict()])

    async def stream_events(self, request: web.Request) -> web.StreamResponse:
        """Stream the snapshot as server-sent events, one per second, until the client leaves or stops reading."""
        if self._num_streams >= MAX_STREAMS:
            return web.Response(status=503, text=f"{MAX_STREAMS} clients read /events already: end one\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self._num_streams += 1
        try:
            await response.prepare(request)
            while True:
                async with asyncio.timeout(WRITE_S):
                    await response.write(b"data: " + self._status.latest.to_json() + b"\n\n")
                await asyncio.sleep(EVENT_PERIOD_S)
        except ConnectionError:
            return response
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return response
        finally:
            self._num_streams -= 1

    @asynccontextmanager
    async def serve(self, *, port: int) -> AsyncIterator[str]:
        """Serve while the block runs; yield the base URL. Raise UsageError if the port is taken."""
        app = web.Application(middlewares=[own_names_only], client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/", show_index)
        app.router.add_get("/status", self.show_status)
        app.router.add_get("/peers", self.show_peers)
        app.router.add_get("/swarm", self.show_swarm)
        app.router.add_get("/events", self.stream_events)
        add_probes(app, MonitoringApi(self._status))
        add_control(app, self._control, self._token_file)
        async with HttpGuard(self._status.http_refused).serving(app, HOST, port) as url:
            yield url
