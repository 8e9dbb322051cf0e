"""An HTTP port of a node or a dashboard, and its connections.

The port closes a connection that completes no header, or no further request, within REQUEST_S. At MAX_CONNECTIONS, a
new connection replaces the oldest one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ftis_node.errors import UsageError
from ftis_node.telemetry.log import RateLimitedLog

MAX_CONNECTIONS = 128
BACKLOG = 128  # the event loop accepts so many at once, even beyond MAX_CONNECTIONS
REQUEST_S = 10.0
REASONS = {401: "token", 403: "forbidden", 404: "unknown", 405: "unknown", 408: "slow", 413: "size", 504: "fault"}


@asynccontextmanager
async def open_port(
    app: web.Application, host: str, port: int, *, name: str, remedy: str, refused: Counter[str]
) -> AsyncIterator[int]:
    """Serve while the block runs; yield the port. `refused` counts refused requests and connections by reason.

    Raise UsageError, with `name` and `remedy`, if the port is taken.
    """

    async def count(request: web.Request, response: web.StreamResponse) -> None:
        if response.status in REASONS or 400 <= response.status < 500:
            refused[REASONS.get(response.status, "other")] += 1

    app.on_response_prepare.append(count)
    log = _ServerLog(refused)
    runner = web.AppRunner(app, access_log=None, logger=log, keepalive_timeout=REQUEST_S, shutdown_timeout=0.5)
    await runner.setup()
    server = runner.server
    assert server is not None, "the runner is set up"

    def connect() -> asyncio.BaseProtocol:
        connections = [connection for connection in server.connections if connection.transport is not None]
        for connection in connections[: max(0, len(connections) + 1 - MAX_CONNECTIONS)]:
            refused["crowded"] += 1
            connection.force_close()
        return server()

    try:
        try:
            listener = await asyncio.get_running_loop().create_server(connect, host, port, backlog=BACKLOG)
        except OSError as error:
            raise UsageError(f"{name} cannot be opened ({error.strerror}): {remedy}") from None
        with closing(listener):
            yield int(listener.sockets[0].getsockname()[1])
    finally:
        await runner.cleanup()


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log: count malformed requests, log other errors at most once a minute."""

    def __init__(self, refused: Counter[str]) -> None:
        super().__init__(logging.getLogger(__name__), {})
        self._refused, self._faults = refused, RateLimitedLog()

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        is_malformed = isinstance(exc_info, HttpProcessingError | ConnectionError)
        self._refused["malformed" if is_malformed else "fault"] += 1
        if not is_malformed and self._faults.is_due():
            self.error(msg, *args, exc_info=exc_info)

    debug = exception  # aiohttp's level for a first request without HTTP
